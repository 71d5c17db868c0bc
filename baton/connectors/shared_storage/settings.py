"""Settings of the shared storage: `kv_connector_extra_config`, typed and checked once.

{"path": "/mnt/kv", "max_gib": 200, "max_age_s": 604800, "chunk_tokens": 256}
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from baton.connectors.extra_config import FIELD
from baton.core.errors import ConfigError

CHUNK_TOKENS = 256


class StorageSettings(msgspec.Struct, frozen=True, kw_only=True):
    path: str  # A folder that all engines share; created if it does not exist.
    max_gib: float | None = None  # Size of all files under `path`, from any engine; None: no limit.
    max_age_s: float | None = None  # Since a file was written or last used; None: no limit.
    # Tokens of one file, a multiple of the block size; None: the first multiple from CHUNK_TOKENS on. Engines
    # share files only if they have the same value. Larger files load faster, smaller ones hit more often.
    chunk_tokens: int | None = None
    io_threads: int = 2  # Reader threads of one rank. One more thread writes.
    backlog_max_mib: int = 1024  # Copies of one rank that wait to be written; further ones are not saved.
    fsync: bool = True  # Survive a crash of the machine, not only of the process.
    lookup_timeout_s: float = 1.0  # How long a prompt waits for its lookup; then it is computed.
    load_timeout_s: float = 60.0  # For one prompt; then it is computed.
    # For one file. A read that takes longer hangs, and its prompt is computed. While all readers hang, no
    # prompt waits for a file.
    read_timeout_s: float = 5.0
    # Files and folders are created for their owner only (0600, 0700), or also for its group (0660, 0770).
    group_access: bool = False
    sweep_every_s: float = 30.0  # Interval of sweeps, which evict by age and size.
    shutdown_timeout_s: float = 5.0  # To finish writing.

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
        """Tokens of a chunk. Raises ConfigError if the setting does not fit the block size."""
        if self.chunk_tokens is None:
            return -(-CHUNK_TOKENS // block_tokens) * block_tokens
        if self.chunk_tokens % block_tokens:
            raise ConfigError(
                f"must be a multiple of the block size, {block_tokens}", field=f"{FIELD}.chunk_tokens"
            )
        return self.chunk_tokens
