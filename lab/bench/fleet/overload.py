"""Twice the load that the fleet can serve: what requests of high priority get, with the router's queue.

    BATON_TRACES=FOLDER python -m lab.bench overload       five minutes; traces as for `fleet`

One request in five has high priority (drawn with a fixed seed). The load that the fleet can serve is measured
first: the trace arrives at once, and its prompts per second are counted. Then the requests arrive twice as
fast as that. `unloaded`: only those of high priority, at the same instants.

Once in the simulated fleet, and once with two prefill and two decode engines and traces that are scaled down,
as in `real`. There the answers of all rounds are taken together: each round has about 20 of high priority.
The results go to docs/benchmarks/overload.json.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.cli.processes import free_ports
from baton.router.fleet.admission import Objective
from baton.router.fleet.block_index import Match
from baton.router.fleet.policies import RoutedRequest
from baton.router.values.settings import AdmissionSettings
from lab.bench.fleet.command import NUM_ENGINES, percentile, table_of, traces
from lab.bench.fleet.real import (
    Answer,
    Ask,
    replay,
    running_fleet,
    scaled,
    start_engines,
    start_routers,
)
from lab.bench.fleet.world import Outcome, Request, World, read_trace, url_of

RESULTS = Path(__file__).parents[3] / "docs" / "benchmarks" / "overload.json"
NUM_REQUESTS = {"conversation": 3000, "synthetic": 1500}
HIGH, LOW = 0, 1
HIGH_SHARE = 0.2
OVERLOAD = 2.0
AT_ONCE = 1e9  # Speed.
NUM_REAL = 100
NUM_ROUNDS = 3
STEP_TOKENS = 256  # Prompt tokens of a step. An urgent prompt waits for at most two steps.
CORES = {"prefill": 0, "decode": 1}  # An engine has one for itself, as it would have a GPU.
CAP = ["--max-prefill-tokens", "500"]
# Options of the routers, by the order in which the engines compute prompts.
REAL_OPTIONS = {
    "fcfs": {"no queue": [], "cap of 500 tokens": CAP},
    "priority": {"no queue": [], "cap of 500 tokens": [*CAP, "--engines-by-priority"]},
}
TTFT_S = 30.0  # TTFT objective of low priority; requests that would miss it are refused.
ADMISSIONS: dict[str, AdmissionSettings | None] = {
    "no queue": None,
    **{
        f"cap of {tokens} tokens": AdmissionSettings(max_tokens=tokens, max_waiting=10_000)
        for tokens in (1, 2_000, 8_000, 32_000)
    },
    "cap of 100 answers": AdmissionSettings(max_running=100, max_waiting=10_000),
}


def by_fleet(world: World, request: Request) -> tuple[str | None, str]:
    """The router's own choice by cost, caps included."""
    fleet, cached = world.router.fleet, world.cached(request)
    routed = RoutedRequest(
        world.num_routed,
        str(request.keys[:1]).encode(),
        num_tokens=request.num_tokens,
        cached={url_of(name): Match.in_cache(count) for name, count in cached.items() if count},
        num_output_tokens=fleet.choice.expected_output,
        home=request.home,
    )
    found = fleet.choice.place(routed, [], [], lambda engine: True, world.now_s, world.router.pairs.load_s)
    assert found is not None
    consumer, is_alone = found
    producer = None if is_alone else fleet.choice.choose("prefill", routed, world.now_s)
    return None if producer is None else producer.url.removeprefix("http://"), consumer.url.removeprefix(
        "http://"
    )


def run(requests: Sequence[Request], speed: float, admission: AdmissionSettings | None) -> Outcome:
    half = NUM_ENGINES // 2
    world = World(
        [f"p{number}" for number in range(half)],
        [f"d{number}" for number in range(half)],
        by_fleet,
        admission=admission,
    )
    return world.run(requests, speed)


def with_priorities(requests: Sequence[Request]) -> list[Request]:
    rng = random.Random("priorities")
    high, low = Objective(HIGH), Objective(LOW, ttft_s=TTFT_S)
    return [replace(one, objective=high if rng.random() < HIGH_SHARE else low) for one in requests]


def served_speed(requests: Sequence[Request]) -> float:
    """How much faster than in the trace the fleet serves the prompts, when it has always enough to do."""
    took_s = requests[-1].arrives_s - requests[0].arrives_s
    outcome = run(requests, AT_ONCE, None)
    return took_s / outcome.last_first_s


def figures(
    ttft_s: Mapping[int, Sequence[float]], priorities: Sequence[int], hit_rate: float
) -> dict[str, float]:
    """`ttft_s`: values of requests that were served, by priority. `priorities`: those of all requests."""
    found = {"hit_rate": round(hit_rate, 3)}
    for name, priority in (("high", HIGH), ("low", LOW)):
        times_s, num_asked = ttft_s.get(priority, []), priorities.count(priority)
        found |= {f"{name}_ttft_p{share}_s": round(percentile(times_s, share / 100), 3) for share in (50, 99)}
        found[f"{name}_served"] = round(len(times_s) / num_asked, 3) if num_asked else 0.0
    return found


def compared(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    usual = rows["unloaded"]["high_ttft_p99_s"]
    return {
        name: {**row, "high_p99_over_unloaded": round(row["high_ttft_p99_s"] / usual, 3)}
        for name, row in rows.items()
    }


def simulate(requests: Sequence[Request], speed: float) -> dict[str, dict[str, float]]:
    high = [one for one in requests if one.objective.priority == HIGH]
    runs = {
        "unloaded": (high, None),
        **{name: (requests, admission) for name, admission in ADMISSIONS.items()},
    }
    rows = {}
    for name, (sent, admission) in runs.items():
        outcome = run(sent, speed, admission)
        priorities = [one.objective.priority for one in sent]
        rows[name] = figures(outcome.ttft_s_of, priorities, outcome.hit_rate)
    return compared(rows)


def main() -> int:
    console = Console(width=140)
    if (folder := traces(console, "overload")) is None:
        return 0
    simulated: dict[str, Any] = {}
    for trace, num_requests in NUM_REQUESTS.items():
        requests = with_priorities(read_trace(folder / f"{trace}_trace.jsonl", num_requests))
        speed = OVERLOAD * served_speed(requests)
        found = simulate(requests, speed)
        simulated[trace] = {"speed": round(speed, 3), "runs": found}
        console.print(table_of(f"{trace} x{speed:.2f}", found))
    real = measure_real(folder)
    for trace, found in real.items():
        console.print(table_of(f"real engines, {trace}", found))
    RESULTS.write_text(json.dumps({"simulated": simulated, "real": real}, indent=1) + "\n")
    return 0


def measure_real(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    results = {}
    for order, options in REAL_OPTIONS.items():
        with running_fleet() as (processes, model):
            ports = free_ports(3 * len(CORES) + len(options))
            extra = ["--scheduling-policy", order, "--max-num-batched-tokens", str(STEP_TOKENS)]
            urls, _ = start_engines(processes, model, ports, list(CORES), extra, CORES)
            routers = start_routers(processes, urls, options, ports[3 * len(CORES) :])
            for trace in NUM_REQUESTS:
                requests = with_priorities(read_trace(folder / f"{trace}_trace.jsonl", NUM_REAL))
                asks = [scaled(one)._replace(priority=one.objective.priority) for one in requests]
                results[f"{trace}, engines by {order}"] = asyncio.run(_measure_real(asks, routers))
    return results


async def _measure_real(asks: Sequence[Ask], routers: Mapping[str, str]) -> dict[str, dict[str, float]]:
    took_s = asks[-1].arrives_s - asks[0].arrives_s
    await replay(routers["no queue"], asks, AT_ONCE, "memory")  # Fills the memory; not counted.
    probe = await replay(routers["no queue"], asks, AT_ONCE, "speed")
    speed = OVERLOAD * took_s / max(one.ttft_s for one in probe if one is not None)
    high = [ask for ask in asks if ask.priority == HIGH]
    runs = {"unloaded": ("no queue", high), **{name: (name, asks) for name in routers}}
    found: dict[str, list[tuple[int, Answer | None]]] = {name: [] for name in runs}
    for _ in range(NUM_ROUNDS):
        for name, (router, sent) in runs.items():
            answers = await replay(routers[router], sent, speed, secrets.token_hex(4))
            found[name] += zip([ask.priority for ask in sent], answers, strict=True)
    rows = {}
    for name, got in found.items():
        served = [(priority, answer) for priority, answer in got if answer is not None]
        ttft_s = {
            one: [answer.ttft_s for priority, answer in served if priority == one] for one in (HIGH, LOW)
        }
        num_cached = sum(answer.num_cached for _, answer in served)
        hit_rate = num_cached / sum(answer.num_tokens for _, answer in served)
        rows[name] = figures(ttft_s, [priority for priority, _ in got], hit_rate)
    return compared(rows)
