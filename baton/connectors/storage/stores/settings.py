"""Settings of the shared storage: `kv_connector_extra_config`, typed and checked once.

{"path": "/mnt/kv", "max_gib": 200, "max_age_s": 604800, "chunk_tokens": 256}
{"tiers": [{"type": "files", "path": "/ssd/kv", "max_gib": 200}, {"type": "objects", "url": "s3://bucket/kv"}]}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from baton.connectors.extra_config import FIELD, check_at_least_one, check_positive, check_share
from baton.core.errors import ConfigError
from baton.stores.chunks.transfers import TransferSettings

CHUNK_TOKENS = 256
GIB = 1 << 30
DAY_S = 86_400


class LimitedTier(msgspec.Struct, frozen=True, kw_only=True):
    """A store that sweeps keep within limits."""

    # Size of all that is in the store, from any engine. None: no limit; a bucket may have lifecycle rules.
    max_gib: float | None = None
    max_age_s: float | None = None  # Age since a chunk was written or last used; None: no limit.
    # Share of max_gib that chunks of one tenant may take; None: no limit.
    tenant_max_share: float | None = None
    # Time since any engine with limits on the store used a namespace, which is a model with its layout and
    # secret. After this time a sweep removes the namespace's chunks. At least a day; None: they stay.
    unused_namespaces_s: float | None = None
    write_max_mib_s: float | None = None  # Write rate of one engine; None: no limit.

    def __post_init__(self) -> None:
        check_positive(self, "max_gib", "max_age_s", "write_max_mib_s")
        if self.unused_namespaces_s is not None and self.unused_namespaces_s < DAY_S:
            raise ConfigError(
                f"must be at least a day, {DAY_S}: engines mark what they use every hour, and may be "
                "restarted",
                field=f"{FIELD}.unused_namespaces_s",
            )
        check_share(self, "tenant_max_share")
        if self.tenant_max_share is not None and self.max_gib is None:
            raise ConfigError("is a share of max_gib; set max_gib", field=f"{FIELD}.tenant_max_share")


class FilesTier(LimitedTier, frozen=True, kw_only=True, tag="files", tag_field="type"):
    """A folder, on a local disk or shared by hosts (`baton.stores.backends.files`)."""

    path: str  # Created if it does not exist.
    fsync: bool = True  # Survive a crash of the machine, not only of the process.
    direct: bool = False  # Direct I/O, without the page cache, where the file system allows it.
    # Files and folders are created for their owner only (0600, 0700), or also for its group (0660, 0770).
    group_access: bool = False

    def __post_init__(self) -> None:
        if not Path(self.path).is_absolute():
            raise ConfigError("must be an absolute path", field=f"{FIELD}.path")
        super().__post_init__()


class ObjectsTier(LimitedTier, frozen=True, kw_only=True, tag="objects", tag_field="type"):
    """A bucket (`baton.stores.backends.objects`)."""

    url: str  # s3://bucket/prefix, gs://, az://, file:///, memory:///
    # Options of the client, as strings: credentials, endpoint, region. An error names the one that is wrong.
    options: dict[str, Any] = {}
    timeout_s: float = 5.0  # Timeout of one request.

    def __post_init__(self) -> None:
        check_positive(self, "timeout_s")
        super().__post_init__()


class RedisTier(msgspec.Struct, frozen=True, kw_only=True, tag="redis", tag_field="type"):
    """A Redis or Valkey server (`stores.backends.redis`), which evicts by its own `maxmemory-policy`."""

    url: str  # redis://, rediss://, unix://
    timeout_s: float = 2.0  # Timeout of one command.
    ttl_s: float | None = None  # Time since a value was written or last used; None: no limit.
    write_max_mib_s: float | None = None  # The same as in FilesTier.

    def __post_init__(self) -> None:
        check_positive(self, "timeout_s", "ttl_s", "write_max_mib_s")


StoredTier = FilesTier | ObjectsTier | RedisTier


class StorageSettings(TransferSettings, frozen=True, kw_only=True):
    """Either one folder, with the fields of `FilesTier`, or `tiers`."""

    path: str | None = None
    max_gib: float | None = None
    max_age_s: float | None = None
    tenant_max_share: float | None = None
    unused_namespaces_s: float | None = None
    write_max_mib_s: float | None = None
    fsync: bool = True
    direct: bool = False
    group_access: bool = False
    tiers: tuple[StoredTier, ...] = ()  # The fastest first.
    # Tokens of one chunk, a multiple of the block size; None: the first multiple from CHUNK_TOKENS on.
    # Engines share chunks only if they have the same value. Larger chunks load faster, smaller ones hit more
    # often.
    chunk_tokens: int | None = None
    # A prompt that is found is computed if, by the measured speeds, that takes so many seconds less than to
    # load it. None: never.
    recompute_if_faster_by_s: float | None = 0.05
    # A request begins to compute when the first layers of its chunks are loaded. A step waits for the other
    # layers, for `layer_wait_s` at most; then the prompt is computed. Needs one block table.
    layerwise: bool = False
    layer_wait_s: float = 0.5
    # Host memory of one rank for chunks that are read while their requests wait to be scheduled, and for
    # hints. 0: nothing is read ahead.
    prefetch_max_mib: int = 256
    prefetch_hint_s: float = 30.0  # How long the chunks of a hint stay there.
    sweep_every_s: float = 30.0  # Interval of sweeps, which evict by age and size.

    def __post_init__(self) -> None:
        if (self.path is None) == (not self.tiers):
            raise ConfigError("is required, or tiers instead of it", field=f"{FIELD}.path")
        assert self.stored_tiers  # Checks the folder's settings.
        check_positive(
            self,
            "lookup_timeout_s",
            "load_timeout_s",
            "read_timeout_s",
            "sweep_every_s",
            "prefetch_hint_s",
            "layer_wait_s",
        )
        check_at_least_one(self, "io_threads", "backlog_max_mib", "chunk_tokens")
        for name in ("shutdown_timeout_s", "recompute_if_faster_by_s", "prefetch_max_mib"):
            if (value := getattr(self, name)) is not None and not value >= 0:
                raise ConfigError("must not be negative", field=f"{FIELD}.{name}")

    @property
    def stored_tiers(self) -> tuple[StoredTier, ...]:
        """The stores, the fastest first."""
        if self.path is None:
            return self.tiers
        of_folder = {name: getattr(self, name) for name in FilesTier.__struct_fields__}
        return (FilesTier(**of_folder),)

    def check_encryption(self, *, has_secret: bool) -> None:
        """Raises ConfigError if there is nothing from which the key can be derived."""
        if self.encrypt and not has_secret:
            raise ConfigError(
                "needs a cluster secret, from which the key is derived", field=f"{FIELD}.encrypt"
            )

    def chunk_tokens_of(self, block_tokens: int) -> int:
        """Tokens of a chunk. Raises ConfigError if the setting does not fit the block size."""
        if self.chunk_tokens is None:
            return -(-CHUNK_TOKENS // block_tokens) * block_tokens
        if self.chunk_tokens % block_tokens:
            raise ConfigError(
                f"must be a multiple of the block size, {block_tokens}", field=f"{FIELD}.chunk_tokens"
            )
        return self.chunk_tokens
