"""The router's choice to read a prompt from a busy engine, with real engines.

    python -m lab.bench loans     two minutes

A prefill engine A and a decode engine B publish KV events; the router's policy is cost. A lends what it has:
from host memory first; then engines have none, and A lends from its cache. A has computed a prompt and is
computing a long one in each round. Then the first prompt is asked for again:

    router       the router chooses; it should have A lend, and B read and answer
    busy engine  A itself, which has the prompt in its cache
    computed     B itself, with a prompt that no engine has

The figure is the time to the first token, median and all. All processes share the machine's cores, so A's
work slows B's down. The command fails if an answer differs, or if no prompt was lent.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
from collections import defaultdict
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from baton.cli.processes import free_ports
from lab.bench.fleet.real import (
    REQUEST_S,
    VOCABULARY,
    running_fleet,
    start_engines,
    start_routers,
)

NUM_ROUNDS = 5
PROMPT_TOKENS, LONG_TOKENS = 2_000, 7_000
STEP_TOKENS = 512  # An engine answers a request for a loan between two steps.
ANSWER_TOKENS = 4
CPU_GIB = 2.0
BUSY_AFTER_S = 0.1
KINDS = ("router", "busy engine", "computed")


class _Choice(msgspec.Struct):
    text: str


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


def lends_cache(engine_id: str, role: object) -> dict[str, Any]:
    return {"kv_connector": "BatonPullConnector", "kv_role": "kv_both", "engine_id": engine_id}


def lends_host_memory(engine_id: str, role: object) -> dict[str, Any]:
    host_memory = {"cpu_gib": CPU_GIB, "lend": {}}
    children = [
        {"kv_connector": "BatonPullConnector"},
        {"kv_connector": "BatonOffloadConnector", "kv_connector_extra_config": host_memory},
    ]
    return {
        **lends_cache(engine_id, role),
        "kv_connector": "BatonMultiConnector",
        "kv_connector_extra_config": {"connectors": children},
    }


PLACES = {"host memory": lends_host_memory, "cache": lends_cache}


async def answer(client: httpx.AsyncClient, url: str, prompt: list[int]) -> tuple[float, str]:
    """Time to the first token, in s, and the text. Raises httpx.HTTPError."""
    body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True}
    began_s, first_s, text = time.perf_counter(), 0.0, ""
    path = f"{url}/v1/completions"
    async with client.stream("POST", path, json={**body, "model": "bench", "ignore_eos": True}) as got:
        got.raise_for_status()
        async for line in got.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                first_s = first_s or time.perf_counter()
                text += "".join(one.text for one in msgspec.json.decode(line[6:], type=_Chunk).choices)
    return first_s - began_s, text


async def metric(client: httpx.AsyncClient, url: str, name: str) -> dict[str, float]:
    """Values by the text of their labels."""
    text = (await client.get(f"{url}/metrics")).text
    return {labels: float(value) for labels, value in re.findall(rf"^{name}(\S*) (\S+)$", text, re.MULTILINE)}


async def until_indexed(client: httpx.AsyncClient, router: str, prompt: list[int]) -> None:
    async with asyncio.timeout(REQUEST_S):
        while True:
            explained = (await client.post(f"{router}/explain", json={"prompt": prompt})).json()
            if max(explained["cached_tokens"].values(), default=0) > len(prompt) // 2:
                return
            await asyncio.sleep(0.01)


async def measure(router: str, a: str, b: str) -> dict[str, list[float]]:
    """Times to the first token by kind, in s. Raises ValueError for a wrong answer."""
    rng = random.Random(0)

    def new(num_tokens: int) -> list[int]:
        return [rng.randrange(10, VOCABULARY) for _ in range(num_tokens)]

    taken: dict[str, list[float]] = defaultdict(list)
    async with httpx.AsyncClient(timeout=REQUEST_S, trust_env=False) as client:
        for number in range(len(KINDS) * (NUM_ROUNDS + 1)):
            kind, prompt = KINDS[number % len(KINDS)], new(PROMPT_TOKENS)
            _, expected = await answer(client, a, prompt)
            await until_indexed(client, router, prompt)
            # The router sends it to A, which has its beginning.
            busy = asyncio.create_task(answer(client, router, prompt + new(LONG_TOKENS - PROMPT_TOKENS)))
            await asyncio.sleep(BUSY_AFTER_S)
            asked = new(PROMPT_TOKENS) if kind == "computed" else prompt
            took_s, text = await answer(client, {"router": router, "busy engine": a}.get(kind, b), asked)
            await busy
            if kind != "computed" and text != expected:
                raise ValueError(f"{kind}: {text!r} instead of {expected!r}")
            if number >= len(KINDS):  # The first round warms everything up.
                taken[kind].append(took_s)
    return taken


async def outcomes(router: str) -> dict[str, float]:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await metric(client, router, "baton:router_stored_loans_total")


def main() -> int:
    console = Console(width=120)
    is_good = True
    for place, transfer_config in PLACES.items():
        with running_fleet() as (processes, model):
            ports = free_ports(7)
            options = ("--max-num-batched-tokens", str(STEP_TOKENS))
            urls, events = start_engines(
                processes, model, ports[:6], ("prefill", "decode"), options, transfer_config=transfer_config
            )
            policy = {"cost": ["--policy", "cost", *events]}
            router = start_routers(processes, urls, policy, ports[6:])["cost"]
            taken = asyncio.run(measure(router, *urls["prefill"], *urls["decode"]))
            counts = asyncio.run(outcomes(router))
        table = Table("", "median, ms", "all, ms", title=f"First token of {PROMPT_TOKENS} tokens, {place}")
        for kind, times_s in taken.items():
            all_ms = " ".join(f"{1e3 * one:.0f}" for one in sorted(times_s))
            table.add_row(kind, f"{1e3 * statistics.median(times_s):.0f}", all_ms)
        console.print(table)
        for labels, count in counts.items():
            console.print(f"baton:router_stored_loans{labels}: {count:g}", highlight=False)
        is_good &= any('"lent"' in labels and count for labels, count in counts.items())
    return int(not is_good)
