"""A router's view of an engine's blocks, over a stream that loses batches: never a block that is gone."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from baton.router.shell import event_feed
from baton.router.shell.event_feed import Apply, EventFeed, FeedEffect, Forget, Replay

BUFFER = 4  # Batches that the engine keeps for replays.


def stored(name: int) -> BlockStored:
    return BlockStored(block_hashes=[name], parent_block_hash=None, token_ids=[1], block_size=1)


class Engine:
    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.log: list[list[KVCacheEvent]] = []

    def step(self, names: Sequence[int]) -> tuple[int, list[KVCacheEvent]]:
        """A batch that toggles these blocks."""
        batch: list[KVCacheEvent] = []
        for name in names:
            batch.append(BlockRemoved(block_hashes=[name]) if name in self.blocks else stored(name))
            self.blocks ^= {name}
        self.log.append(batch)
        return len(self.log) - 1, batch


class Router:
    def __init__(self, *, can_replay: bool) -> None:
        self.feed = EventFeed(can_replay=can_replay)
        self.blocks: set[int] = set()
        self.wanted: int | None = None
        self.carry_out(self.feed.begin())

    def carry_out(self, effects: Sequence[FeedEffect]) -> None:
        for effect in effects:
            match effect:
                case Apply(events):
                    for event in events:
                        if isinstance(event, BlockStored):
                            self.blocks.update(int(name) for name in event.block_hashes)
                        elif isinstance(event, BlockRemoved):
                            self.blocks.difference_update(int(name) for name in event.block_hashes)
                case Forget():
                    self.blocks.clear()
                case Replay(first):
                    assert self.wanted is None, "one replay at a time"
                    self.wanted = first

    def replay(self, engine: Engine, num_answers: int) -> None:
        """The engine answers with what it has kept, or breaks off."""
        if (first := self.wanted) is None:
            return
        has_heard = bool(self.feed._held)
        kept = range(max(first, len(engine.log) - BUFFER), len(engine.log))
        for number in kept[:num_answers]:
            self.carry_out(self.feed.on_replayed(number, engine.log[number]))
        self.wanted = None
        self.carry_out(self.feed.on_replay_end(is_complete=num_answers == BUFFER))
        if num_answers < BUFFER and not has_heard:
            assert not self.blocks, "a silent engine is believed"


STEPS = st.one_of(
    st.tuples(st.sampled_from(["heard", "lost"]), st.lists(st.integers(0, 5), min_size=1, max_size=3)),
    st.tuples(st.sampled_from(["replay", "break off", "no answer", "check", "restart"]), st.just([0])),
)


@settings(max_examples=500)
@given(steps=st.lists(STEPS, max_size=40), can_replay=st.booleans())
def test_no_block_is_believed_that_is_gone(steps: list[tuple[str, list[int]]], can_replay: bool) -> None:
    check_blocks(steps, can_replay=can_replay)


def _take_after_a_gap(self: EventFeed, number: int, batch: Sequence[KVCacheEvent]) -> list[FeedEffect]:
    """A batch that was lost is not missed."""
    self._next = number + 1
    return [Apply(batch)]


def _begin_without_forgetting(self: EventFeed) -> list[FeedEffect]:
    """The engine has been started again, and its blocks are believed."""
    self._next, self._last_live, self._held = 0, None, []
    return self.check()


def _end_without_an_answer(self: EventFeed, *, is_complete: bool) -> list[FeedEffect]:
    """What a silent engine has sent before is believed."""
    return _on_replay_end(self, is_complete=True)


_on_replay_end = EventFeed.on_replay_end


@pytest.mark.parametrize(
    ("method", "mutant", "steps"),
    [
        ("_take", _take_after_a_gap, [("heard", [1]), ("lost", [1])]),
        ("begin", _begin_without_forgetting, [("heard", [1]), ("restart", [0])]),
        (
            "on_replay_end",
            _end_without_an_answer,
            [("heard", [1]), ("replay", [0]), ("check", [0]), ("no answer", [0])],
        ),
    ],
)
def test_a_stale_index_that_is_believed_is_noticed(
    method: str, mutant: Any, steps: list[tuple[str, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EventFeed, method, mutant)
    with pytest.raises(AssertionError):
        check_blocks(steps, can_replay=method == "on_replay_end")


def check_blocks(steps: list[tuple[str, list[int]]], *, can_replay: bool) -> None:
    engine, router = Engine(), Router(can_replay=can_replay)
    for what, names in steps:
        match what:
            case "heard" | "lost":
                number, batch = engine.step(names)
                if what == "heard":
                    router.carry_out(router.feed.on_live(number, batch))
            case "replay" | "break off" | "no answer":
                router.replay(engine, BUFFER if what == "replay" else int(what == "break off"))
            case "check":
                router.carry_out(router.feed.check())
            case "restart":
                engine = Engine()
                router.wanted = None
                router.carry_out(router.feed.on_replay_end(is_complete=True))
                router.carry_out(router.feed.begin())
    number, batch = engine.step([99])
    router.carry_out(router.feed.on_live(number, batch))
    for _ in range(2):
        router.replay(engine, BUFFER)
        router.carry_out(router.feed.check())
    assert router.blocks <= engine.blocks
    if not router.feed.num_lost:
        assert router.blocks == engine.blocks


def test_a_missed_batch_is_asked_for_again_and_the_next_one_waits() -> None:
    feed = EventFeed(can_replay=True)
    assert feed.begin() == [Forget(), Replay(0)]
    assert feed.on_replay_end(is_complete=True) == []
    assert feed.on_live(0, []) == [Apply([])]
    later = [stored(2)]
    assert feed.on_live(2, later) == [Replay(1)]
    missed = [stored(1)]
    assert feed.on_replayed(1, missed) == [Apply(missed)]
    assert feed.on_replayed(2, later) == [Apply(later)]
    assert feed.on_replay_end(is_complete=True) == []
    assert feed.num_lost == 0


def test_without_a_replay_a_gap_is_a_loss() -> None:
    feed = EventFeed(can_replay=False)
    assert feed.begin() == [Forget()]
    assert feed.on_live(3, []) == [Forget(), Apply([])]
    assert feed.on_live(4, []) == [Apply([])]
    assert feed.num_lost == 1


def test_numbers_that_begin_again_are_a_new_engines() -> None:
    feed = EventFeed(can_replay=True)
    feed.begin()
    feed.on_replay_end(is_complete=True)
    for number in range(3):
        feed.on_live(number, [])
    new = [stored(7)]
    assert feed.on_live(0, new) == [Forget(), Replay(0)]
    assert feed.on_replayed(0, new) == [Apply(new)]
    assert feed.on_replay_end(is_complete=True) == []


def test_batches_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "HELD_MAX", 2)
    feed = EventFeed(can_replay=True)
    feed.begin()
    for number in range(5):
        feed.on_live(number, [stored(number)])
    effects = feed.on_replay_end(is_complete=True)
    assert effects == [Forget(), Apply([stored(3)]), Apply([stored(4)])]
