"""Large fleets: a choice that looks at a few engines is as good as one that looks at all of them."""

import heapq
import random
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.fleet import choice as choice_module
from baton.router.fleet.block_index import Match
from baton.router.fleet.breaker import Probe
from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.policies import RoutedRequest
from baton.router.fleet.shortlist import NUM_HOMES, SMALL
from baton.router.values.identity import ModelCard
from baton.router.values.settings import PolicyName
from tests.router.fleets import decoders, fleet_of

NUM_ENGINES, NUM_REQUESTS = 400, 1_200
POLICIES: list[PolicyName] = ["least_in_flight", "prefix_affinity", "cost", "round_robin"]


def make_fleet(policy: PolicyName, num_engines: int = NUM_ENGINES) -> Fleet:
    return fleet_of(1, num_engines, policy=policy)


def choose(fleet: Fleet, request: RoutedRequest, now_s: float = 0.0) -> Engine:
    # None: the policy uses no costs.
    placed = fleet.choice.place(request, [], [], lambda engine: True, now_s)
    engine = fleet.choice.choose("decode", request, now_s) if placed is None else placed[0]
    assert engine is not None
    return engine


def p99_queue(policy: PolicyName, utilisation: float, seed: int) -> int:
    """Requests that a request finds at its engine, which answers one at a time, in 1 s on average."""
    rng, fleet, now_s = random.Random(seed), make_fleet(policy), 0.0
    queues: dict[Engine, deque[int]] = {engine: deque() for engine in decoders(fleet)}
    ends: list[tuple[float, int, Engine]] = []
    found = []
    for turn in range(NUM_REQUESTS):
        now_s += rng.expovariate(NUM_ENGINES * utilisation)
        while ends and ends[0][0] <= now_s:
            ended_s, _, engine = heapq.heappop(ends)
            queues[engine].popleft()
            fleet.note_end(engine)
            if queues[engine]:
                heapq.heappush(ends, (ended_s + rng.expovariate(1.0), queues[engine][0], engine))
        engine = choose(fleet, RoutedRequest(turn, rng.randbytes(8)), now_s)
        if turn > NUM_REQUESTS / 2:
            found.append(engine.load)
        fleet.note_start(engine)
        queues[engine].append(turn)
        if len(queues[engine]) == 1:
            heapq.heappush(ends, (now_s + rng.expovariate(1.0), turn, engine))
    return sorted(found)[len(found) * 99 // 100]


@settings(max_examples=2, deadline=None)
@given(
    policy=st.sampled_from(POLICIES[:3]), utilisation=st.sampled_from([0.8, 0.95]), seed=st.integers(0, 99)
)
def test_queues_are_hardly_longer_than_with_a_look_at_all(
    policy: PolicyName, utilisation: float, seed: int
) -> None:
    some = p99_queue(policy, utilisation, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice_module, "SMALL", NUM_ENGINES)
        assert some <= p99_queue(policy, utilisation, seed) + 1


@pytest.mark.parametrize("policy", POLICIES)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_an_engine_that_may_be_asked_is_found_though_all_others_may_not(
    policy: PolicyName, data: st.DataObject
) -> None:
    fleet = make_fleet(policy, 100)
    left = data.draw(st.sampled_from(decoders(fleet)))
    for engine in decoders(fleet):
        match data.draw(st.integers(0, 2)) if engine is not left else None:
            case 0:
                fleet.health.note_probe(engine, Probe("refused"), 0.0)
            case 1:
                engine.rests_until_s = 10.0
            case 2:
                engine.drain_until_s = 10.0
    assert choose(fleet, RoutedRequest(data.draw(st.integers(0, 999)), b"key")) is left


def test_round_robin_gives_every_engine_of_a_large_fleet_its_turn() -> None:
    fleet = make_fleet("round_robin", 100)
    chosen = Counter(choose(fleet, RoutedRequest(turn)) for turn in range(300))
    assert set(chosen.values()) == {3}
    assert len(chosen) == 100


def test_the_turns_of_an_engine_that_is_down_go_to_many() -> None:
    fleet = make_fleet("round_robin", 100)
    down = decoders(fleet)[7]
    fleet.health.note_probe(down, Probe("refused"), 0.0)
    chosen = Counter(choose(fleet, RoutedRequest(turn)) for turn in range(3_000))
    assert len(chosen) == 99
    assert max(chosen.values()) < 40


@pytest.mark.parametrize("policy", ["prefix_affinity", "cost"])
def test_a_prefix_meets_at_one_engine_and_few_prefixes_move_when_one_goes(policy: PolicyName) -> None:
    fleet, keys = make_fleet(policy, 100), [b"%d" % number for number in range(400)]
    before = {
        key: {choose(fleet, RoutedRequest(turn, key, num_tokens=2_000)) for turn in range(5)} for key in keys
    }
    assert all(len(engines) == 1 for engines in before.values())
    loads = Counter(engine for engines in before.values() for engine in engines)
    assert len(loads) > 80
    gone = loads.most_common(1)[0][0]
    fleet.drain(gone, 1.0, is_leaving=True)
    assert gone.is_removed
    moved = [key for key in keys if before[key] != {choose(fleet, RoutedRequest(0, key, num_tokens=2_000))}]
    assert len(moved) <= 2 * loads[gone]


def test_the_engine_that_has_the_prompt_gets_it() -> None:
    fleet = make_fleet("cost", 100)
    for turn, engine in enumerate(decoders(fleet)):
        cached = {one.url: Match.in_cache(256) for one in decoders(fleet)}
        cached[engine.url] = Match.in_cache(4_000)
        request = RoutedRequest(turn, b"key", num_tokens=4_096, cached=cached)
        assert choose(fleet, request) is engine


@pytest.mark.parametrize("policy", [one for one in POLICIES if one != "cost"])
def test_engines_that_are_back_get_few_requests(policy: PolicyName) -> None:
    """A fourth of a large fleet is in slow start, without a request; the others are busy."""
    fleet = make_fleet(policy, 100)
    back = decoders(fleet)[:25]
    for engine in back:
        fleet.health.note_probe(engine, Probe("refused"), 0.0)
        fleet.health.note_probe(engine, Probe("healthy"), 10.0)
    for engine in decoders(fleet)[25:]:
        fleet.note_start(engine)
    num = sum(choose(fleet, RoutedRequest(turn, b"%d" % turn), 10.0) in back for turn in range(400))
    assert num <= 60, "of 100, which is a fourth"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_serving", [3, 40])
def test_a_model_of_few_engines_is_chosen_among_these(policy: PolicyName, num_serving: int) -> None:
    fleet = make_fleet(policy, 200)
    for number, engine in enumerate(decoders(fleet)):
        name = "rare" if number < num_serving else f"usual-{number % 2}"
        fleet.models.note_identity(engine, None, (ModelCard(name),))
    chosen = Counter[Engine]()
    for turn in range(400):
        engine = choose(fleet, RoutedRequest(turn, b"%d" % turn, "rare"))
        fleet.note_start(engine)
        chosen[engine] += 1
    assert set(chosen) == set(decoders(fleet)[:num_serving])
    assert max(chosen.values()) <= 1.5 * 400 / num_serving + 4


def test_small_fleets_are_looked_at_as_a_whole() -> None:
    fleet = make_fleet("least_in_flight", SMALL)
    for engine in decoders(fleet)[1:]:
        fleet.note_start(engine)
    assert {choose(fleet, RoutedRequest(turn)) for turn in range(50)} == {decoders(fleet)[0]}
    assert NUM_HOMES < SMALL
