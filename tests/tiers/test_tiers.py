"""Several stores as one while one of them fails."""

import pytest

from baton.tiers.store import StoreError
from baton.tiers.tiers import RETRY_S, Tiers
from tests.tiers.slow_store import SlowStore


class FaultyStore(SlowStore):
    """While `is_dead`, each call fails after a deadline; `num_calls` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.is_dead = False
        self.num_calls = 0

    def touch(self, name: str, used_s: float) -> None:
        self.num_calls += 1
        if self.is_dead:
            raise StoreError("no answer")
        super().touch(name, used_s)


class World:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.fast, self.slow = FaultyStore(), FaultyStore()
        self.tiers = Tiers([self.fast, self.slow], clock=lambda: self.now_s)

    def read(self, name: str) -> bytes:
        return self.tiers.read(name, memoryview(bytearray(100)), bytes).proven


@pytest.fixture
def world() -> World:
    return World()


def test_a_full_store_is_still_read(world: World) -> None:
    world.tiers.write("a", (b"1",))
    world.fast.is_full = True
    assert world.tiers.write("b", (b"2",)).failed == {"slow": "no space left"}
    world.slow.values.clear()
    assert world.tiers.find(["a"]) == [True]
    assert world.read("a") == b"1"
    assert world.tiers.write("c", (b"3",)).failed == {}, "the full store is not tried again at once"
    world.fast.is_full, world.now_s = False, RETRY_S
    assert world.tiers.write("d", (b"4",)).done == ["slow", "slow"]


def test_a_store_that_does_not_answer_delays_one_touch_only(world: World) -> None:
    world.tiers.write("a", (b"1",))
    world.slow.is_dead = True
    for _ in range(3):
        assert world.read("a") == b"1"
        world.tiers.touch("a", 5.0)
    assert (world.fast.touched, world.slow.num_calls) == ({"a": 5.0}, 1)
    world.slow.is_dead, world.now_s = False, RETRY_S
    world.tiers.touch("a", 6.0)
    assert world.slow.touched == {"a": 6.0}
