"""Engines that are much slower than their peers get a small share of the requests."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.fleet.choice import JUDGE_SPEEDS_EVERY_S
from baton.router.fleet.engine import SLOW_SHARE
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.policies import RoutedRequest
from baton.router.values.rates import NUM_SAMPLES, OUTLIER_FACTOR, OUTLIER_SAMPLES_MIN, outliers
from tests.router.fleets import fleet_of

SPEEDS = st.lists(st.one_of(st.none(), st.floats(1.0, 1e6)), max_size=12)


@given(SPEEDS)
def test_only_the_slowest_third_can_be_outliers(speeds: list[float | None]) -> None:
    found = outliers(speeds)
    known = sorted(speed for speed in speeds if speed is not None)
    slow = [speed for speed, is_slow in zip(speeds, found, strict=True) if is_slow]
    assert len(found) == len(speeds)
    assert None not in slow
    if len(known) < 3:
        assert not slow
    for speed in slow:
        assert speed is not None
        assert speed * OUTLIER_FACTOR < known[len(known) // 2]
        assert sum(other < speed for other in known) < len(known) // 3


@given(SPEEDS, st.floats(0.001, 1000.0))
def test_a_fleet_that_is_slow_as_a_whole_has_no_outlier_more(
    speeds: list[float | None], factor: float
) -> None:
    scaled = [None if speed is None else speed * factor for speed in speeds]
    close = [speed for speed in speeds if speed is not None]
    if close and min(close) * OUTLIER_FACTOR * 1.01 < max(close):
        return  # Rounding may decide.
    assert outliers(scaled) == outliers(speeds)


def fleet(num: int) -> Fleet:
    return fleet_of(num, 1, policy="round_robin")


def chosen(routed: Fleet, now_s: float, count: int = 400) -> list[int]:
    """Number of times that each engine was chosen."""
    engines = [engine for engine in routed.engines if engine.role == "prefill"]
    counts = [0] * len(engines)
    for turn in range(count):
        engine = routed.choice.choose("prefill", RoutedRequest(turn), now_s)
        assert engine is not None
        counts[engines.index(engine)] += 1
    return counts


@pytest.mark.parametrize("seed", range(5))
def test_equal_engines_under_noise_are_no_outliers(seed: int) -> None:
    rng, routed, now_s = random.Random(seed), fleet(6), 0.0
    for _ in range(2_000):
        engine = rng.choice([one for one in routed.engines if one.role == "prefill"])
        gross = rng.choice([0.02, 50.0]) if rng.random() < 0.05 else 1.0
        engine.prefill_rate.note(1e4 * gross * rng.lognormvariate(0.0, 0.5), rng.choice([64, 500, 4096]))
        now_s += JUDGE_SPEEDS_EVERY_S
        routed.choice.judge_speeds(now_s)
        assert not any(one.is_slow for one in routed.engines)


def test_an_engine_that_is_much_slower_gets_less_until_it_has_recovered() -> None:
    rng, routed = random.Random(0), fleet(4)
    slow = routed.engines[0]
    for engine in routed.engines:
        for _ in range(OUTLIER_SAMPLES_MIN):
            engine.prefill_rate.note(1e4 / (8.0 if engine is slow else 1.0) * rng.lognormvariate(0.0, 0.3))
    counts = chosen(routed, 1.0)
    assert slow.state == "slow"
    assert 0 < counts[0] <= 400 * SLOW_SHARE
    for _ in range(NUM_SAMPLES):
        slow.prefill_rate.note(1e4)
    assert chosen(routed, 1.0 + 2 * JUDGE_SPEEDS_EVERY_S)[0] == 100
    assert slow.state != "slow"


def test_of_two_engines_none_is_an_outlier() -> None:
    routed = fleet(2)
    for engine, speed in zip(routed.engines, (1e4, 1.0), strict=False):
        for _ in range(NUM_SAMPLES):
            engine.prefill_rate.note(speed)
    assert chosen(routed, 1.0) == [200, 200]
