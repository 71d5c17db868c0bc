"""One engine's stream of KV events: which batches count, which are asked for again, when to begin anew.

    engine --numbered batches--> live ---+
           --batches from a number on--> replayed --+--> Apply, Forget, Replay

A batch that is missed may have removed a block. It is asked for again; batches that follow wait meanwhile. If
the engine has it no more, all that is known of the engine is forgotten. Numbers that begin again are a new
engine's. An engine that does not answer, and sends nothing meanwhile, is not believed any more: its last
batches may be missing. Pure: the transport is `shell/index_process.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from baton.contract.events import KVCacheEvent

HELD_MAX = 10_000  # Batches that wait for a replay; vLLM keeps as many for one.

Batch: TypeAlias = Sequence[KVCacheEvent]


@dataclass(frozen=True, slots=True)
class Apply:
    events: Batch


@dataclass(frozen=True, slots=True)
class Forget:
    """All blocks of the engine."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Ask the engine for its batches from this number on. `on_replay_end` follows, whatever happens."""

    first: int


FeedEffect: TypeAlias = Apply | Forget | Replay


class EventFeed:
    def __init__(self, *, can_replay: bool) -> None:
        self._can_replay = can_replay
        self._next = 0  # All batches before this one have been applied, or can be missed.
        self._last_live: int | None = None
        self._held: list[tuple[int, Batch]] = []
        self._is_replaying = False
        self.num_lost = 0  # Times that batches were missing for good.

    def begin(self) -> list[FeedEffect]:
        """At the first connection, and whenever the engine may be another one."""
        self._next, self._last_live, self._held = 0, None, []
        return [Forget(), *self.check()]

    def check(self) -> list[FeedEffect]:
        """From time to time: the last batch may be the one that is missing."""
        if not self._can_replay or self._is_replaying:
            return []
        self._is_replaying = True
        return [Replay(self._next)]

    def on_live(self, number: int, batch: Batch) -> list[FeedEffect]:
        effects: list[FeedEffect] = []
        if self._last_live is not None and number <= self._last_live:
            effects = self.begin()
        self._last_live = number
        if not self._is_replaying and number > self._next and self._can_replay:
            effects += self.check()
        if not self._is_replaying:
            return effects + self._take(number, batch)
        self._held.append((number, batch))
        if len(self._held) > HELD_MAX:
            self.num_lost += 1
            del self._held[0]
        return effects

    def on_replayed(self, number: int, batch: Batch) -> list[FeedEffect]:
        return self._take(number, batch)

    def on_replay_end(self, *, is_complete: bool) -> list[FeedEffect]:
        """All have come; or the engine has not answered in time."""
        self._is_replaying = False
        held, self._held = self._held, []
        if not is_complete and not held:
            self._next, self._last_live = 0, None  # If it answers later, it is asked for all that it has.
            return [Forget()]
        return [effect for number, batch in held for effect in self._take(number, batch)]

    def _take(self, number: int, batch: Batch) -> list[FeedEffect]:
        if number < self._next:
            return []  # It has come already.
        is_lost = number > self._next
        self._next = number + 1
        if not is_lost:
            return [Apply(batch)]
        self.num_lost += 1
        return [Forget(), Apply(batch)]
