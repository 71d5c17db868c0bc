"""KV events: blocks that an engine's caches gained and lost, in vLLM's format (`distributed/kv_events.py`).

A block of a tensor-parallel engine is complete only when every rank has its part. Therefore events are
counted over ranks, and an event of a step holds if all participating ranks report it (quorum). A rank
participates if it reports events, even none. If ranks report the same event in different steps, the scheduler
half counts with a KVEventAggregator.

A batch is an array, the events in it are maps: {"type": "BlockStored", "block_hashes": [...], ...}.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Self, TypeAlias

import msgspec

MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"

ExternalBlockHash: TypeAlias = bytes | int
"""As published: the whole digest, or 64 bits of it for consumers that need integers."""


def _none() -> None:
    """Default factory for fields that vLLM's decoder requires. Unlike a default, msgspec sends its None."""


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockStored", frozen=True, kw_only=True):
    """Full blocks that can now be found by hash, in prompt order after `parent_block_hash`."""

    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = msgspec.field(default_factory=_none)  # Deprecated in favour of lora_name.
    medium: str | None = msgspec.field(default_factory=_none)
    lora_name: str | None = msgspec.field(default_factory=_none)
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    # Tokens after each block that its hash covers too (vLLM 0.33, with a draft and without a connector).
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(
    msgspec.Struct, omit_defaults=True, gc=False, tag="BlockRemoved", frozen=True, kw_only=True
):
    block_hashes: list[ExternalBlockHash]
    medium: str | None = msgspec.field(default_factory=_none)
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag="AllBlocksCleared", frozen=True):
    """The whole cache was cleared."""


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    ts: float  # Seconds since the Unix epoch.
    events: list[KVCacheEvent]
    data_parallel_rank: int | None = None


class KVConnectorKVEvents(ABC):
    """Events of a step, from one rank or several (vLLM's interface)."""

    @abstractmethod
    def add_events(self, events: list[KVCacheEvent]) -> None:
        """Adds events of one rank."""

    @abstractmethod
    def aggregate(self) -> KVConnectorKVEvents:
        """Keeps only the events that every rank has reported."""

    @abstractmethod
    def increment_workers(self, count: int = 1) -> None:
        """Each event now needs `count` more ranks."""

    @abstractmethod
    def get_all_events(self) -> list[KVCacheEvent]:
        """Each event once, regardless of how many ranks reported it."""

    @abstractmethod
    def get_number_of_workers(self) -> int: ...

    @abstractmethod
    def clear_events(self) -> None: ...

    def merge(self, other: KVConnectorKVEvents) -> Self:
        """Adds the events of other ranks."""
        self.add_events(other.get_all_events())
        return self


class KVEventAggregator:
    """Counts the ranks that report each event; an event is common if `num_workers` ranks reported it."""

    def __init__(self, num_workers: int) -> None:
        if num_workers <= 0:
            raise ValueError(f"num_workers must be positive, is {num_workers}")
        self._num_workers = num_workers
        # Events by content, in order of first mention.
        self._events: dict[bytes, tuple[KVCacheEvent, int]] = {}

    def add_events(self, events: Iterable[KVCacheEvent]) -> None:
        """Adds one rank's events. An event that is repeated within a call counts once."""
        for key, event in {_content_of(event): event for event in events}.items():
            _, count = self._events.get(key, (event, 0))
            self._events[key] = (event, count + 1)

    def get_common_events(self) -> list[KVCacheEvent]:
        return [event for event, count in self._events.values() if count >= self._num_workers]

    def take_common_events(self) -> list[KVCacheEvent]:
        """Returns and removes the common events. Other events keep their counts."""
        common = self.get_common_events()
        self._events = {k: (e, count) for k, (e, count) in self._events.items() if count < self._num_workers}
        return common

    def get_all_events(self) -> list[KVCacheEvent]:
        return [event for event, _ in self._events.values()]

    def clear_events(self) -> None:
        self._events.clear()

    def increment_workers(self, count: int = 1) -> None:
        if count <= 0:
            raise ValueError(f"count must be positive, is {count}")
        self._num_workers += count

    def reset_workers(self) -> None:
        self._num_workers = 1

    def get_number_of_workers(self) -> int:
        return self._num_workers


class QuorumKVEvents(KVEventAggregator, KVConnectorKVEvents):
    """Standard container for the events of connectors."""

    def __init__(self, num_workers: int = 1) -> None:
        super().__init__(num_workers)

    def aggregate(self) -> QuorumKVEvents:
        common = self.get_common_events()
        self.clear_events()
        self.add_events(common)
        return self

    def clear_events(self) -> None:
        super().clear_events()
        self.reset_workers()

    def __repr__(self) -> str:
        return f"QuorumKVEvents(num_workers={self.get_number_of_workers()}, events={self.get_all_events()})"


def _content_of(event: KVCacheEvent) -> bytes:
    return msgspec.msgpack.encode(event)
