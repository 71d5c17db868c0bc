"""Routing policies with real engines: two prefill and two decode engines, and a trace that is scaled down.

    BATON_TRACES=FOLDER python -m lab.bench policies     fifteen minutes; traces as for `fleet`

Blocks of the trace have TOKENS_PER_BLOCK tokens here, and prompts and answers are as much shorter; equal ids
are equal tokens still. One router for each policy has the same four engines (`baton serve`, a small model
with random weights), in turns: a round has one run of every policy, in another order than the last one, and
with tokens of its own, so that no run finds what another one left in a cache. The client is an open loop.

All processes share the machine's two cores, one for each prefill engine, so only the order of policies
counts: figures are medians over rounds, with the lowest and the highest one. `simulated` is the same part of
the trace in the simulated fleet of two and two engines, at the same load of the prefill engines. There the
decode engines do not take time from the prefill engines. The results go to docs/benchmarks/policies.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from baton.cli.processes import Fleet, free_ports
from baton.cli.system import EngineArguments, EnginePlan, HandoffArguments, KVRole
from baton.core.secret_source import SECRET_ENV
from lab.bench.fleet import engine as modelled
from lab.bench.fleet.command import FOLDER, percentile, traces
from lab.bench.fleet.policies import always, by_cost, by_state
from lab.bench.fleet.world import Choose, Request, World, read_trace

RESULTS = Path(__file__).parents[3] / "docs" / "benchmarks" / "policies.json"
TOKENS_PER_BLOCK = 64  # 512 in the trace.
SCALE = 512 // TOKENS_PER_BLOCK
NUM_REQUESTS = 120
NUM_READ = 3_000  # Requests of the trace that are read.
SESSION_BLOCK, SESSION_REQUESTS_MIN = 3, 3  # Requests of a session have this block in common.
PROMPT_TOKENS_MAX = 6_000
ANSWER_TOKENS_MAX = 48
BLOCK_SIZE, NUM_BLOCKS = 16, 6_000
VOCABULARY = 2_048
LOADS = {"conversation": 0.4, "synthetic": 0.4}  # Share of two prefill engines' time, had they no caches.
NUM_ROUNDS = 3
START_S = 120.0
REQUEST_S = 120.0
HANDOFF = HandoffArguments()
MODEL = ("--hidden", "128", "--layers", "4", "--heads", "4", "--vocab", str(VOCABULARY))


class Policy(NamedTuple):
    name: str
    has_events: bool
    simulated: Choose

    @property
    def label(self) -> str:
        return f"{self.name} with KV events" if self.has_events else self.name


def policies() -> list[Policy]:
    """New ones: they may remember."""
    return [
        Policy("round_robin", False, always(by_state("round_robin"))),
        Policy("least_in_flight", False, always(by_state("least_in_flight"))),
        Policy("prefix_affinity", False, always(by_state("prefix_affinity"))),
        Policy("cost", False, by_cost(without="cache")),
        Policy("cost", True, by_cost()),
    ]


class Ask(NamedTuple):
    arrives_s: float  # Arrival time in the trace.
    num_tokens: int
    num_output: int
    blocks: Sequence[int]
    priority: int = 0

    def prompt(self, salt: str) -> list[int]:
        """Equal blocks have equal tokens; what comes after the last whole block is its own."""
        ids: list[int] = []
        for block in (*self.blocks, -1 - int(1000 * self.arrives_s)):
            rng = random.Random(f"{salt} {block}")
            ids += [rng.randrange(10, VOCABULARY) for _ in range(TOKENS_PER_BLOCK)]
        return ids[: self.num_tokens]


class Answer(NamedTuple):
    ttft_s: float
    token_s: float
    num_tokens: int
    num_cached: int


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[Any]
    usage: _Usage | None = None


def read_sessions(path: Path) -> list[Request]:
    """The first requests of sessions that have several: few others have a second one."""
    requests = [one for one in read_trace(path, NUM_READ) if len(one.blocks) > SESSION_BLOCK]
    counts = Counter(one.blocks[SESSION_BLOCK] for one in requests)
    sessions = [one for one in requests if counts[one.blocks[SESSION_BLOCK]] >= SESSION_REQUESTS_MIN]
    return sessions[:NUM_REQUESTS]


def scaled(one: Request) -> Ask:
    num_tokens = min(PROMPT_TOKENS_MAX, max(1, one.num_tokens // SCALE))
    num_output = max(2, min(ANSWER_TOKENS_MAX, one.num_output // SCALE))
    return Ask(one.arrives_s, num_tokens, num_output, one.blocks[: num_tokens // TOKENS_PER_BLOCK])


class Refused(Exception):
    """The router refused the request with 429."""


async def ask_one(client: httpx.AsyncClient, url: str, ask: Ask, salt: str) -> Answer:
    """Raises Refused, httpx.HTTPError, ValueError."""
    body = {
        "model": "bench",
        "prompt": ask.prompt(salt),
        "max_tokens": ask.num_output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "priority": ask.priority,
    }
    content = msgspec.json.encode(body)
    began_s, first_s, last_s, usage = time.perf_counter(), 0.0, 0.0, None
    headers = {"content-type": "application/json"}
    async with client.stream("POST", f"{url}/v1/completions", content=content, headers=headers) as answer:
        if answer.status_code == 429:
            raise Refused
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}: {(await answer.aread())[:300]!r}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = msgspec.json.decode(line[6:].encode(), type=_Chunk)
            last_s = time.perf_counter()
            first_s = first_s or last_s
            usage = chunk.usage or usage
    if usage is None:
        raise ValueError("an answer without usage")
    details = usage.prompt_tokens_details or _Details()
    token_s = (last_s - first_s) / max(1, usage.completion_tokens - 1)
    return Answer(first_s - began_s, token_s, usage.prompt_tokens, details.cached_tokens)


async def replay(url: str, asks: Sequence[Ask], speed: float, salt: str) -> list[Answer | None]:
    """An open loop: `speed` times as fast as in the trace. None: refused."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    async with httpx.AsyncClient(timeout=REQUEST_S, limits=limits, trust_env=False) as client:
        began_s = time.perf_counter()

        async def one(ask: Ask) -> Answer | None:
            await asyncio.sleep(max(0.0, began_s + ask.arrives_s / speed - time.perf_counter()))
            try:
                return await ask_one(client, url, ask, salt)
            except Refused:
                return None

        return await asyncio.gather(*map(one, asks))


async def prefill_speed(url: str) -> float:
    """Tokens per second of one engine, alone on the machine."""
    asks = [Ask(0.0, num_tokens, 2, range(num_tokens // TOKENS_PER_BLOCK)) for num_tokens in (1500, 3000) * 3]
    async with httpx.AsyncClient(timeout=REQUEST_S, trust_env=False) as client:
        speeds = [
            ask.num_tokens / (await ask_one(client, url, ask, f"speed {number}")).ttft_s
            for number, ask in enumerate(asks)
        ]
    return statistics.median(speeds)


def figures(answers: Sequence[Answer]) -> dict[str, float]:
    ttft_s = [one.ttft_s for one in answers]
    return {
        "hit_rate": sum(one.num_cached for one in answers) / sum(one.num_tokens for one in answers),
        "ttft_p50_ms": 1e3 * percentile(ttft_s, 0.5),
        "ttft_p90_ms": 1e3 * percentile(ttft_s, 0.9),
        "token_p50_ms": 1e3 * percentile([one.token_s for one in answers], 0.5),
    }


def simulate(path: Path, load: float, policy: Policy) -> dict[str, float]:
    """Run the simulated fleet, with caches that are as small relative to the trace as the real ones."""
    requests = read_sessions(path)
    num_tokens = sum(one.num_tokens for one in requests)
    world = World(
        ["p0", "p1"], ["d0", "d1"], policy.simulated, cache_blocks=NUM_BLOCKS * BLOCK_SIZE // TOKENS_PER_BLOCK
    )
    took_s = requests[-1].arrives_s - requests[0].arrives_s
    speed = 2 * load * modelled.PREFILL_TOKENS_PER_S * took_s / num_tokens
    outcome = world.run(requests, speed)
    return {
        "hit_rate": outcome.hit_rate,
        "ttft_p50_ms": 1e3 * percentile(outcome.ttft_s, 0.5),
        "ttft_p90_ms": 1e3 * percentile(outcome.ttft_s, 0.9),
        "token_p50_ms": 1e3 * percentile(outcome.token_s, 0.5),
    }


def start_engines(
    fleet: Fleet,
    model: Path,
    ports: Sequence[int],
    roles: Sequence[str] = ("prefill", "prefill", "decode", "decode"),
    options: Sequence[str] = (),
    cores: Mapping[str, int] | None = None,
    transfer_config: Callable[[str, KVRole], dict[str, Any]] = HANDOFF.transfer_config,
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the engines' addresses, and a router's options for KV events.

    `ports`: three for each engine. `cores`: cores of the machine, by role.
    """
    cores = cores or {}
    urls: dict[str, list[str]] = {"prefill": [], "decode": []}
    events: list[str] = []
    ready = {}
    for number, role in enumerate(roles):
        kv_role: KVRole = "kv_producer" if role == "prefill" else "kv_consumer"
        first = len(roles) + 2 * number
        endpoint, replay_endpoint = (f"tcp://127.0.0.1:{ports[first + one]}" for one in (0, 1))
        config = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay_endpoint}
        extra = ("--kv-events-config", json.dumps(config), *options)
        plan = EnginePlan(
            f"{role}-{number}",
            ports[number],
            EngineArguments(
                model,
                block_size=BLOCK_SIZE,
                num_blocks=NUM_BLOCKS,
                served_model_name="bench",
                extra=extra,
            ),
            transfer_config(f"{role}-{number}", kv_role),
        )
        pinned = ["taskset", "-c", str(cores[role])] if role in cores else []
        child = fleet.start(plan.name, [*pinned, *plan.command()], env={"OMP_NUM_THREADS": "1"})
        ready[child] = f"{plan.url}/health"
        urls[role].append(plan.url)
        events += ["--kv-events", f"{plan.url}={endpoint},{replay_endpoint}"]
    fleet.wait_ready(ready, timeout_s=START_S)
    return urls, events


def start_routers(
    fleet: Fleet,
    urls: Mapping[str, Sequence[str]],
    options: Mapping[str, Sequence[str]],
    ports: Sequence[int],
) -> dict[str, str]:
    """Start a router for each label of `options`. Return their addresses by label."""
    routers, ready = {}, {}
    for (label, extra), port in zip(options.items(), ports, strict=True):
        command = [sys.executable, "-m", "baton.cli", "route", "--port", str(port), "--workers", "1", *extra]
        for role, addresses in urls.items():
            for address in addresses:
                command += [f"--{role}", address]
        child = fleet.start(f"router-{port}", command)
        routers[label] = f"http://127.0.0.1:{port}"
        ready[child] = f"{routers[label]}/health"
    fleet.wait_ready(ready, timeout_s=START_S)
    return routers


@contextmanager
def running_fleet() -> Iterator[tuple[Fleet, Path]]:
    """A folder with the small model, and an owner of processes."""
    with tempfile.TemporaryDirectory(prefix="baton-policies-") as temporary:
        model = Path(temporary) / "model"
        command = [sys.executable, "-m", "baton.cli", "model", "new", str(model), *MODEL]
        subprocess.run([*command, "--max-position", "8192"], check=True, stdout=subprocess.DEVNULL)
        env = {name: value for name, value in os.environ.items() if name != FOLDER}  # No setting of engines.
        env = {**env, SECRET_ENV: secrets.token_hex(32)}
        with Fleet(Path(temporary) / "logs", env=env) as fleet:
            yield fleet, model


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def main() -> int:
    console = Console(width=150)
    if (folder := traces(console, "policies")) is None:
        return 0
    results: dict[str, Any] = {}
    with running_fleet() as (processes, model):
        ports = free_ports(12 + len(policies()))
        urls, events = start_engines(processes, model, ports[:12])
        options = {
            one.label: ["--policy", one.name, *(events if one.has_events else [])] for one in policies()
        }
        routers = start_routers(processes, urls, options, ports[12:])
        for trace, load in LOADS.items():
            path = folder / f"{trace}_trace.jsonl"
            tokens_per_s = asyncio.run(prefill_speed(urls["prefill"][0]))
            found = measure([*map(scaled, read_sessions(path))], load, routers, tokens_per_s, console)
            for policy in policies():
                found["policies"][policy.label]["simulated"] = simulate(path, load, policy)
            results[trace] = found
            console.print(_table(trace, found))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def measure(
    asks: Sequence[Ask], load: float, routers: dict[str, str], tokens_per_s: float, console: Console
) -> dict[str, Any]:
    took_s = asks[-1].arrives_s - asks[0].arrives_s
    speed = 2 * load * tokens_per_s * took_s / sum(ask.num_tokens for ask in asks)
    console.print(f"{tokens_per_s:.0f} tokens/s; {took_s / speed:.0f} s a run")
    runs: dict[str, list[dict[str, float]]] = {label: [] for label in routers}
    labels = list(routers)
    for number in range(NUM_ROUNDS + 1):  # The first one fills the memory of the routers, and is not counted.
        for label in labels:
            salt = f"{label} {number} {secrets.token_hex(4)}"
            answers = asyncio.run(replay(routers[label], asks, speed, salt))
            if number:
                served = [one for one in answers if one is not None]
                assert len(served) == len(asks), "without a cap no request is refused"
                runs[label].append(figures(served))
        labels = [*labels[1:], labels[0]]
    return {
        "load": load,
        "prefill_tokens_per_s": round(tokens_per_s),
        "requests": len(asks),
        "rounds": NUM_ROUNDS,
        "policies": {
            label: {name: spread([one[name] for one in found]) for name in found[0]}
            for label, found in runs.items()
        },
    }


def _table(trace: str, found: dict[str, Any]) -> Table:
    names = ("hit_rate", "ttft_p50_ms", "ttft_p90_ms", "token_p50_ms")
    table = Table("policy", *names, *(f"simulated {name}" for name in names[:3]), title=trace)
    for label, row in found["policies"].items():
        real = [f"{row[one]['median']:.3g} ({row[one]['min']:.3g} to {row[one]['max']:.3g})" for one in names]
        table.add_row(label, *real, *(f"{row['simulated'][one]:.3g}" for one in names[:3]))
    return table
