"""The time of one choice by cost: 64 engines, a million indexed blocks of 16 tokens, hashes given.

    python -m lab.bench choice     half a minute

`match` is the walk through the index, `place` the choice of engines. Prompts of up to 69,000 tokens share a
beginning. The memory is that of the index and of the engines' names of blocks.
"""

from __future__ import annotations

import random
import time

import psutil
from rich.console import Console
from rich.table import Table

from baton.core.kv_events import BlockStored
from baton.router.fleet.block_index import CHUNK_TOKENS, BlockIndex, prefix_keys, root_key
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.pairs import Pairs
from baton.router.fleet.policies import RoutedRequest
from baton.router.values.rates import NUM_POINTS
from baton.router.values.settings import RouterSettings
from lab.bench.fleet.command import percentile

NUM_ENGINES, NUM_BLOCKS, BLOCK = 64, 1_000_000, 16
NUM_SHARED, NUM_OWN, VOCABULARY = 65_536, 4_096, 150_000
NUM_ASKED = 1_000


def main() -> int:
    rng = random.Random(1)
    urls = [f"http://e{number}" for number in range(NUM_ENGINES)]
    half = NUM_ENGINES // 2
    settings = RouterSettings(prefill_urls=tuple(urls[:half]), decode_urls=tuple(urls[half:]), policy="cost")
    fleet, pairs, index, root = Fleet(settings), Pairs(), BlockIndex(), root_key(None, None)
    for engine in fleet.engines:
        engine.prefill_rate.note(rng.uniform(9e3, 1.1e4))
        for load in range(NUM_POINTS):
            engine.steps.note(load, 0.015 + 0.000_15 * load)
    shared = [rng.randrange(VOCABULARY) for _ in range(NUM_SHARED)]
    before = psutil.Process().memory_info().rss
    asked: list[list[int]] = []
    num_blocks = 0
    began_s = time.perf_counter()
    for url in urls:
        while index.num_blocks(url) < NUM_BLOCKS // NUM_ENGINES:
            own = [rng.randrange(VOCABULARY) for _ in range(NUM_OWN)]
            ids = shared[: rng.randrange(1024, NUM_SHARED) // BLOCK * BLOCK] + own
            names: list[int | bytes] = [rng.getrandbits(64) for _ in range(len(ids) // BLOCK)]
            event = BlockStored(block_hashes=names, parent_block_hash=None, token_ids=ids, block_size=BLOCK)
            index.apply(url, [event])
            num_blocks += len(names)
            if len(asked) < NUM_ASKED // 10:
                asked.append(prefix_keys(ids, BLOCK, root))
    took_s = time.perf_counter() - began_s
    memory = psutil.Process().memory_info().rss - before
    times: dict[str, list[float]] = {"match": [], "place": [], "both": []}
    for number in range(NUM_ASKED):
        keys = asked[number % len(asked)]
        began_s = time.perf_counter()
        cached = index.match(keys, BLOCK)
        matched_s = time.perf_counter()
        request = RoutedRequest(number, num_tokens=len(keys) * CHUNK_TOKENS, cached=cached)
        placing_s = time.perf_counter()
        fleet.choice.place(request, [], [], lambda engine: True, 0.0, pairs.load_s)
        match_s, place_s = matched_s - began_s, time.perf_counter() - placing_s
        for name, seconds in (("match", match_s), ("place", place_s), ("both", match_s + place_s)):
            times[name].append(1e6 * seconds)
    table = Table("", "p50, us", "p99, us", title=f"{NUM_ENGINES} engines, {num_blocks} blocks")
    for name, values in times.items():
        table.add_row(name, f"{percentile(values, 0.5):.0f}", f"{percentile(values, 0.99):.0f}")
    console = Console()
    console.print(table)
    console.print(f"an event: {1e6 * took_s / num_blocks:.1f} us a block; memory {memory / 2**20:.0f} MiB")
    return 0
