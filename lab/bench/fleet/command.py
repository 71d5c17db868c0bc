"""Routing policies on the Mooncake traces, in a simulated fleet of eight engines.

    BATON_TRACES=FOLDER python -m lab.bench fleet        six minutes; the folder has *_trace.jsonl of
                                                          kvcache-ai/Mooncake, FAST25-release/traces

    alone   eight engines that compute prompts and answers
    P/D     four prefill and four decode engines; `cost` may leave a prompt to a decode engine

A policy decides otherwise after the smallest change, so each figure is the median of runs whose requests
arrive up to JITTER_S earlier or later, and have their homes (`cost`) elsewhere. Engines and times are
modelled (`engine`); policies, cost and the index of blocks are the router's. vllm-router's policy is written
anew from its documentation. The oracle sees the caches themselves. The results go to
docs/benchmarks/fleet.json and fleet.png.
"""

from __future__ import annotations

import json
import os
import random
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from lab.bench.fleet.policies import alone, always, by_cost, by_state, cache_aware
from lab.bench.fleet.world import Choose, Request, World, read_trace

RESULTS = Path(__file__).parents[3] / "docs" / "benchmarks" / "fleet.json"
FOLDER = "BATON_TRACES"
NUM_ENGINES = 8
LAG_S = 5.0
SLOWNESS = 2.0
STRAGGLES = 8.0
NUM_RUNS, JITTER_S = 5, 0.05


class Load(NamedTuple):
    trace: str
    num_requests: int
    speed: float  # Speed of the requests' arrival, relative to the trace.

    @property
    def name(self) -> str:
        return f"{self.trace} x{self.speed:g}"


LOADS = [
    *(Load("conversation", 3000, speed) for speed in (0.6, 1.0, 1.3)),
    *(Load("synthetic", 1500, speed) for speed in (0.3, 0.5, 0.8)),
]


class Run(NamedTuple):
    is_split: bool  # True: prefill and decode engines are apart.
    policy: Callable[[], Choose]
    knows_all: bool = False
    lag_s: float = 0.1
    slowness: float = 1.0  # Slowness of the first prefill and the first decode engine.
    num_routers: int = 1
    shares_loads: bool = True


COST = "P/D: cost"
RUNS: dict[str, Run] = {
    "alone: round robin": Run(False, lambda: alone(by_state("round_robin"))),
    "alone: least in flight": Run(False, lambda: alone(by_state("least_in_flight"))),
    "alone: prefix affinity": Run(False, lambda: alone(by_state("prefix_affinity"))),
    "alone: vllm-router's cache_aware": Run(False, lambda: alone(cache_aware())),
    "alone: cost": Run(False, by_cost),
    "P/D: round robin": Run(True, lambda: always(by_state("round_robin"))),
    "P/D: least in flight": Run(True, lambda: always(by_state("least_in_flight"))),
    "P/D: vllm-router's cache_aware": Run(True, lambda: always(cache_aware())),
    COST: Run(True, by_cost),
    "P/D: cost, oracle": Run(True, by_cost, knows_all=True),
    "P/D: cost, speeds of the model": Run(True, lambda: by_cost(is_learned=False)),
    "P/D: cost without the caches": Run(True, lambda: by_cost(without="cache")),
    "P/D: cost without the caches, prefixes not hashed": Run(
        True, lambda: by_cost(without="cache", is_hashed=False)
    ),
    "P/D: cost without homes": Run(True, lambda: by_cost(without="home")),
    "P/D: cost without the queues": Run(True, lambda: by_cost(without="queue")),
    "P/D: cost, events 5 s late": Run(True, by_cost, lag_s=LAG_S),
    "P/D: cost, two routers": Run(True, by_cost, num_routers=2),
    "P/D: cost, two routers that share no loads": Run(True, by_cost, num_routers=2, shares_loads=False),
    "P/D, two stragglers: least in flight": Run(
        True, lambda: always(by_state("least_in_flight")), slowness=STRAGGLES
    ),
    "P/D, two stragglers: least in flight, outliers get less": Run(
        True, lambda: always(by_state("least_in_flight", sees_outliers=True)), slowness=STRAGGLES
    ),
    "P/D, two stragglers: cost": Run(True, by_cost, slowness=STRAGGLES),
    "P/D, two slow engines: cost": Run(True, by_cost, slowness=SLOWNESS),
    "P/D, two slow engines: cost, speeds of the model": Run(
        True, lambda: by_cost(is_learned=False), slowness=SLOWNESS
    ),
}


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def jittered(requests: Sequence[Request], number: int) -> list[Request]:
    rng = random.Random(number)

    def changed(one: Request) -> Request:
        arrives_s = max(0.0, one.arrives_s + rng.uniform(-JITTER_S, JITTER_S))
        home = one.home and random.Random(f"{one.home} {number}").getrandbits(64)
        return replace(one, arrives_s=arrives_s, home=home)

    return [*map(changed, requests)]


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def _measure_all(requests: Sequence[Request], speed: float) -> dict[str, dict[str, float]]:
    variants = [jittered(requests, number) for number in range(NUM_RUNS)]
    with ProcessPoolExecutor() as processes:
        runs = {
            name: [processes.submit(_measure_named, one, speed, name) for one in variants] for name in RUNS
        }
        return {name: medians([one.result() for one in found]) for name, found in runs.items()}


def _measure_named(requests: Sequence[Request], speed: float, name: str) -> dict[str, float]:
    return measure(requests, speed, RUNS[name])


def measure(requests: Sequence[Request], speed: float, run: Run) -> dict[str, float]:
    num_producers = NUM_ENGINES // 2 if run.is_split else 0
    world = World(
        [f"p{number}" for number in range(num_producers)],
        [f"d{number}" for number in range(NUM_ENGINES - num_producers)],
        run.policy(),
        knows_all=run.knows_all,
        lag_s=run.lag_s,
        slowness={"p0": run.slowness, "d0": run.slowness},
        num_routers=run.num_routers,
        shares_loads=run.shares_loads,
    )
    outcome = world.run(requests, speed)
    return {
        "hit_rate": round(outcome.hit_rate, 4),
        "ttft_p50_s": round(percentile(outcome.ttft_s, 0.5), 3),
        "ttft_p90_s": round(percentile(outcome.ttft_s, 0.9), 3),
        "ttft_p99_s": round(percentile(outcome.ttft_s, 0.99), 3),
        "token_p50_ms": round(1e3 * percentile(outcome.token_s, 0.5), 1),
        "token_p90_ms": round(1e3 * percentile(outcome.token_s, 0.9), 1),
        "handed_over": round(outcome.num_handed_over / outcome.num_requests, 3),
    }


def traces(console: Console, benchmark: str) -> Path | None:
    """The folder with Mooncake's traces. None: there is none, and the benchmark reports that."""
    folder = os.environ.get(FOLDER)
    if folder is not None and Path(folder).is_dir():
        return Path(folder)
    console.print(f"{benchmark}: skipped, because {FOLDER} names no folder with Mooncake's traces")
    return None


def table_of(title: str, found: dict[str, dict[str, float]]) -> Table:
    names = list(next(iter(found.values())))
    table = Table("", *names, title=title)
    for name, row in found.items():
        table.add_row(name, *(f"{row[one]:g}" for one in names))
    return table


def main() -> int:
    console = Console(width=120)
    if (folder := traces(console, "fleet")) is None:
        return 0
    results: dict[str, dict[str, dict[str, float]]] = {}
    for load in LOADS:
        requests = read_trace(folder / f"{load.trace}_trace.jsonl", load.num_requests)
        found = results[load.name] = _measure_all(requests, load.speed)
        console.print(table_of(f"{load.name}, {load.num_requests} requests", found))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    _plot(results)
    return 0


PLOTTED = (
    "alone: round robin",
    "alone: vllm-router's cache_aware",
    "alone: cost",
    "P/D: round robin",
    "P/D: vllm-router's cache_aware",
    COST,
)


def _plot(results: dict[str, dict[str, dict[str, float]]]) -> None:
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    wanted = {"hit_rate": "hit rate", "ttft_p90_s": "TTFT, p90, s", "token_p90_ms": "time per token, p90, ms"}
    for axis, (figure_name, title) in zip(axes, wanted.items(), strict=True):
        for number, policy in enumerate(PLOTTED):
            heights = [found[policy][figure_name] for found in results.values()]
            places = [place + number * 0.13 for place in range(len(heights))]
            axis.bar(places, heights, 0.13, label=policy)
        axis.set_xticks([place + 0.32 for place in range(len(results))], results, rotation=20)
        axis.set_title(title)
    axes[1].set_yscale("log")
    axes[0].legend(fontsize=8)
    figure.savefig(RESULTS.with_suffix(".png"), dpi=110)
    pyplot.close(figure)
