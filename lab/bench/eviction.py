"""Hit rates of the eviction policies on two traces of Mooncake (FAST'25), beside Belady's optimum.

    BATON_TRACES=FOLDER python -m lab.bench eviction      three minutes; the folder has *_trace.jsonl of
                                                           kvcache-ai/Mooncake, FAST25-release/traces

A figure is the share of the hits of a tier that never evicts. A tier's size is the share of the trace's
distinct blocks for which it has room. A hit is a block that is found with all blocks before it. The policies
get the calls of the offload connector: the blocks of a prompt are used or stored in order, none evicts
another, and at the end of a request its first block is made the youngest. "full" leaves out the last block of
a prompt if it is not full, which Baton never stores; "all" is how others evaluate the traces. The results go
to docs/benchmarks/eviction.json, and the shares of all blocks to eviction.png.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import get_args

import msgspec
from rich.console import Console
from rich.table import Table

from baton.stores.policies.eviction import Eviction, make_policy
from baton.stores.policies.policy import EvictionPolicy
from lab.bench.fleet.command import traces

RESULTS = Path(__file__).parents[2] / "docs" / "benchmarks" / "eviction.json"
TRACES = ("conversation", "synthetic")
BLOCK_TOKENS = 512
SIZES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
OPTIMUM = "optimum"

Prompts = Sequence[Sequence[int]]  # The blocks of each prompt; equal numbers are equal prefixes.


class Measured(msgspec.Struct, frozen=True):
    blocks: int
    distinct: int
    sizes: tuple[float, ...]  # Shares of the distinct blocks.
    shares: dict[str, list[float]]  # Shares of the hits without eviction, by policy, then by size.
    us_a_block: dict[str, float]


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
    """`num_hits` for the policy that evicts the block whose next use is last (Belady, 1966).

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


def measure(prompts: Prompts) -> Measured:
    """Shares of the hits of each policy and of the optimum, by size, and microseconds a block of a policy."""
    num_distinct = len({key for prompt in prompts for key in prompt})
    num_blocks = sum(map(len, prompts))
    most = num_blocks - num_distinct
    capacities = [int(num_distinct * size) for size in SIZES]
    shares: dict[str, list[float]] = {}
    us_a_block: dict[str, float] = {}
    for name in get_args(Eviction):
        began_s = time.perf_counter()
        hits = [num_hits(prompts, make_policy(name, capacity)) for capacity in capacities]
        us_a_block[name] = round(1e6 * (time.perf_counter() - began_s) / num_blocks / len(SIZES), 1)
        shares[name] = [round(each / most, 4) for each in hits]
    optimal = [num_hits_of_optimum(prompts, capacity) for capacity in capacities]
    shares[OPTIMUM] = [round(each / most, 4) for each in optimal]
    return Measured(num_blocks, num_distinct, SIZES, shares, us_a_block)


def main() -> int:
    console = Console()
    if (folder := traces(console, "eviction")) is None:
        return 0
    results: dict[str, Measured] = {}
    for trace in TRACES:
        for kind in ("all", "full"):
            prompts = read_prompts(folder / f"{trace}_trace.jsonl", full_only=kind == "full")
            title = f"{trace}, {kind} blocks"
            results[title] = measure(prompts)
            console.print(_table(title, results[title]))
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    plot({trace: results[f"{trace}, all blocks"] for trace in TRACES}, RESULTS.with_suffix(".png"))
    return 0


def _table(title: str, measured: Measured) -> Table:
    table = Table("of the hits without eviction", *(f"size {size:g}" for size in SIZES), "us a block")
    table.title = f"{title}: {measured.blocks} blocks, {measured.distinct} distinct"
    for name, shares in measured.shares.items():
        us = measured.us_a_block.get(name)
        table.add_row(name, *(f"{share:.3f}" for share in shares), "" if us is None else f"{us:g}")
    return table


def plot(results: Mapping[str, Measured], picture: Path) -> None:
    """Hit share over size: a panel for each trace, a line for each policy; dashed: the optimum."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(results), figsize=(11, 4.5), sharey=True, squeeze=False)
    for axes, (trace, measured) in zip(panels[0], results.items(), strict=True):
        for name, shares in measured.shares.items():
            is_optimum = name == OPTIMUM
            label = "Belady's optimum" if is_optimum else name
            style = {"color": "black", "linestyle": "--"} if is_optimum else {"marker": "o"}
            axes.plot(measured.sizes, shares, label=label, **style)
        axes.set(xscale="log", ylim=(0, 1.03), title=trace, xlabel="size, share of the distinct blocks")
        axes.set_xticks(measured.sizes, [f"{size:g}" for size in measured.sizes])
        axes.minorticks_off()
        axes.grid(visible=True, alpha=0.3)
    panels[0][0].set_ylabel("hits, share of those without eviction")
    panels[0][-1].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)
