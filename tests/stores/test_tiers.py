"""Several stores as one while one of them fails."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.stores.backends.pace import BURST_S, TokenBucket
from baton.stores.backends.tiers import RETRY_S, Tiers
from baton.stores.base.store import StoreError, Unusable
from tests.stores.slow_store import SlowStore


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


def test_what_a_failing_store_may_have_is_not_gone(world: World) -> None:
    with pytest.raises(Unusable, match="gone"):
        world.read("a")
    world.tiers.write("a", (b"1",))
    world.fast.values.clear()
    world.slow.is_dead = True
    world.tiers.touch("a", 5.0)
    with pytest.raises(Unusable, match="io: a store that may have it"):
        world.read("a")
    with pytest.raises(Unusable, match="io: a store that may have it"):
        world.tiers.read("a", memoryview(bytearray(1)), bytes, part=slice(0, 1), only=1)


# --- Bandwidth --------------------------------------------------------------------------------------


@given(
    takes=st.lists(st.tuples(st.floats(0, 3), st.integers(1, 500)), min_size=1, max_size=30),
    rate=st.integers(10, 200),
)
@settings(max_examples=50)
def test_writes_that_wait_keep_within_the_bandwidth(takes: list[tuple[float, int]], rate: int) -> None:
    bucket, now_s, begun = TokenBucket(rate), 0.0, []
    for pause_s, num_bytes in takes:
        now_s += pause_s
        now_s += bucket.take(num_bytes, now_s)
        begun.append((now_s, num_bytes))
    for start in range(len(begun)):
        passed_s = begun[-1][0] - begun[start][0]
        # What begins within a time is at most the burst, and what the rate lets through meanwhile.
        later = sum(num_bytes for _, num_bytes in begun[start + 1 :])
        assert later <= rate * (passed_s + BURST_S) + 1e-6


def test_a_bucket_without_traffic_does_not_wait() -> None:
    bucket = TokenBucket(100)
    assert bucket.take(100, 0.0) == 0
    assert bucket.take(50, 0.0) == 0.5
    assert bucket.take(100, 10.0) == 0
    assert bucket.take(100, 9.0) == 1.0, "a clock that goes back brings nothing"


def test_a_cap_delays_the_writes_to_its_store() -> None:
    fast, slow = SlowStore(), SlowStore()
    now_s, waits, is_closing = 0.0, [], False

    def wait(seconds: float) -> bool:
        nonlocal now_s
        now_s += seconds
        waits.append(seconds)
        return is_closing

    tiers = Tiers([fast, slow], caps=[None, TokenBucket(10)], clock=lambda: now_s, wait=wait)
    values = [(f"{number}", (bytes(4), bytes(6))) for number in range(3)]
    assert all(written.done == ["slow", "slow"] for written in tiers.write_all(values))
    assert waits == [1.0, 1.0], "the first one is the burst"
    is_closing = True
    (closed,) = tiers.write_all([("late", (bytes(10),))])
    assert closed.done == ["slow"]
    assert closed.failed == {"slow": "it is being closed"}
    assert "late" not in slow.values
