"""Baton's eviction policies for the host memory of vLLM's offloading: `cache_policy_module_path`.

Those that vLLM lacks: it has LRU and ARC.

    vLLM            evict(n, protected), then insert(key) for each new key
    EvictionPolicy  admit(key) names the key to evict; the choice may depend on the new key

So `evict` admits the new keys, which vLLM gives as protected ones, and `insert` only stores their rows.
Follows `vllm/v1/kv_offload/cpu/policies/base.py` of 0.32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, order_request_keys

from baton.tiers.eviction import Eviction, make_policy
from baton.tiers.policy import EvictionPolicy


class BatonCachePolicy(CachePolicy):  # type: ignore[misc]  # vLLM is not installed where types are checked.
    """A chunk is a ChunkStatus of vLLM: a row, and the number of its uses."""

    eviction: ClassVar[Eviction]

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.clear()

    def clear(self) -> None:
        self._policy: EvictionPolicy[bytes] = make_policy(self.eviction, max(1, self.cache_capacity))
        self._chunks: dict[bytes, Any] = {}
        self._evictable: set[bytes] = set()
        self._admitted: dict[bytes, None] = {}  # By `evict`, for `insert`; in order.

    def get(self, key: bytes) -> Any:
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: Any) -> None:
        if key in self._admitted:
            del self._admitted[key]
        else:
            if self._admitted:
                # With a `store_threshold` vLLM protects keys, too, that it does not insert.
                self._policy.discard(self._admitted.popitem()[0])
            admitted = self._policy.admit(key, lambda _: False)
            assert admitted is not None, "vLLM inserts no more than it has room for"
        self._chunks[key] = chunk
        if chunk.ref_cnt == 0:
            self._evictable.add(key)

    def remove(self, key: bytes) -> None:
        del self._chunks[key]
        self._evictable.discard(key)
        self._policy.discard(key)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        self._drop_admitted()  # Of an earlier call whose keys were not inserted.
        if n > len(self._evictable) - sum(key in self._evictable for key in protected):
            return None
        evicted: list[tuple[bytes, Any]] = []
        incoming = iter(sorted(key for key in protected if key not in self._chunks))
        while len(evicted) < n:
            key = next(incoming)
            admitted = self._policy.admit(
                key, lambda other: other in self._evictable and other not in protected
            )
            assert admitted is not None, "as counted, there are enough"
            self._admitted[key] = None
            if admitted.evicted is not None:
                self._evictable.remove(admitted.evicted)
                evicted.append((admitted.evicted, self._chunks.pop(admitted.evicted)))
        return evicted

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        self._policy.refresh(reversed([key for key in keys if key in self._policy]))

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        return  # `admit` sees that a key was evicted before.

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        """A chunk that was loaded counts as used. The beginning of a prompt stays longest."""
        ordered = [key for key in order_request_keys(key_groups, req_context) if key in self._chunks]
        for key in ordered:
            if key in reused_keys:
                self._policy.use(key)
        self._policy.refresh(reversed(ordered))

    def mark_evictable(self, key: bytes) -> None:
        self._evictable.add(key)

    def mark_non_evictable(self, key: bytes) -> None:
        self._evictable.discard(key)

    def _drop_admitted(self) -> None:
        for key in self._admitted:
            self._policy.discard(key)
        self._admitted.clear()


class SlruCachePolicy(BatonCachePolicy):
    eviction = "slru"


class S3FifoCachePolicy(BatonCachePolicy):
    eviction = "s3fifo"
