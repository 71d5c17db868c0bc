"""Name of a chunk in a store. Imports no torch, because the scheduler half only looks chunks up."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

SUFFIX = ".safetensors"
PIN_SUFFIX = ".pin"  # Suffix of a value that makes sweeps keep the chunk beside it.
KEEP_SUFFIX = ".keep"
MARK = "00/in-use.mark"  # A namespace's mark, beside its chunks and as deep in the store.
STATE = 0
"""Value of `window` for layers with a recurrent state."""


@dataclass(frozen=True, slots=True)
class ChunkName:
    namespace: str
    key: bytes  # Hash of the prefix up to the chunk's end.
    rank: int
    window: int | None = None  # Window of the layers whose blocks the value holds; or STATE.

    def __str__(self) -> str:
        """The name that stores use."""
        digits = self.key.hex()
        kind = "" if self.window is None else f".w{self.window}"
        return f"{self.namespace}/{digits[:2]}/{digits}.{self.rank}{kind}{SUFFIX}"

    def path_in(self, folder: Path) -> Path:
        return folder / str(self)


def namespace_digest(described: bytes, key: bytes = b"") -> str:
    """Digest in hex for the name of a namespace. `key`: at most 64 bytes count."""
    return hashlib.blake2b(described, key=key[:64], digest_size=16).hexdigest()


# Nothing else is read, removed or copied: neither model weights beside the chunks nor a path out of a folder.
_CHUNK = r"([0-9a-z]+)/([0-9a-f]{2})/(\2[0-9a-f]*)"
_VALUE = re.compile(_CHUNK + r"\.([0-9]+)(?:\.w([0-9]+))?" + re.escape(SUFFIX))
_PIN = re.compile(_CHUNK + re.escape(PIN_SUFFIX))
_MARK = re.compile(r"([0-9a-z]+)/" + re.escape(MARK))
_KEEP = re.compile(_CHUNK + r"\.(-?[0-9]{1,3})\.([0-9]{0,10})\.([0-9a-f]*)" + re.escape(KEEP_SUFFIX))


@dataclass(frozen=True, slots=True)
class Keep:
    """What a request asks of the sweeps for its chunks, in the name of a value beside each of them."""

    priority: int = 0  # -100 to 100; the lowest goes first.
    ttl_s: int | None = None  # Time to keep it after the last use; None: not given.
    tenant: str = ""  # Digest in hex, of the one that stored the chunk; "": none, or several.

    def name_of(self, chunk: str) -> str:
        """`chunk`: as `chunk_of` returns it."""
        ttl = "" if self.ttl_s is None else self.ttl_s
        return f"{chunk}.{self.priority}.{ttl}.{self.tenant}{KEEP_SUFFIX}"

    def raised(self) -> Keep:
        """The retention for chunks that a request uses and did not store. It cannot harm other requests."""
        return Keep(max(0, self.priority))

    def without_tenant(self) -> Keep:
        return Keep(self.priority, self.ttl_s)

    def merged(self, other: Keep) -> Keep:
        """What two requests ask for one chunk: the higher priority, the longer TTL that was given."""
        given = [ttl_s for ttl_s in (self.ttl_s, other.ttl_s) if ttl_s is not None]
        tenants = {self.tenant, other.tenant} - {""}
        tenant = tenants.pop() if len(tenants) == 1 else ""
        return Keep(max(self.priority, other.priority), max(given, default=None), tenant)


NO_KEEP = Keep()


def parse_keep(name: str) -> Keep | None:
    """None: it is no keep."""
    if not name.endswith(KEEP_SUFFIX) or (found := _KEEP.fullmatch(name)) is None:
        return None
    _, _, _, priority, ttl_s, tenant = found.groups()
    return Keep(int(priority), int(ttl_s) if ttl_s else None, tenant)


def parse_name(name: str) -> ChunkName | None:
    """The reverse of `str`. None: it is no name of a chunk."""
    if (found := _VALUE.fullmatch(name)) is None:
        return None
    namespace, _, key, rank, window = found.groups()
    if len(key) % 2:
        return None
    return ChunkName(namespace, bytes.fromhex(key), int(rank), None if window is None else int(window))


def mark_of(namespace: str) -> str:
    """Name of the value whose date says when an engine last used the namespace."""
    return f"{namespace}/{MARK}"


def namespace_of(name: str) -> str:
    """`name`: name of any value of a store."""
    return name.partition("/")[0]


def is_mark(name: str) -> bool:
    return _MARK.fullmatch(name) is not None


def is_of_a_store(name: str) -> bool:
    """Whether it names a chunk's value, pin or keep, or a mark. Everything else is not ours, and stays."""
    return parse_name(name) is not None or any(kind.fullmatch(name) for kind in (_PIN, _KEEP, _MARK))


def is_value(name: str) -> bool:
    """Whether a name in a store is a chunk's value: neither a pin nor a keep."""
    return name.endswith(SUFFIX)


def chunk_of(name: str) -> str:
    """What the names of all values of one chunk have in common: every rank's, every kind's."""
    folder, _, file = name.rpartition("/")
    return f"{folder}/{file.partition('.')[0]}"
