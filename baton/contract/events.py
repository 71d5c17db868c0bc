"""KV events: what an engine's caches gained and lost, in vLLM's wire format (`distributed/kv_events.py`).

A block of a tensor-parallel engine is there only when every rank has its part. So events of ranks are
counted, and of a step those are true that all ranks have said (quorum) which take part: that report events,
be they none. A scheduler half whose ranks say one thing in different steps counts with a KVEventAggregator.

A batch is an array, the events in it are maps: {"type": "BlockStored", "block_hashes": [...], ...}.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Self, TypeAlias

import msgspec

MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU"

ExternalBlockHash: TypeAlias = bytes | int
"""As published: the whole digest, or 64 bits of it for consumers that want integers."""


def _none() -> None:
    """Of fields that vLLM's decoder requires: what comes from a factory is sent, even if it is None."""


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockStored", frozen=True, kw_only=True):
    """Full blocks that can be found by hash from now on, in prompt order behind `parent_block_hash`."""

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


class BlockRemoved(
    msgspec.Struct, omit_defaults=True, gc=False, tag="BlockRemoved", frozen=True, kw_only=True
):
    block_hashes: list[ExternalBlockHash]
    medium: str | None = msgspec.field(default_factory=_none)
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag="AllBlocksCleared", frozen=True):
    """The whole cache was forgotten."""


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    ts: float  # Seconds since the Unix epoch.
    events: list[KVCacheEvent]
    data_parallel_rank: int | None = None


class KVConnectorKVEvents(ABC):
    """A step's events, of one rank or gathered from several (vLLM's interface)."""

    @abstractmethod
    def add_events(self, events: list[KVCacheEvent]) -> None:
        """Of one rank."""

    @abstractmethod
    def aggregate(self) -> KVConnectorKVEvents:
        """Keep only what every rank has said."""

    @abstractmethod
    def increment_workers(self, count: int = 1) -> None:
        """As many ranks more are expected to say each event."""

    @abstractmethod
    def get_all_events(self) -> list[KVCacheEvent]:
        """Each event once, whoever said it."""

    @abstractmethod
    def get_number_of_workers(self) -> int: ...

    @abstractmethod
    def clear_events(self) -> None: ...

    def merge(self, other: KVConnectorKVEvents) -> Self:
        """Add what other ranks said."""
        self.add_events(other.get_all_events())
        return self


class KVEventAggregator:
    """Counts who said what; an event is common once `num_workers` ranks have said it."""

    def __init__(self, num_workers: int) -> None:
        if num_workers <= 0:
            raise ValueError(f"num_workers must be positive, is {num_workers}")
        self._num_workers = num_workers
        self._events: dict[bytes, tuple[KVCacheEvent, int]] = {}  # By content, in order of first mention.

    def add_events(self, events: Iterable[KVCacheEvent]) -> None:
        """What one rank says. Repeated by it in one call, an event still counts once."""
        for key, event in {_content_of(event): event for event in events}.items():
            _, count = self._events.get(key, (event, 0))
            self._events[key] = (event, count + 1)

    def get_common_events(self) -> list[KVCacheEvent]:
        return [event for event, count in self._events.values() if count >= self._num_workers]

    def take_common_events(self) -> list[KVCacheEvent]:
        """The same, and forget them; what is not common yet goes on counting."""
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


class QuorumKVEvents(KVConnectorKVEvents):
    """The container that connectors use unless they need their own."""

    def __init__(self, num_workers: int = 1) -> None:
        self._counted = KVEventAggregator(num_workers)

    def add_events(self, events: list[KVCacheEvent]) -> None:
        self._counted.add_events(events)

    def aggregate(self) -> QuorumKVEvents:
        common = self._counted.get_common_events()
        self._counted = KVEventAggregator(1)
        self._counted.add_events(common)
        return self

    def increment_workers(self, count: int = 1) -> None:
        self._counted.increment_workers(count)

    def get_all_events(self) -> list[KVCacheEvent]:
        return self._counted.get_all_events()

    def get_number_of_workers(self) -> int:
        return self._counted.get_number_of_workers()

    def clear_events(self) -> None:
        self._counted.clear_events()
        self._counted.reset_workers()

    def __repr__(self) -> str:
        return f"QuorumKVEvents(num_workers={self.get_number_of_workers()}, events={self.get_all_events()})"


def _content_of(event: KVCacheEvent) -> bytes:
    return msgspec.msgpack.encode(event)
