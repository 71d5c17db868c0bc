"""Twice the load that the fleet can serve: what requests of high priority get, with the router's queue.

    BATON_TRACES=FOLDER python -m benchmarks overload       three minutes; traces as for `fleet`

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
import os
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from baton.cli.processes import free_ports
from baton.router.admission import Wish
from baton.router.policies import RoutedRequest
from baton.router.settings import AdmissionSettings
from benchmarks.fleet.command import FOLDER, NUM_ENGINES, percentile
from benchmarks.fleet.real import (
    REQUEST_S,
    Answer,
    Ask,
    ask_one,
    running_fleet,
    scaled,
    start_engines,
    start_routers,
)
from benchmarks.fleet.world import Outcome, Request, World, read_trace, url_of

RESULTS = Path(__file__).parents[2] / "docs" / "benchmarks" / "overload.json"
NUM_REQUESTS = {"conversation": 3000, "synthetic": 1500}
HIGH, LOW = 0, 1
HIGH_SHARE = 0.2
OVERLOAD = 2.0
NUM_REAL = 100
NUM_ROUNDS = 3
REAL_OPTIONS = {
    "no queue": [],
    "cap of 500 tokens": ["--max-prefill-tokens", "500"],
    "cap of 500 tokens and 8 answers": ["--max-prefill-tokens", "500", "--max-running", "8"],
}
TTFT_S = 30.0  # Of low priority; more is refused.
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
        cached={url_of(name): num_tokens for name, num_tokens in cached.items() if num_tokens},
        num_output_tokens=fleet.expected_output,
    )
    found = fleet.place(routed, [], [], lambda engine: True, world.router.pairs.load_s)
    assert found is not None
    consumer, is_alone = found
    producer = None if is_alone else fleet.choose("prefill", routed, world.now_s)
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
    high, low = Wish(HIGH), Wish(LOW, ttft_s=TTFT_S)
    return [replace(one, wish=high if rng.random() < HIGH_SHARE else low) for one in requests]


def served_speed(requests: Sequence[Request]) -> float:
    """How much faster than in the trace the fleet serves the prompts, when it has always enough to do."""
    took_s = requests[-1].arrives_s - requests[0].arrives_s
    outcome = run(requests, 1e9, None)
    return took_s / outcome.last_first_s


def figures(outcome: Outcome, requests: Sequence[Request]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, priority in (("high", HIGH), ("low", LOW)):
        times_s = outcome.ttft_s_of.get(priority, [])
        num_asked = sum(one.wish.priority == priority for one in requests)
        found |= {f"{name}_ttft_p{share}_s": round(percentile(times_s, share / 100), 3) for share in (50, 99)}
        found[f"{name}_served"] = round(len(times_s) / num_asked, 3) if num_asked else 0.0
    found["hit_rate"] = round(outcome.hit_rate, 3)
    return found


def main() -> int:
    console = Console(width=140)
    folder = os.environ.get(FOLDER)
    if folder is None or not Path(folder).is_dir():
        console.print(f"overload: skipped, because {FOLDER} names no folder with Mooncake's traces")
        return 0
    results: dict[str, Any] = {}
    for trace, num_requests in NUM_REQUESTS.items():
        requests = with_priorities(read_trace(Path(folder) / f"{trace}_trace.jsonl", num_requests))
        speed = OVERLOAD * served_speed(requests)
        high = [one for one in requests if one.wish.priority == HIGH]
        found = {"unloaded": figures(run(high, speed, None), high)}
        for name, admission in ADMISSIONS.items():
            found[name] = figures(run(requests, speed, admission), requests)
        usual = found["unloaded"]["high_ttft_p99_s"]
        for row in found.values():
            row["high_p99_over_unloaded"] = round(row["high_ttft_p99_s"] / usual, 3)
        results[trace] = {"speed": round(speed, 3), "runs": found}
        console.print(_table(f"{trace} x{speed:.2f}", found))
    real = measure_real(Path(folder))
    for trace, found in real.items():
        console.print(_table(f"real engines, {trace}", found))
    RESULTS.write_text(json.dumps({"simulated": results, "real": real}, indent=1) + "\n")
    return 0


def measure_real(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    results = {}
    with running_fleet() as (processes, model):
        ports = free_ports(12 + len(REAL_OPTIONS))
        urls, _ = start_engines(processes, model, ports[:12])
        routers = start_routers(processes, urls, REAL_OPTIONS, ports[12:])
        for trace in NUM_REQUESTS:
            requests = with_priorities(read_trace(folder / f"{trace}_trace.jsonl", NUM_REAL))
            asks = [scaled(one)._replace(priority=one.wish.priority) for one in requests]
            results[trace] = asyncio.run(_measure_real(asks, routers))
    return results


async def _measure_real(asks: Sequence[Ask], routers: Mapping[str, str]) -> dict[str, dict[str, float]]:
    took_s = asks[-1].arrives_s - asks[0].arrives_s
    await replay_some(routers["no queue"], asks, 1e9, "memory")  # Fills the memory; not counted.
    served = await replay_some(routers["no queue"], asks, 1e9, "speed")
    speed = OVERLOAD * took_s / max(one.ttft_s for one in served if one is not None)
    high = [ask for ask in asks if ask.priority == HIGH]
    runs = {"unloaded": ("no queue", high), **{name: (name, asks) for name in routers}}
    found: dict[str, list[tuple[int, Answer | None]]] = {name: [] for name in runs}
    for _ in range(NUM_ROUNDS):
        for name, (router, sent) in runs.items():
            answers = await replay_some(routers[router], sent, speed, secrets.token_hex(4))
            found[name] += zip([ask.priority for ask in sent], answers, strict=True)
    rows = {name: _real_figures(answers) for name, answers in found.items()}
    usual = rows["unloaded"]["high_ttft_p99_s"]
    return {
        name: {**row, "high_p99_over_unloaded": round(row["high_ttft_p99_s"] / usual, 3)}
        for name, row in rows.items()
    }


async def replay_some(url: str, asks: Sequence[Ask], speed: float, salt: str) -> list[Answer | None]:
    """None: refused."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    async with httpx.AsyncClient(timeout=REQUEST_S, limits=limits, trust_env=False) as client:
        began_s = time.perf_counter()

        async def one(ask: Ask) -> Answer | None:
            await asyncio.sleep(max(0.0, began_s + ask.arrives_s / speed - time.perf_counter()))
            try:
                return await ask_one(client, url, ask, salt)
            except ValueError as error:
                if "status 429" in str(error):
                    return None
                raise

        return await asyncio.gather(*map(one, asks))


def _real_figures(answers: Sequence[tuple[int, Answer | None]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, priority in (("high", HIGH), ("low", LOW)):
        asked = [answer for one, answer in answers if one == priority]
        times_s = [answer.ttft_s for answer in asked if answer is not None]
        found |= {f"{name}_ttft_p{share}_s": round(percentile(times_s, share / 100), 3) for share in (50, 99)}
        found[f"{name}_served"] = round(len(times_s) / len(asked), 3) if asked else 0.0
    return found


def _table(title: str, found: dict[str, dict[str, float]]) -> Table:
    names = list(next(iter(found.values())))
    table = Table("", *names, title=title)
    for name, row in found.items():
        table.add_row(name, *(f"{row[one]:g}" for one in names))
    return table
