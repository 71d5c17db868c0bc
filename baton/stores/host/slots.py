"""Index of a tier's slots: which key is in which slot, and whether the slot can be reused. Pure.

    reserve            end_store(ok)           evicted, or forgotten
    -------> STORING ----------------> READY -----------------------> (free)
                |   end_store(failed)    |  ^
                `------> (free)          pin unpin                    pinned: neither evicted nor reused

Only ready keys can be found. A slot is free again when nothing fills or reads it any more, even if its key is
gone earlier: an entry that is forgotten while in use is *doomed*, and its slot is kept until that use ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic

from baton.stores.policies.policy import EvictionPolicy, K


@dataclass(slots=True, eq=False)
class Entry(Generic[K]):
    key: K
    slot: int
    is_ready: bool = False
    is_doomed: bool = False  # Cannot be found; its slot is freed after its last use.
    num_pins: int = 0
    has_state: bool = False  # Also the recurrent state at its end is stored.


@dataclass(frozen=True, slots=True)
class Reserved(Generic[K]):
    entry: Entry[K]
    evicted: K | None  # The key that was evicted for it.


class SlotIndex(Generic[K]):
    def __init__(self, num_slots: int, policy: EvictionPolicy[K]) -> None:
        assert num_slots == policy.capacity
        self.num_slots = num_slots
        self._policy = policy
        self._entries: dict[K, Entry[K]] = {}
        # Taken from the end, in ascending order, so that adjacent slots are copied in runs.
        self._free = list(range(num_slots - 1, -1, -1))

    def __contains__(self, key: object) -> bool:
        """Whether the key is stored or being stored."""
        return key in self._entries

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_ready(self, key: K) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.is_ready

    def num_found(self, keys: Iterable[K]) -> int:
        """Number of keys that can be loaded, counted from the first one without a gap."""
        num_found = 0
        for key in keys:
            if not self.is_ready(key):
                break
            num_found += 1
        return num_found

    def num_found_to_state(self, keys: Sequence[K]) -> int:
        """Number of keys as `num_found`, up to the last one whose entry has a recurrent state."""
        ends = (end for end in range(self.num_found(keys), 0, -1) if self._entries[keys[end - 1]].has_state)
        return next(ends, 0)

    # --- Storing ---------------------------------------------------------------------------------

    def reserve(self, key: K, protected: Collection[K] = (), parent: K | None = None) -> Reserved[K] | None:
        """Assigns a slot to a new key without evicting `protected` keys. None: there is no room.

        `parent`: as in EvictionPolicy.
        """
        assert key not in self._entries
        if not self._free and len(self._policy) < self.num_slots:
            return None  # The other slots belong to doomed entries.

        def can_leave(other: K) -> bool:
            entry = self._entries[other]
            return entry.is_ready and not entry.num_pins and other not in protected

        admitted = self._policy.admit(key, can_leave, parent)
        if admitted is None:
            return None
        if admitted.evicted is not None:
            self._free.append(self._entries.pop(admitted.evicted).slot)
        entry = self._entries[key] = Entry(key, self._free.pop())
        return Reserved(entry, admitted.evicted)

    def end_store(self, entry: Entry[K], *, ok: bool) -> bool:
        """The slot is no longer being filled. Returns True if its key can be found from now on."""
        assert not entry.is_ready
        if ok and not entry.is_doomed:
            entry.is_ready = True
            return True
        if not entry.is_doomed:
            self._remove(entry)
        self._free.append(entry.slot)
        return False

    # --- Loading ---------------------------------------------------------------------------------

    def pin_without_state(self, key: K) -> Entry[K] | None:
        """The entry of this key if it is ready and lacks its state: keeps its slot until `unpin`."""
        entry = self._entries.get(key)
        if entry is None or not entry.is_ready or entry.has_state:
            return None
        entry.num_pins += 1
        return entry

    def pin(self, keys: Sequence[K]) -> list[Entry[K]] | None:
        """Keeps the slots unchanged until `unpin`. Returns None and pins nothing if a key is not ready."""
        if self.num_found(keys) < len(keys):
            return None
        entries = [self._entries[key] for key in keys]
        for entry in entries:
            entry.num_pins += 1
        return entries

    def unpin(self, entries: Iterable[Entry[K]]) -> None:
        for entry in entries:
            assert entry.num_pins > 0
            entry.num_pins -= 1
            if entry.is_doomed and not entry.num_pins:
                self._free.append(entry.slot)

    # --- Eviction --------------------------------------------------------------------------------

    def use(self, key: K) -> None:
        """A key that is held was used."""
        self._policy.use(key)

    def refresh(self, keys: Iterable[K]) -> None:
        """See EvictionPolicy."""
        self._policy.refresh(keys)

    def forget(self, entry: Entry[K]) -> bool:
        """Removes an entry whose content is not valid. Returns whether it could be found until now."""
        if entry.is_doomed or self._entries.get(entry.key) is not entry:
            return False
        self._remove(entry)
        entry.is_doomed = True
        if entry.is_ready and not entry.num_pins:
            self._free.append(entry.slot)
        return entry.is_ready

    def clear(self) -> list[K]:
        """Removes all entries. Returns the keys that could be found until now."""
        return [entry.key for entry in list(self._entries.values()) if self.forget(entry)]

    def _remove(self, entry: Entry[K]) -> None:
        del self._entries[entry.key]
        self._policy.discard(entry.key)

    def assert_consistent(self, entries_in_use: Collection[Entry[K]] = ()) -> None:
        """Every slot is free, holds one key, or belongs to a doomed entry in use. O(slots); for tests."""
        doomed = [entry for entry in entries_in_use if entry.is_doomed]
        slots = [*self._free, *(e.slot for e in self._entries.values()), *(e.slot for e in doomed)]
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost, or has two owners"
        assert len(self._policy) == len(self._entries)
        assert all(key in self._policy and self._entries[key].key == key for key in self._entries)
