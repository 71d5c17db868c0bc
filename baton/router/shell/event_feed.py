"""One engine's stream of KV events: applies batches in order, asks for missing ones, and begins anew.

    engine --numbered batches--> live ---+
           --batches from a number on--> replayed --+--> Apply, Forget, Replay

A missing batch may have removed a block. The router asks for it again, and holds the batches that follow. If
the engine does not have it any more, the router forgets all blocks of the engine. Numbers that begin again
belong to a new engine. The router also forgets the blocks of an engine that neither answers nor sends events
meanwhile, because its last batches may be missing. Pure: the transport is `shell/index_process.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from baton.core.kv_events import KVCacheEvent

HELD_MAX = 10_000  # Batches that wait for a replay; vLLM keeps as many to replay.

Batch: TypeAlias = Sequence[KVCacheEvent]


@dataclass(frozen=True, slots=True)
class Apply:
    events: Batch


@dataclass(frozen=True, slots=True)
class Forget:
    """Forget all blocks of the engine."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Ask the engine for its batches from this number on. `on_replay_end` follows, whatever happens."""

    first: int


FeedEffect: TypeAlias = Apply | Forget | Replay


class EventFeed:
    def __init__(self, *, can_replay: bool) -> None:
        self._can_replay = can_replay
        self._next = 0  # Number of the next batch. Those before it are applied or given up.
        self._last_live: int | None = None
        self._held: list[tuple[int, Batch]] = []
        self._is_replaying = False
        self.num_lost = 0  # Times that batches were missing for good.

    def begin(self) -> list[FeedEffect]:
        """Begin anew: call it at the first connection, and when the engine may be a new one."""
        self._next, self._last_live, self._held = 0, None, []
        return [Forget(), *self.check()]

    def check(self) -> list[FeedEffect]:
        """Ask for a replay; call it from time to time, because the last batch may be missing."""
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
        """End a replay. `is_complete`: all batches have come; else the engine has not answered in time."""
        self._is_replaying = False
        held, self._held = self._held, []
        if not is_complete and not held:
            self._next, self._last_live = 0, None  # The next replay asks for all batches that it has.
            return [Forget()]
        return [effect for number, batch in held for effect in self._take(number, batch)]

    def _take(self, number: int, batch: Batch) -> list[FeedEffect]:
        if number < self._next:
            return []  # This batch has come already.
        is_lost = number > self._next
        self._next = number + 1
        if not is_lost:
            return [Apply(batch)]
        self.num_lost += 1
        return [Forget(), Apply(batch)]
