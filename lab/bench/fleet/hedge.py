"""Hedged prefill in the simulated fleet: engines that pause at random, with and without a second prefill leg.

    BATON_TRACES=FOLDER python -m lab.bench hedge      two minutes; the folder as in `command`

Four prefill and four decode engines. Each one pauses every PAUSE_EVERY_S in the mean. The prompts are those
of Mooncake's conversation trace, all or the short ones: a long prompt takes longer than a pause. It has
one instant every 3 s, so the requests of an instant are spread over the time to the next one. The results go
to docs/benchmarks/hedge.json.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from baton.router.values.settings import PolicyName
from lab.bench.fleet.command import percentile, table_of, traces
from lab.bench.fleet.policies import always, by_cost, by_state
from lab.bench.fleet.world import Choose, Pauses, Request, World, read_trace

RESULTS = Path(__file__).parents[3] / "docs" / "benchmarks" / "hedge.json"
NUM_REQUESTS = 5000
INSTANT_S = 3.0
SHORT_MAX = 8192  # Tokens of a prompt.
PAUSE_EVERY_S = 60.0
PAUSES_S = (0.0, 2.0, 5.0)


class Load(NamedTuple):
    name: str
    longest: int
    speed: float  # Speed of the requests' arrival, relative to the trace.


LOADS = (
    Load("short prompts x1", SHORT_MAX, 1.0),
    Load("short prompts x3", SHORT_MAX, 3.0),
    Load("all prompts x0.5", 1 << 20, 0.5),
)
POLICIES: dict[PolicyName, Callable[[], Choose]] = {
    "least_in_flight": lambda: always(by_state("least_in_flight", sees_outliers=True)),
    "cost": by_cost,
}


def spread(requests: Sequence[Request]) -> list[Request]:
    rng = random.Random(1)
    later = (replace(one, arrives_s=one.arrives_s + rng.uniform(0, INSTANT_S)) for one in requests)
    return sorted(later, key=lambda one: one.arrives_s)


def measure(
    requests: Sequence[Request], speed: float, policy: PolicyName, pause_s: float, *, is_hedged: bool
) -> dict[str, float]:
    world = World(
        [f"p{number}" for number in range(4)],
        [f"d{number}" for number in range(4)],
        POLICIES[policy](),
        pauses=Pauses(PAUSE_EVERY_S, pause_s) if pause_s else None,
        hedges=policy if is_hedged else None,
    )
    outcome = world.run(requests, speed)
    return {
        "ttft_mean_s": round(sum(outcome.ttft_s) / len(outcome.ttft_s), 3),
        "ttft_p50_s": round(percentile(outcome.ttft_s, 0.5), 3),
        "ttft_p90_s": round(percentile(outcome.ttft_s, 0.9), 3),
        "ttft_p99_s": round(percentile(outcome.ttft_s, 0.99), 3),
        "ttft_p999_s": round(percentile(outcome.ttft_s, 0.999), 3),
        "hedged": round(outcome.num_hedges / outcome.num_requests, 4),
        "won": round(outcome.num_hedges_won / outcome.num_requests, 4),
    }


def main() -> int:
    console = Console(width=120)
    if (folder := traces(console, "hedge")) is None:
        return 0
    trace = spread(read_trace(folder / "conversation_trace.jsonl", NUM_REQUESTS))
    results: dict[str, dict[str, dict[str, float]]] = {}
    for load in LOADS:
        requests = [one for one in trace if one.num_tokens <= load.longest]
        found = results[load.name] = {
            f"{policy}, pauses of {pause_s:g} s" + (", hedged" if is_hedged else ""): measure(
                requests, load.speed, policy, pause_s, is_hedged=is_hedged
            )
            for policy in POLICIES
            for pause_s in PAUSES_S
            for is_hedged in (False, True)
        }
        console.print(table_of(f"{load.name}, {len(requests)} requests", found))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0
