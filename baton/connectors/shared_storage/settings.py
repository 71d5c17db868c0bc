"""Settings of the shared storage: `kv_connector_extra_config`, typed and checked once.

{"path": "/mnt/kv", "max_gib": 200, "max_age_s": 604800, "chunk_tokens": 256}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from baton.connectors.extra_config import FIELD, parse_extra
from baton.core.errors import ConfigError

CHUNK_TOKENS = 256


class StorageSettings(msgspec.Struct, frozen=True, kw_only=True):
    path: str  # A folder that all engines see; made if it is not there.
    max_gib: float | None = None  # Of all files under `path`, whoever wrote them; None: no limit.
    max_age_s: float | None = None  # Since a file was written or last used; None: no limit.
    # Of one file, a multiple of the block size; None: the first one from CHUNK_TOKENS on. Engines share
    # files only if they agree. Larger ones are read faster, smaller ones are found more often.
    chunk_tokens: int | None = None
    io_threads: int = 2  # Of one rank, that load. One more writes.
    backlog_max_mib: int = 1024  # Copies of one rank that wait to be written; what is beyond is not saved.
    fsync: bool = True  # Survive the machine's crash too, not only the process's.
    lookup_timeout_s: float = 1.0  # How long a prompt waits to hear what is stored; then it is computed.
    load_timeout_s: float = 60.0  # Of one prompt; then it is computed.
    # Of one file. A read that takes longer hangs: its prompt is computed. While every reader hangs, no prompt
    # waits for a file.
    read_timeout_s: float = 5.0
    # Files and folders are made for their owner only (0600, 0700), or for the owner's group too (0660, 0770).
    group_access: bool = False
    sweep_every_s: float = 30.0  # How often too much and too old files are looked for.
    shutdown_timeout_s: float = 5.0  # For what is still being written.

    def __post_init__(self) -> None:
        if not Path(self.path).is_absolute():
            raise ConfigError("must be an absolute path", field=f"{FIELD}.path")
        for name in (
            "max_gib",
            "max_age_s",
            "lookup_timeout_s",
            "load_timeout_s",
            "read_timeout_s",
            "sweep_every_s",
        ):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError("must be positive", field=f"{FIELD}.{name}")
        for name in ("io_threads", "backlog_max_mib", "chunk_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError("must be at least 1", field=f"{FIELD}.{name}")
        if not self.shutdown_timeout_s >= 0:
            raise ConfigError("must not be negative", field=f"{FIELD}.shutdown_timeout_s")

    @property
    def max_bytes(self) -> int | None:
        return None if self.max_gib is None else int(self.max_gib * (1 << 30))

    def chunk_tokens_of(self, block_tokens: int) -> int:
        """Raises ConfigError if what is configured cannot be."""
        if self.chunk_tokens is None:
            return -(-CHUNK_TOKENS // block_tokens) * block_tokens
        if self.chunk_tokens % block_tokens:
            raise ConfigError(
                f"must be a multiple of the block size, {block_tokens}", field=f"{FIELD}.chunk_tokens"
            )
        return self.chunk_tokens

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Self:
        """Raises ConfigError naming the key."""
        return parse_extra(cls, extra)
