"""The simulated fleet of the policies' benchmark: every request is answered, and caches and queues count."""

import json
import random
from pathlib import Path

import pytest

from baton.router.values.settings import PolicyName
from lab.bench.fleet import hedge
from lab.bench.fleet.command import RUNS, measure, percentile
from lab.bench.fleet.world import Pauses, Request, World, read_trace

NUM_REQUESTS, NUM_DOCUMENTS, BLOCKS = 120, 24, 40


@pytest.fixture
def requests(tmp_path: Path) -> list[Request]:
    """Documents that come again, each time with a question of its own."""
    rng = random.Random(1)
    lines = []
    for number in range(NUM_REQUESTS):
        document = rng.randrange(NUM_DOCUMENTS)
        ids = [*range(document * BLOCKS, (document + 1) * BLOCKS), 100_000 + number]
        one = {
            "timestamp": number * 250,
            "input_length": 512 * len(ids) + 7,
            "output_length": 20,
            "hash_ids": ids,
        }
        lines.append(json.dumps(one))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return read_trace(path, NUM_REQUESTS)


@pytest.mark.parametrize("name", RUNS)
def test_every_request_gets_its_tokens(requests: list[Request], name: str) -> None:
    run = RUNS[name]
    producers = ["p0", "p1"] if run.is_split else []
    world = World(producers, ["d0", "d1"], run.policy(), knows_all=run.knows_all, lag_s=run.lag_s)
    outcome = world.run(requests[:40], 1.0)
    assert len(outcome.ttft_s) == len(outcome.token_s) == 40
    assert min(outcome.ttft_s) > 0
    assert all(seen.in_flight == seen.num_queued_tokens == 0 for seen in world.seen.values())


def test_cost_finds_the_caches_and_the_short_queues(requests: list[Request]) -> None:
    found = {
        name: measure(requests, 1.0, RUNS[name])
        for name in ("P/D: round robin", "P/D: cost", "P/D: cost, oracle", "P/D: cost without the caches")
    }
    cost, oracle = found["P/D: cost"], found["P/D: cost, oracle"]
    assert cost["hit_rate"] > 1.5 * found["P/D: cost without the caches"]["hit_rate"]
    assert cost["hit_rate"] >= 0.95 * oracle["hit_rate"]
    assert cost["ttft_p90_s"] < found["P/D: round robin"]["ttft_p90_s"]


def test_a_percentile_is_one_of_the_values() -> None:
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 2.0, 3.0]
    assert percentile([], 0.5) == 0.0


@pytest.mark.parametrize("policy", hedge.POLICIES)
def test_prompts_that_a_pause_holds_up_are_hedged(requests: list[Request], policy: PolicyName) -> None:
    counts = []
    for pauses in (None, Pauses(every_s=4.0, length_s=4.0)):
        producers, consumers = ["p0", "p1", "p2"], ["d0", "d1"]
        world = World(producers, consumers, hedge.POLICIES[policy](), pauses=pauses, hedges=policy)
        outcome = world.run(requests, 0.2)
        assert len(outcome.ttft_s) == len(outcome.token_s) == NUM_REQUESTS
        assert all(seen.in_flight == seen.num_queued_tokens == 0 for seen in world.seen.values())
        assert all(engine.load == engine.queued_tokens == 0 for engine in world.router.fleet.engines)
        counts.append(outcome.num_hedges)
        assert outcome.num_hedges_won <= outcome.num_hedges
    assert counts[0] == 0 < counts[1]
