"""Lookups on a thread: one answer for each request, deadlines, and failed loads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from baton.tiers.store import StoreError
from baton.vllm_tier.lookups import Lookups

WAIT_S = 30.0


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.stored: set[bytes] = set()
        self.error: OSError | None = None
        self.answered = threading.Event()
        self.opened = threading.Event()
        self.opened.set()
        self.begun = threading.Semaphore(0)
        self.lookups = Lookups(self.find, 1.0, lambda: self.now)

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        self.begun.release()
        assert self.opened.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return [key in self.stored for key in keys]

    def flush(self) -> None:
        """Looks up, and waits for the answers."""
        self.lookups.flush()
        self.lookups._thread.put(self.answered.set)
        assert self.answered.wait(WAIT_S)
        self.answered.clear()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.opened.set()
    world.lookups.close(WAIT_S)


def test_the_answer_comes_with_a_later_step_and_is_kept(world: World) -> None:
    world.stored = {b"a"}
    assert [world.lookups.ask(key, "r") for key in (b"a", b"b")] == [None, None]
    world.flush()
    assert [world.lookups.ask(key, "r") for key in (b"a", b"b")] == [True, False]
    world.stored = {b"b"}
    world.flush()
    assert [world.lookups.ask(key, "r") for key in (b"a", b"b")] == [True, False]
    world.lookups.forget("r")
    assert world.lookups.ask(b"b", "s") is None
    world.flush()
    assert world.lookups.ask(b"b", "s") is True


def test_two_requests_share_a_lookup(world: World) -> None:
    world.stored = {b"a"}
    world.lookups.ask(b"a", "r")
    world.lookups.ask(b"a", "s")
    world.flush()
    world.lookups.forget("r")
    assert world.lookups.ask(b"a", "s") is True
    assert world.begun.acquire(blocking=False)
    assert not world.begun.acquire(blocking=False)


def test_what_could_not_be_loaded_is_missing(world: World) -> None:
    world.stored = {b"a"}
    world.lookups.ask(b"a", "r")
    world.flush()
    world.lookups.mark_missing([b"a", b"never asked"])
    assert world.lookups.ask(b"a", "r") is False


def test_without_an_answer_in_time_a_chunk_is_missing(world: World) -> None:
    world.stored = {b"a", b"b"}
    world.opened.clear()
    world.lookups.ask(b"a", "r")
    world.lookups.flush()
    assert world.begun.acquire(timeout=WAIT_S)
    world.now = 1.0
    assert world.lookups.ask(b"a", "r") is False
    assert world.lookups.ask(b"b", "s") is False, "while the thread hangs"
    world.opened.set()
    world.flush()
    assert world.lookups.ask(b"a", "r") is False
    world.lookups.forget("s")
    assert world.lookups.ask(b"b", "t") is None


def test_a_store_that_fails_has_nothing(world: World) -> None:
    world.error = StoreError("gone")
    world.lookups.ask(b"a", "r")
    world.flush()
    assert world.lookups.ask(b"a", "r") is False
    world.error, world.stored = None, {b"a"}
    world.lookups.forget("r")
    world.lookups.ask(b"a", "s")
    world.flush()
    assert world.lookups.ask(b"a", "s") is True


def test_a_request_that_has_ended_is_not_looked_up(world: World) -> None:
    world.lookups.ask(b"a", "r")
    world.lookups.forget("r")
    world.flush()
    assert not world.begun.acquire(blocking=False)
