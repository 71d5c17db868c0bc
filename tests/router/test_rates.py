"""Learned speeds converge to those of a modelled engine, in spite of noise and of strange samples."""

import math
import random

from hypothesis import example, given
from hypothesis import strategies as st

from baton.router.fleet.cost import TOKEN_S
from baton.router.values.rates import (
    NUM_POINTS,
    NUM_SAMPLES,
    SAMPLE_TOKENS_MAX,
    SAMPLE_TOKENS_MIN,
    BusyTime,
    Line,
    Rate,
)

SEEDS = st.integers(0, 2**32)
NOISE, STRANGE_SHARE = 0.05, 0.05
ENOUGH = 200  # Number of samples.
ANY = st.floats(allow_nan=True, allow_infinity=True)


class Noise:
    """Noise of a measured time: 5 %, and one sample in twenty is many times too long or too short."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def times(self, value: float) -> float:
        if self.rng.random() < STRANGE_SHARE:
            return value * self.rng.choice([0.01, 0.1, 10.0, 100.0])
        return value * self.rng.gauss(1.0, NOISE)


@given(seed=SEEDS, true=st.floats(1.0, 1e6))
def test_a_rate_converges_in_spite_of_strange_samples(seed: int, true: float) -> None:
    noise, rate = Noise(seed), Rate()
    for _ in range(ENOUGH):
        rate.note(noise.times(true))
    assert rate.value is not None
    assert abs(rate.value / true - 1) < 0.1


@given(samples=st.lists(st.floats(90.0, 110.0), min_size=NUM_SAMPLES), strange=st.floats(1e-9, 1e12))
def test_one_strange_sample_does_not_move_a_rate_out_of_the_others(
    samples: list[float], strange: float
) -> None:
    rate = Rate()
    for sample in samples:
        rate.note(sample)
    rate.note(strange)
    assert rate.value is not None
    assert 90.0 <= rate.value <= 110.0


@given(first=st.floats(1.0, 1e6), then=st.floats(1.0, 1e6))
def test_a_rate_follows_a_new_speed(first: float, then: float) -> None:
    rate = Rate()
    for _ in range(ENOUGH):
        rate.note(first)
    for _ in range(NUM_SAMPLES // 2 + 1):
        rate.note(then)
    assert rate.value == then


@given(st.lists(ANY, max_size=40))
def test_a_rate_is_positive(samples: list[float]) -> None:
    rate = Rate()
    for sample in samples:
        rate.note(sample)
    assert rate.value is None or 0.0 < rate.value < math.inf


def learn_steps(line: Line, noise: Noise, base_s: float, slope_s: float, num_samples: int) -> None:
    for _ in range(num_samples):
        load = noise.rng.randrange(60)
        line.note(load, noise.times(base_s + slope_s * load))


@given(
    seed=SEEDS,
    base_s=st.floats(0.001, 0.1),
    share=st.floats(0.0, 0.05),  # Time that one more answer adds to a step, as a share of `base_s`.
    prior=st.floats(0.1, 10.0),
)
def test_the_time_of_a_step_converges_at_every_load(
    seed: int, base_s: float, share: float, prior: float
) -> None:
    noise, slope_s = Noise(seed), share * base_s
    line = Line(prior * max(slope_s, 1e-5), 3.0)
    learn_steps(line, noise, base_s, slope_s, ENOUGH)
    for load in (0, 30, 60):
        assert abs(line.at(load) / (base_s + slope_s * load) - 1) < 0.15


@given(seed=SEEDS, faster=st.sampled_from([0.2, 0.5, 2.0, 5.0]))
def test_the_time_of_a_step_follows_a_new_speed(seed: int, faster: float) -> None:
    noise, line = Noise(seed), Line(TOKEN_S, 3.0)
    learn_steps(line, noise, 0.015, TOKEN_S, ENOUGH)
    learn_steps(line, noise, 0.015 / faster, TOKEN_S / faster, 2 * NUM_POINTS)
    for load in (0, 30, 60):
        assert abs(line.at(load) * faster / (0.015 + TOKEN_S * load) - 1) < 0.15


@given(seed=SEEDS, load=st.integers(0, 100), spread=st.sampled_from([0, 1, 2]))
def test_samples_of_one_load_say_nothing_of_the_slope(seed: int, load: int, spread: int) -> None:
    noise, line = Noise(seed), Line(TOKEN_S, 3.0)
    for number in range(ENOUGH):
        line.note(load + number % (1 + spread), noise.times(0.1))
    assert line.slope_s == TOKEN_S
    assert abs(line.at(load) / 0.1 - 1) < 0.1


@given(st.lists(st.tuples(ANY, ANY), max_size=100), st.floats(0.0, 1e6))
@example([(1e-300, 1e300)] * 9 + [(1e6, 1e-300)] * 9, 1.0)
def test_a_line_is_never_negative(points: list[tuple[float, float]], x: float) -> None:
    line = Line(TOKEN_S, 1e-3)
    for point in points:
        line.note(*point)
        assert line.slope_s >= 0.0
        assert line.base_s is None or line.base_s >= 0.0
        assert line.at(x) >= 0.0  # And no NaN.


@given(
    prompts=st.lists(
        st.tuples(st.integers(SAMPLE_TOKENS_MIN, 20_000), st.floats(0.0, 3.0)), min_size=1, max_size=40
    ),
    tokens_per_s=st.floats(100.0, 1e5),
)
def test_prompts_that_wait_show_the_speed_as_those_that_do_not(
    prompts: list[tuple[int, float]], tokens_per_s: float
) -> None:
    """An engine that computes one prompt after the other, with all gaps and queues between them."""
    busy, events, free_at_s, now_s = BusyTime(), [], 0.0, 0.0
    for num_tokens, gap_s in prompts:
        now_s += gap_s
        free_at_s = max(now_s, free_at_s) + num_tokens / tokens_per_s
        events += [(now_s, 1, 0), (free_at_s, 0, num_tokens)]
    num_waiting, samples = 0, []
    for at_s, is_start, num_tokens in sorted(events):
        if is_start:
            busy.start(at_s, is_idle=not num_waiting)
            num_waiting += 1
            continue
        num_waiting -= 1
        samples.append(busy.end(num_tokens, at_s, is_last=not num_waiting))
    assert samples[-1] is not None
    for sample in samples:
        assert sample is None or abs(sample[0] / tokens_per_s - 1) < 1e-6


def test_prompts_of_one_step_are_one_sample() -> None:
    busy = BusyTime()
    for is_idle in (True, False, False):
        busy.start(0.0, is_idle=is_idle)
    assert busy.end(1000, 0.3, is_last=False) is None
    assert busy.end(1000, 0.3001, is_last=False) is None
    assert busy.end(1000, 0.3002, is_last=True) == (3000 / 0.3002, 3000)
    assert busy.end(1000, 0.3002, is_last=True) is None  # No time has passed.


def test_an_engine_that_stays_busy_is_sampled_too() -> None:
    busy = BusyTime()
    busy.start(0.0, is_idle=True)
    assert busy.end(SAMPLE_TOKENS_MAX, 2.0, is_last=False) == (SAMPLE_TOKENS_MAX / 2, SAMPLE_TOKENS_MAX)


def test_a_prompt_that_is_given_up_spoils_the_samples_until_the_engine_is_idle() -> None:
    busy = BusyTime()
    busy.start(0.0, is_idle=True)
    busy.spoil()
    busy.start(0.1, is_idle=False)
    assert busy.end(9000, 1.0, is_last=True) is None
    busy.start(2.0, is_idle=True)
    assert busy.end(900, 3.0, is_last=True) == (900, 900)
