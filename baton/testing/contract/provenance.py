"""Cause of a wrong KV slot, by which a broken rule is named.

the slot holds, instead of its token's KV        broken rule
KV of the same tokens under another salt         salt-ignored
KV of the prompt that the params were made for   params-believed
what it held before the load, or damaged KV      failed-load-unreported, if the kit made a load fail
KV saved from a block of a preempted request     lost-on-preemption
after a new owner had written it
KV computed from a wrong block                   the rule of that block; wrong-bytes if it was reported
anything else                                    wrong-bytes
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from baton.testing.contract.arithmetic import POISON, kv_values, state_in, states_of

FRESH = -1.0  # What memory holds before its first write.


@dataclass(slots=True)
class Slot:
    """One token's slot in the cache of one layer and rank. `state`: state of the token it should hold."""

    request_id: str
    position: int
    block_id: int
    layer: int
    rank: int
    state: int

    def __str__(self) -> str:
        where = f"block {self.block_id}, layer {self.layer}, rank {self.rank}"
        return f"token {self.position} of {self.request_id} ({where})"


@dataclass(slots=True)
class Wrong:
    """The first slot that a request computed with and that does not hold the KV of its tokens."""

    slot: Slot
    found: int | None = None  # State of the KV that the slot holds; None: it is no token's KV.
    is_unwritten: bool = False
    is_unfilled: bool = False  # A load that is to fill the slot has not written to it.
    is_faulted: bool = False  # A write of the slot's load failed, and no rank has reported it.
    is_of_other_salt: bool = False
    salt: str | None = None  # The other salt, if `is_of_other_salt`.
    is_of_preempted: bool = False
    root: Wrong | None = None  # The unreported wrong slot that this slot's KV was computed from.
    is_computed_on_wrong: bool = False

    def __str__(self) -> str:
        if self.root is not None:
            return f"{self.slot} was computed from {self.root}"
        if self.is_of_other_salt:
            return f"{self.slot} has the KV of the same tokens under salt {self.salt!r}"
        if self.is_computed_on_wrong:
            return f"{self.slot} has KV computed from a block that was reported as invalid"
        return f"{self.slot} has {'nothing' if self.is_unwritten else 'other KV than its tokens give'}"

    def rule(self, foreign_states: Iterable[int], *, is_store_broken: bool) -> str:
        """Return the broken rule.

        `foreign_states`: states of the prompt that the params were made for, if it is another.
        """
        wrong = self.root if self.root is not None else self
        if wrong.is_of_other_salt:
            return "salt-ignored"
        if wrong.found is not None and wrong.found in set(foreign_states):
            return "params-believed"
        if wrong.is_of_preempted:
            return "lost-on-preemption"
        is_lost = not wrong.is_computed_on_wrong and (wrong.is_unfilled or wrong.found is None)
        if is_lost and (is_store_broken or wrong.is_faulted):
            return "failed-load-unreported"
        return "wrong-bytes"


class Provenance:
    """History of one engine's cache: which blocks held which states, and which were preempted."""

    def __init__(self, salts: dict[str, str | None], num_steps_in_flight: int) -> None:
        """`salts`: the salt of every request, by id."""
        self._salts = salts
        # Per state: blocks that the model wrote it to.
        self._written: defaultdict[int, set[int]] = defaultdict(set)
        # Per state: blocks that held it when they were preempted.
        self._given_up: defaultdict[int, set[int]] = defaultdict(set)
        self._unreported: list[Wrong] = []
        # A block may still be used until the scheduler has received the report that it is invalid.
        self._invalid: deque[set[int]] = deque(maxlen=num_steps_in_flight)

    def note_written(self, block_id: int, state: int) -> None:
        self._written[state].add(block_id)

    def note_given_up(self, block_id: int, state: int) -> None:
        self._given_up[state].add(block_id)

    def end_step(self, wrongs: Iterable[Wrong], invalid_block_ids: set[int]) -> None:
        """Record the step's wrong slots that no rank has reported as invalid."""
        self._invalid.append(set(invalid_block_ids))
        reported = set().union(*self._invalid)
        self._unreported += [wrong for wrong in wrongs if wrong.slot.block_id not in reported]

    def explain(
        self, slot: Slot, kv: torch.Tensor, heads: range, tokens: Sequence[int], *, is_unfilled: bool
    ) -> Wrong:
        """Find the cause. `kv` `[heads, width]`: what the slot holds. `tokens`: the request's."""
        wrong = Wrong(slot, is_unfilled=is_unfilled)
        if bool((kv == FRESH).all()):
            wrong.is_unwritten = True
        elif bool((kv == POISON).all()):
            wrong.is_computed_on_wrong = True
            wrong.root = self._unreported[0] if self._unreported else None
        else:
            wrong.found = _state_of(kv, slot.layer, heads)
        own = self._salts[slot.request_id]
        for salt in {*self._salts.values(), None} - {own}:
            if wrong.found is not None and wrong.found == states_of(tokens, salt)[slot.position]:
                wrong.is_of_other_salt, wrong.salt = True, salt
        lost = self._given_up.get(slot.state, set())
        came_later = self._written.get(wrong.found, set()) if wrong.found is not None else set()
        wrong.is_of_preempted = not is_unfilled and bool(lost & came_later)
        return wrong


def _state_of(kv: torch.Tensor, layer: int, heads: range) -> int | None:
    """Return the state whose KV for one token this is; None if there is none."""
    state = state_in(float(kv[0, 0]), layer, heads.start)
    is_whole = state is not None and torch.equal(kv, kv_values((state,), layer, heads, kv.shape[-1])[0])
    return state if is_whole else None
