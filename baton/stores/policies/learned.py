"""Eviction by a chance of reuse that is learned per group of keys, ends of prompts first.

Keys form trees: a key is useful only with all keys before it in a prompt, its ancestors. So a key leaves
after all its descendants, and only keys without held children, *leaves*, compete. A key's group is what is
known of it: how often it was used, how deep it is, whether its prompt went on from a part that was used
before, and whether a later prompt left its prompt before it (*superseded*: in conversations such a branch
hardly ever returns). For each group and age the policy counts how many keys reached that age and how many
were used then, evicted keys included. Older counts weigh less. A leaf is worth

    max over horizons:  chance of a use before the horizon / expected time until that use or the horizon

which is the Gittins index of its group at its age. LHD (Beckmann, Chen and Cidon, "LHD: Improving Cache Hit
Rate by Maximizing Hit Density", NSDI 2018) has one horizon. Age is counted in uses of all keys.

Evicted keys are remembered until they have not been used for HORIZON times the capacity.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeAlias, cast

from baton.stores.policies.policy import Admitted, EvictionPolicy, K

Group: TypeAlias = tuple[object, ...]

HORIZON = 8  # Ages up to so many times the capacity are learned.
AGES_PER_OCTAVE, FIRST_OCTAVE = 2, -4
LEARN_EVERY = 1 / 8  # Uses between two updates, as a share of the capacity.
KEPT_SHARE = 0.97  # Share of the counts that remains at each update.
PRIOR_KEYS = 20.0  # Weight of the next coarser group in a group's rates.
SHARED_USES = 8  # A key with more uses is a common beginning, and its branches do not supersede each other.
RATE_MAX = 0.95

_ALL: Final[Group] = ()


class _Block(Generic[K]):
    __slots__ = (
        "active",
        "branch",
        "children",
        "depth",
        "fresh",
        "group",
        "is_held",
        "key",
        "last",
        "parent",
        "uses",
    )

    def __init__(self, key: K, parent: _Block[K] | None) -> None:
        self.key = key
        self.parent = parent
        self.children: set[_Block[K]] = set()  # Those that are held.
        self.active: _Block[K] | None = None  # The child that was used last.
        self.depth: int = parent.depth + 1 if parent else 0
        self.is_held = False
        self.last = 0
        self.group: Group = _ALL
        self.begin()

    def begin(self) -> None:
        """Resets a block that is new, or was not used for longer than is remembered."""
        parent = self.parent
        self.uses = 0
        self.branch = 0  # Number of keys before it that were used before, when it was new.
        self.fresh = 0  # Number of new keys between those and itself.
        if parent is not None and parent.uses > 1:
            self.branch = self.depth
        elif parent is not None:
            self.branch, self.fresh = parent.branch, parent.fresh + 1

    def group_by_use(self) -> Group:
        if self.uses > 1:
            return min(self.uses, 3), _octave(self.depth)
        fresh = min(_octave(self.fresh), 2) if self.branch else 0
        return 1, _octave(self.depth), min(_octave(self.branch), 2), fresh

    def group_superseded(self) -> Group:
        return "superseded", min(self.uses, 2)


class Learned(EvictionPolicy[K]):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._now = 0  # Uses of all keys.
        self._blocks: dict[K, _Block[K]] = {}  # Held and remembered.
        self._num_held = 0
        # Leaves by group: (last use, order of pushes, block). An entry is outdated if its block has a newer.
        self._leaves: defaultdict[Group, list[tuple[int, int, _Block[K]]]] = defaultdict(list)
        self._num_pushes = 0
        # Groups with leaves: (value and last use of the oldest leaf, a tie-breaker, group); may be outdated.
        self._order: list[tuple[float, int, int, Group]] = []
        self._order_at = 0
        num_ages = AGES_PER_OCTAVE * (HORIZON.bit_length() - 1 - FIRST_OCTAVE) + 1
        octaves = (FIRST_OCTAVE + number / AGES_PER_OCTAVE for number in range(num_ages))
        self._ages = [0, *sorted({max(1, int(capacity * 2**octave)) for octave in octaves})]
        # Blocks that reach each age next, oldest first, with the use from which the age counts.
        self._waiting: list[deque[tuple[int, _Block[K]]]] = [deque() for _ in self._ages]
        self._reached: defaultdict[Group, list[float]] = defaultdict(self._zeros)
        self._used: defaultdict[Group, list[float]] = defaultdict(self._zeros)
        self._values: dict[Group, list[float]] = {}
        self._learn_at = 0

    def __len__(self) -> int:
        return self._num_held

    def __contains__(self, key: object) -> bool:
        block = self._blocks.get(cast("K", key))
        return block is not None and block.is_held

    def admit(self, key: K, can_leave: Callable[[K], bool], parent: K | None = None) -> Admitted[K] | None:
        assert key not in self
        evicted = None
        if self._num_held >= self.capacity:
            evicted = self._choose(can_leave)
            if evicted is None:
                return None
            self._release(evicted)
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = _Block(key, self._blocks.get(parent) if parent is not None else None)
        block.is_held = True
        self._num_held += 1
        if block.parent is not None:
            block.parent.children.add(block)
        self._note_use(block)
        return Admitted(evicted.key if evicted is not None else None)

    def use(self, key: K) -> None:
        self._note_use(self._blocks[key])

    def refresh(self, keys: Iterable[K]) -> None:
        return  # Ends of prompts leave first in any case.

    def discard(self, key: K) -> None:
        block = self._blocks[key]
        self._release(block)
        if not block.children:
            self._forget(block)

    # --- Eviction --------------------------------------------------------------------------------

    def _choose(self, can_leave: Callable[[K], bool]) -> _Block[K] | None:
        """The leaf of the least value that can leave; the oldest of equals."""
        if self._now >= self._order_at:
            self._order_groups()
        chosen = None
        staying = []
        while self._order and chosen is None:
            entry = heapq.heappop(self._order)
            group = entry[3]
            found = self._oldest(group, self._leaves[group], can_leave)
            if found is not None:
                last, block = found
                value = self._value(group, self._now - last)
                if not self._order or (value, last) <= self._order[0][:2]:
                    chosen = block
                heapq.heappush(self._order, (value, last, entry[2], group))
            elif self._leaves[group]:
                staying.append(entry)
        for entry in staying:
            heapq.heappush(self._order, entry)
        if chosen is not None:
            return chosen
        # All leaves are in use: any other key.
        return next((b for b in self._blocks.values() if b.is_held and can_leave(b.key)), None)

    def _order_groups(self) -> None:
        """Evaluates the oldest leaf of each group. Between two calls only groups that are chosen are."""
        self._order_at = self._now + self.capacity // 64
        self._order = [
            (self._value(group, self._now - leaves[0][0]), leaves[0][0], number, group)
            for number, (group, leaves) in enumerate(self._leaves.items())
            if leaves
        ]
        heapq.heapify(self._order)

    def _oldest(
        self, group: Group, leaves: list[tuple[int, int, _Block[K]]], can_leave: Callable[[K], bool]
    ) -> tuple[int, _Block[K]] | None:
        staying = []
        found = None
        while leaves and found is None:
            last, _, block = leaves[0]
            if not block.is_held or block.children or block.last != last or block.group != group:
                heapq.heappop(leaves)
            elif can_leave(block.key):
                found = last, block
            else:
                staying.append(heapq.heappop(leaves))
        for entry in staying:
            heapq.heappush(leaves, entry)
        return found

    def _value(self, group: Group, age: int) -> float:
        values = self._values.get(group)
        return values[bisect_right(self._ages, age) - 1] if values else 0.0

    def _push(self, block: _Block[K]) -> None:
        if block.is_held and not block.children:
            self._num_pushes += 1
            leaves = self._leaves[block.group]
            if not leaves:
                value = self._value(block.group, self._now - block.last)
                heapq.heappush(self._order, (value, block.last, -self._num_pushes, block.group))
            heapq.heappush(leaves, (block.last, self._num_pushes, block))

    def _release(self, block: _Block[K]) -> None:
        block.is_held = False
        self._num_held -= 1
        parent = block.parent
        if parent is not None:
            parent.children.discard(block)
            self._push(parent)
            self._forget_if_old(parent)
        self._forget_if_old(block)

    def _forget_if_old(self, block: _Block[K]) -> None:
        if not block.is_held and not block.children and self._now - block.last >= self._ages[-1]:
            self._forget(block)

    def _forget(self, block: _Block[K]) -> None:
        if self._blocks.get(block.key) is block:
            del self._blocks[block.key]
        if block.parent is not None and block.parent.active is block:
            block.parent.active = None

    # --- Uses ------------------------------------------------------------------------------------

    def _note_use(self, block: _Block[K]) -> None:
        self._now += 1
        age = self._now - block.last
        if block.uses and age < self._ages[-1]:
            self._used[block.group][bisect_right(self._ages, age) - 1] += 1
        else:
            block.begin()
        block.uses += 1
        block.last = self._now
        block.group = block.group_by_use()
        self._reached[block.group][0] += 1
        self._waiting[1].append((self._now, block))
        self._push(block)
        parent = block.parent
        if parent is not None:
            if parent.active not in (None, block) and parent.depth and parent.uses <= SHARED_USES:
                self._supersede(parent.active)
            parent.active = block
        if self._now >= self._learn_at:
            self._learn()

    def _supersede(self, block: _Block[K] | None) -> None:
        blocks = [block] if block is not None else []
        while blocks:
            block = blocks.pop()
            group = block.group_superseded()
            if block.group != group:
                block.group = group
                self._reached[group][bisect_right(self._ages, self._now - block.last) - 1] += 1
                self._push(block)
                blocks.extend(block.children)  # Otherwise they are superseded already.

    # --- Learning --------------------------------------------------------------------------------

    def _zeros(self) -> list[float]:
        return [0.0] * len(self._ages)

    def _learn(self) -> None:
        self._learn_at = self._now + max(256, int(self.capacity * LEARN_EVERY))
        self._grow_older()
        rates: dict[Group, list[float]] = {}
        used: defaultdict[Group, list[float]] = defaultdict(self._zeros)
        reached: defaultdict[Group, list[float]] = defaultdict(self._zeros)
        for group in self._reached:
            for each in _with_coarser(group):
                for place in range(len(self._ages)):
                    used[each][place] += self._used[group][place]
                    reached[each][place] += self._reached[group][place]
        for group in self._reached:
            prior = [0.0] * len(self._ages)
            for each in reversed(_with_coarser(group)):
                if each not in rates:
                    rates[each] = [
                        min(RATE_MAX, (u + PRIOR_KEYS * p) / (r + PRIOR_KEYS))
                        for u, r, p in zip(used[each], reached[each], prior, strict=True)
                    ]
                prior = rates[each]
            self._values[group] = self._values_of(prior)
        for counts in (*self._used.values(), *self._reached.values()):
            counts[:] = [KEPT_SHARE * count for count in counts]

    def _grow_older(self) -> None:
        """Counts the ages that blocks have reached, and forgets the oldest that are not held."""
        for place in range(1, len(self._ages)):
            waiting = self._waiting[place]
            while waiting and waiting[0][0] <= self._now - self._ages[place]:
                since, block = waiting.popleft()
                if block.last != since:
                    continue  # The block was used again.
                self._reached[block.group][place] += 1
                if place + 1 < len(self._ages):
                    self._waiting[place + 1].append((since, block))
                else:
                    self._forget_if_old(block)

    def _values_of(self, rates: list[float]) -> list[float]:
        """The index at each age. `rates`: share of the blocks of an age that are used before the next age."""
        ages = self._ages
        values = []
        for first in range(len(ages) - 1):
            unused, hits, cost, best = 1.0, 0.0, 0.0, 0.0
            for place in range(first, len(ages) - 1):
                used = unused * rates[place]
                cost += (ages[place + 1] - ages[place]) * (unused - used / 2)
                hits += used
                unused -= used
                best = max(best, hits / cost)
            values.append(best)
        return [*values, 0.0]


def _octave(count: int) -> int:
    return (count + 1).bit_length() - 1


def _with_coarser(group: Group) -> list[Group]:
    """The group and those that stand in for it while it has few keys, the coarsest last."""
    is_used_again = isinstance(group[0], int) and group[0] > 1
    return [group, ("used again", group[1]), _ALL] if is_used_again else [group, _ALL]
