"""Policies against brute force: never an engine that is not eligible, and each one's own promise."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.fleet.policies import (
    AFFINITY_SLACK,
    POLICIES,
    EngineState,
    Policy,
    RoutedRequest,
    choose_least_in_flight,
    choose_prefix_affinity,
    choose_round_robin,
)

fleets = st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=6).map(
    lambda drawn: [
        EngineState(f"http://e{index}", is_eligible, in_flight)
        for index, (is_eligible, in_flight) in enumerate(drawn)
    ]
)
requests = st.builds(RoutedRequest, turn=st.integers(0, 1000), prefix_key=st.binary(max_size=16))


@pytest.mark.parametrize("policy", POLICIES.values())
@given(states=fleets, request_=requests)
def test_a_policy_chooses_an_eligible_engine_whenever_there_is_one(
    policy: Policy, states: list[EngineState], request_: RoutedRequest
) -> None:
    chosen = policy(states, request_)
    if any(state.is_eligible for state in states):
        assert chosen is not None
        assert states[chosen].is_eligible
    else:
        assert chosen is None


@given(num_engines=st.integers(1, 6), rounds=st.integers(1, 5), first=st.integers(0, 100))
def test_round_robin_gives_every_engine_its_turn(num_engines: int, rounds: int, first: int) -> None:
    states = [EngineState(f"e{index}", True) for index in range(num_engines)]
    turns = range(first, first + rounds * num_engines)
    chosen = Counter(choose_round_robin(states, RoutedRequest(turn)) for turn in turns)
    assert chosen == Counter(dict.fromkeys(range(num_engines), rounds))


@given(states=fleets, request_=requests)
def test_least_in_flight_never_passes_over_an_idler_engine(
    states: list[EngineState], request_: RoutedRequest
) -> None:
    chosen = choose_least_in_flight(states, request_)
    eligible = [state.in_flight for state in states if state.is_eligible]
    assert chosen is None or states[chosen].in_flight == min(eligible)


@given(num_engines=st.integers(1, 6), first=st.integers(0, 100))
def test_equally_idle_engines_take_turns(num_engines: int, first: int) -> None:
    states = [EngineState(f"e{index}", True, in_flight=3) for index in range(num_engines)]
    chosen = {choose_least_in_flight(states, RoutedRequest(first + turn)) for turn in range(num_engines)}
    assert chosen == set(range(num_engines))


@given(states=fleets, request_=requests)
def test_affinity_is_bounded_by_load(states: list[EngineState], request_: RoutedRequest) -> None:
    chosen = choose_prefix_affinity(states, request_)
    eligible = [state.in_flight for state in states if state.is_eligible]
    assert chosen is None or states[chosen].in_flight <= min(eligible) + AFFINITY_SLACK


@given(key=st.binary(max_size=16), turns=st.tuples(st.integers(0, 99), st.integers(0, 99)))
def test_affinity_looks_at_the_prefix_not_at_the_turn(key: bytes, turns: tuple[int, int]) -> None:
    states = [EngineState(f"e{index}", True) for index in range(5)]
    assert len({choose_prefix_affinity(states, RoutedRequest(turn, key)) for turn in turns}) == 1


@given(keys=st.lists(st.binary(max_size=16), min_size=1, max_size=20), gone=st.integers(0, 4))
def test_an_engine_that_goes_away_moves_only_its_own_prefixes(keys: list[bytes], gone: int) -> None:
    whole = [EngineState(f"e{index}", True) for index in range(5)]
    less = [EngineState(state.url, index != gone) for index, state in enumerate(whole)]
    for key in keys:
        before = choose_prefix_affinity(whole, RoutedRequest(0, key))
        if before != gone:
            assert choose_prefix_affinity(less, RoutedRequest(0, key)) == before


def test_affinity_spreads_prefixes_over_all_engines() -> None:
    states = [EngineState(f"http://127.0.0.1:{port}", True) for port in range(8100, 8104)]
    chosen = Counter(choose_prefix_affinity(states, RoutedRequest(0, b"%d" % key)) for key in range(400))
    assert set(chosen) == {0, 1, 2, 3}
    assert min(chosen.values()) > 50


# --- Slow start -----------------------------------------------------------------------------------


def with_share(share: float, *, busy: int = 0) -> list[EngineState]:
    return [EngineState("http://slow", True, 0, share), EngineState("http://full", True, busy)]


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_round_robin_gives_an_engine_its_share_of_turns(share: float) -> None:
    chosen = Counter(choose_round_robin(with_share(share), RoutedRequest(turn)) for turn in range(2000))
    assert chosen[0] == pytest.approx(1000 * share, abs=10)


def test_an_engine_in_slow_start_is_chosen_when_its_load_is_its_share_of_the_others() -> None:
    for busy, chosen in ((0, 1), (3, 1), (5, 0)):
        assert choose_least_in_flight(with_share(0.2, busy=busy), RoutedRequest(0)) == chosen


def test_prefixes_come_back_one_by_one_and_stay() -> None:
    keys = [b"%d" % number for number in range(400)]
    before: set[bytes] = set()
    for share in (0.1, 0.4, 0.7, 1.0):
        states = with_share(share)
        mine = {key for key in keys if choose_prefix_affinity(states, RoutedRequest(0, key)) == 0}
        assert before <= mine
        assert len(mine) == pytest.approx(200 * share, abs=40)
        before = mine


@pytest.mark.parametrize("policy", POLICIES.values())
def test_an_only_engine_gets_everything_in_slow_start_too(policy: Policy) -> None:
    states = [EngineState("http://a", True, 9, 0.1), EngineState("http://b", False)]
    assert {policy(states, RoutedRequest(turn)) for turn in range(50)} == {0}
