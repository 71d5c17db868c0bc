"""Names of vLLM's chunks in stores. A chunk is one row of vLLM's host memory: the bytes of all ranks.

One rank's part is therefore never visible without the others'.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.stores.base.chunk_name import SUFFIX, ChunkName

KEY_PURPOSE = "baton.vllm_tier.1"
NAMESPACE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Naming:
    row_bytes: int
    # Namespace and signing key; the current one first, then those of previous secrets.
    signed: tuple[tuple[str, bytes], ...]

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        """The row as safetensors has a tensor."""
        return {"row": {"dtype": "U8", "shape": (self.row_bytes,), "data_offsets": (0, self.row_bytes)}}

    def with_other_weights(self) -> Naming:
        """Names for chunks of weights that the host does not name, so no engine has had them before."""
        drawn = secrets.token_bytes(NAMESPACE_BYTES)
        named = [
            (hashlib.blake2b(namespace.encode(), key=drawn, digest_size=NAMESPACE_BYTES), key)
            for namespace, key in self.signed
        ]
        return replace(self, signed=tuple((digest.hexdigest(), key) for digest, key in named))

    def names_of(self, key: bytes) -> list[tuple[ChunkName, bytes]]:
        """Names under which the chunk may be stored, and the keys that sign it there."""
        return [(ChunkName(namespace, key, 0), signing_key) for namespace, signing_key in self.signed]

    def key_of(self, name: str) -> bytes | None:
        """Key of a stored value; None: it is not one of these engines'."""
        namespace, _, rest = name.partition("/")
        if namespace not in {known for known, _ in self.signed} or not name.endswith(SUFFIX):
            return None
        try:
            return bytes.fromhex(rest.rpartition("/")[2].partition(".")[0])
        except ValueError:
            return None


def any_of(found: Sequence[bool], num_each: int) -> list[bool]:
    """Whether at least one of each `num_each` successive values is true."""
    return [any(found[start : start + num_each]) for start in range(0, len(found), num_each)]
