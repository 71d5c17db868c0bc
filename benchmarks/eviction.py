"""Hit rates of the eviction policies on two traces of Mooncake (FAST'25), beside Belady's optimum.

    BATON_TRACES=FOLDER python -m benchmarks eviction      two minutes; the folder has *_trace.jsonl of
                                                           kvcache-ai/Mooncake, FAST25-release/traces

A figure is the share of the hits of a tier that never evicts. A tier's size is the share of the trace's
distinct blocks for which it has room. A hit is a block that is found with all blocks before it. The policies
get the calls of the offload connector: the blocks of a prompt are used or stored in order, none evicts
another, and at the end of a request its first block is made the youngest. "full" leaves out the last block of
a prompt if it is not full, which Baton never stores; "all" is how others evaluate the traces.
"""

from __future__ import annotations

import heapq
import json
import os
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table

from baton.tiers.eviction import Eviction, make_policy
from baton.tiers.policy import EvictionPolicy

FOLDER = "BATON_TRACES"
TRACES = ("conversation", "synthetic")
BLOCK_TOKENS = 512
SIZES = (0.05, 0.1, 0.2, 0.4)

Prompts = Sequence[Sequence[int]]  # The blocks of each prompt; equal numbers are equal prefixes.


def read_prompts(path: Path, *, full_only: bool) -> Prompts:
    prompts = []
    with path.open() as lines:
        for line in lines:
            entry = json.loads(line)
            end = entry["input_length"] // BLOCK_TOKENS if full_only else None
            prompts.append(entry["hash_ids"][:end])
    return prompts


def num_hits(prompts: Prompts, policy: EvictionPolicy[int]) -> int:
    """Number of blocks that are found with all blocks before them."""
    hits = 0
    for prompt in prompts:
        hits += next((place for place, key in enumerate(prompt) if key not in policy), len(prompt))
        own = frozenset(prompt)
        for key, parent in zip(prompt, [None, *prompt], strict=False):
            if key in policy:
                policy.use(key)
            elif policy.admit(key, lambda old, own=own: old not in own, parent) is None:  # type: ignore[misc]
                break
        policy.refresh(reversed(prompt))
    return hits


def num_hits_of_optimum(prompts: Prompts, capacity: int) -> int:
    """As `num_hits`, for the policy that evicts the block whose next use is last (Belady, 1966).

    A block that is never used again is not stored. A prompt's beginning is used no later than its end, and is
    evicted after it.
    """
    next_uses: list[list[float]] = []
    later: dict[int, float] = {}
    for number in range(len(prompts) - 1, -1, -1):
        next_uses.append([later.get(key, inf) for key in prompts[number]])
        later.update(dict.fromkeys(prompts[number], number))
    held: dict[int, float] = {}  # The next use of each block.
    heap: list[tuple[float, int, int]] = []  # (-next use, -place in the prompt, block); may be outdated.
    hits = 0
    for prompt, uses in zip(prompts, reversed(next_uses), strict=True):
        hits += next((place for place, key in enumerate(prompt) if key not in held), len(prompt))
        for place, (key, use) in enumerate(zip(prompt, uses, strict=True)):
            held[key] = use
            heapq.heappush(heap, (-use, -place, key))
        while len(held) > capacity or (heap and heap[0][0] == -inf):
            use, _, key = heapq.heappop(heap)
            if held.get(key) == -use:
                del held[key]
    return hits


def main() -> int:
    if FOLDER not in os.environ:
        print(f"set {FOLDER} to the folder with the traces")
        return 2
    console = Console()
    for trace in TRACES:
        path = Path(os.environ[FOLDER]) / f"{trace}_trace.jsonl"
        for full_only in (False, True):
            prompts = read_prompts(path, full_only=full_only)
            console.print(_table(prompts, f"{trace}, {'full' if full_only else 'all'} blocks"))
    return 0


def _table(prompts: Prompts, title: str) -> Table:
    num_distinct = len({key for prompt in prompts for key in prompt})
    num_blocks = sum(map(len, prompts))
    most = num_blocks - num_distinct
    table = Table("of the hits without eviction", *(f"size {size:g}" for size in SIZES), "us a block")
    table.title = f"{title}: {num_blocks} blocks, {num_distinct} distinct"
    for name in get_args(Eviction):
        began_s = time.perf_counter()
        shares = [num_hits(prompts, make_policy(name, int(num_distinct * size))) / most for size in SIZES]
        took_s = time.perf_counter() - began_s
        micros = f"{1e6 * took_s / num_blocks / len(SIZES):.1f}"
        table.add_row(name, *(f"{share:.3f}" for share in shares), micros)
    optimum = [num_hits_of_optimum(prompts, int(num_distinct * size)) / most for size in SIZES]
    table.add_row("optimum", *(f"{share:.3f}" for share in optimum))
    return table
