"""Random operations on slots, compared with a model of the memory."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from baton.stores.host.slots import Entry, SlotIndex
from baton.stores.policies.eviction import Eviction, make_policy

NUM_SLOTS = 6
KEYS = st.integers(0, 14)


class Story(RuleBasedStateMachine):
    """`memory` has the content of each slot: None while it is being written. A store writes at its *end*, so
    a store that ends late, into a slot that has another owner by then, is detected."""

    eviction: Eviction = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.index: SlotIndex[int] = SlotIndex(NUM_SLOTS, make_policy(self.eviction, NUM_SLOTS))
        self.memory: list[int | None] = [None] * NUM_SLOTS
        self.stores: list[Entry[int]] = []
        self.loads: list[list[Entry[int]]] = []

    @rule(key=KEYS, protected=st.sets(KEYS, max_size=6))
    def reserve(self, key: int, protected: set[int]) -> None:
        parent = (key - 1) // 2 if key else None  # A tree of 15 keys.
        if key in self.index:
            self.index.use(key)
            return
        ready_before = {k for k in range(15) if self.index.is_ready(k)}
        pinned = Counter(e.key for load in self.loads for e in load if not e.is_doomed)
        free = self.index.num_free
        reserved = self.index.reserve(key, protected, parent)
        can_go = ready_before - pinned.keys() - protected
        if reserved is None:
            assert not free
            num_doomed = len({id(e) for e in self.in_use() if e.is_doomed})
            assert not can_go or num_doomed
            return
        assert (reserved.evicted is None) == (free > 0)
        assert reserved.evicted is None or reserved.evicted in can_go
        assert not self.index.is_ready(key)
        self.memory[reserved.entry.slot] = None
        self.stores.append(reserved.entry)

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), ok=st.booleans())
    def end_store(self, data: Any, ok: bool) -> None:
        entry = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        self.memory[entry.slot] = entry.key if ok else -1
        assert self.index.end_store(entry, ok=ok) == (ok and not entry.is_doomed)

    @precondition(lambda self: any(self.index.is_ready(key) for key in range(15)))
    @rule(data=st.data())
    def load_what_is_there(self, data: Any) -> None:
        ready = [key for key in range(15) if self.index.is_ready(key)]
        entries = self.index.pin(data.draw(st.lists(st.sampled_from(ready), min_size=1, unique=True)))
        assert entries is not None
        self.loads.append(entries)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=4, unique=True))
    def load(self, keys: list[int]) -> None:
        entries = self.index.pin(keys)
        assert (entries is None) == (self.index.num_found(keys) < len(keys))
        if entries is not None:
            self.loads.append(entries)

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), failed=st.booleans())
    def end_load(self, data: Any, failed: bool) -> None:
        entries = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        assert [self.memory[e.slot] for e in entries] == [e.key for e in entries], "overwritten while read"
        if failed:
            for entry in entries:
                self.index.forget(entry)
        self.index.unpin(entries)

    @rule(keys=st.lists(KEYS, max_size=5))
    def refresh(self, keys: list[int]) -> None:
        self.index.refresh(keys)

    @precondition(lambda self: self.stores)
    @rule(data=st.data())
    def condemn(self, data: Any) -> None:
        entry = data.draw(st.sampled_from(self.stores))
        assert not self.index.forget(entry)

    @rule()
    def clear(self) -> None:
        ready = {key for key in range(15) if self.index.is_ready(key)}
        assert set(self.index.clear()) == ready
        assert not any(key in self.index for key in range(15))

    def in_use(self) -> list[Entry[int]]:
        return list({id(e): e for e in (*self.stores, *(e for load in self.loads for e in load))}.values())

    @invariant()
    def is_consistent(self) -> None:
        self.index.assert_consistent(self.in_use())

    @invariant()
    def whatever_is_found_is_what_was_stored(self) -> None:
        for key in range(15):
            if (pinned := self.index.pin([key])) is not None:
                assert self.memory[pinned[0].slot] == key
                self.index.unpin(pinned)

    def teardown(self) -> None:
        for entry in self.stores:
            self.index.end_store(entry, ok=False)
        for entries in self.loads:
            self.index.unpin(entries)
        self.index.clear()
        assert self.index.num_free == NUM_SLOTS, "without users every slot must be free"


@pytest.mark.parametrize("eviction", ["lru", "arc", "learned"])
def test_no_story_loses_a_slot_or_finds_what_was_not_stored(eviction: Eviction) -> None:
    kind = type(f"Story_{eviction}", (Story,), {"eviction": eviction})
    run_state_machine_as_test(kind, settings=settings(max_examples=30, stateful_step_count=40, deadline=None))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("eviction", ["lru", "arc", "learned"])
def test_a_slot_that_is_read_is_not_evicted(eviction: Eviction) -> None:
    index: SlotIndex[int] = SlotIndex(NUM_SLOTS, make_policy(eviction, NUM_SLOTS))
    for key in range(NUM_SLOTS):
        reserved = index.reserve(key)
        assert reserved is not None
        index.end_store(reserved.entry, ok=True)
    read = index.pin([0, 1, 2, 4, 5])
    twice = index.pin([1])
    assert read is not None
    assert twice is not None
    reserved = index.reserve(100)
    assert reserved is not None
    assert reserved.evicted == 3
    assert index.reserve(101) is None, "the other slots are being read or filled"
    index.unpin(read)
    for key in range(101, 105):
        reserved = index.reserve(key)
        assert reserved is not None
        assert reserved.evicted not in (1, 100, *range(101, key))
    assert index.reserve(105) is None, "one slot is still being read"
    index.unpin(twice)
    reserved = index.reserve(105)
    assert reserved is not None
    assert reserved.evicted == 1
