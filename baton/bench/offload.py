"""What offloading to host memory costs, and what it saves a prompt that returns.

    copies    rows of host memory <-> an engine's blocks, beside a memcpy of as many bytes; taking turns
    returns   a prompt that the engine's own cache has lost: loaded, beside computed, in one engine;
              and computed by an engine without a connector, so that the cost of storing shows

    python -m baton.bench.offload                     a minute or two; JSON behind the tables
    python -m baton.bench.offload --out FILE          and the JSON kept

In one process, on one thread, with the model of 90 million parameters of the handoff's benchmark.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from baton.bench.handoff_system import Prompts, model_folder
from baton.bench.machine import machine_line
from baton.core.config import CacheConfig, EngineConfig, KVTransferConfig, SchedulerConfig
from baton.engine.api import SamplingParams
from baton.engine.checkpoint import load_model_config
from baton.engine.llm import LLM
from baton.tiers.host_rows import HostRows

FACTORY: Final = "baton.assemble:connector_factory"
ONE_TOKEN: Final = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)

COPY_LAYERS, COPY_BLOCKS = 12, 176  # As the model's: 66 MiB in pieces of 32 KiB.
COPY_PIECE_BYTES = 32 << 10
COPY_TURNS = 15

BLOCK_TOKENS = 16
PROMPT_TOKENS = 4000
CPU_GIB = 1.0  # Ten such prompts.
RATIO_MIN = 5.0  # Computed over loaded.


def measure_copies(num_blocks: int = COPY_BLOCKS, turns: int = COPY_TURNS) -> dict[str, Any]:
    """GB/s, medians; "memcpy" is one contiguous copy of the same number of bytes."""
    shape = (COPY_LAYERS, num_blocks, COPY_PIECE_BYTES)
    caches = {f"layer {i}": layer for i, layer in enumerate(torch.ones(shape, dtype=torch.uint8))}
    rows = HostRows(caches, num_blocks)
    nbytes = num_blocks * rows.row_bytes
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    in_order = list(range(num_blocks))
    shuffled = np.random.default_rng(0).permutation(num_blocks).tolist()
    ways: dict[str, Callable[[], None]] = {
        "memcpy": lambda: np.copyto(target, source),
        "store, neighbours": lambda: rows.store(in_order, in_order),
        "load, neighbours": lambda: rows.load(in_order, in_order),
        "store, shuffled": lambda: rows.store(shuffled, in_order),
        "load, shuffled": lambda: rows.load(shuffled, in_order),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, copy in ways.items():
            began = time.perf_counter()
            copy()
            seconds[name].append(time.perf_counter() - began)
    rates = {name: nbytes / statistics.median(taken) / 1e9 for name, taken in seconds.items()}
    return {
        "mib": nbytes / 2**20,
        "piece_kib": COPY_PIECE_BYTES >> 10,
        "gb_per_s": rates,
        "of_memcpy": {name: rate / rates["memcpy"] for name, rate in rates.items()},
    }


def measure_returns(
    prompt_tokens: int = PROMPT_TOKENS, repeats: int = 3, *, model: Path | None = None
) -> dict[str, Any]:
    """Seconds to the first token, medians."""
    model = model if model is not None else model_folder()
    prompts = Prompts(seed=prompt_tokens)
    computed, loaded, plain, hits = [], [], [], []
    are_equal = True
    with (
        LLM(_config(model, prompt_tokens, offloads=True), FACTORY) as engine,
        LLM(_config(model, prompt_tokens, offloads=False), FACTORY) as without,
    ):
        for each in (engine, without):
            _first_token(each, prompts.of(64))  # What a process does once.
        for _ in range(repeats):
            prompt, other = prompts.of(prompt_tokens), prompts.of(prompt_tokens)
            taken_s, said, _ = _first_token(engine, prompt)
            computed.append(taken_s)
            plain_s, said_without, _ = _first_token(without, prompt)
            plain.append(plain_s)
            _first_token(engine, other)  # Takes the blocks of the engine's own cache.
            taken_s, said_again, num_loaded = _first_token(engine, prompt)
            loaded.append(taken_s)
            hits.append(num_loaded)
            are_equal &= said == said_again == said_without
    medians = [statistics.median(seconds) for seconds in (computed, loaded, plain)]
    return {
        "prompt_tokens": prompt_tokens,
        "loaded_tokens": min(hits),
        "computed_s": computed,
        "loaded_s": loaded,
        "without_connector_s": plain,
        "computed_over_loaded": medians[0] / medians[1],
        # Of each pair the ratio, then the median: the machine's speed drifts.
        "storing_over_without": statistics.median(
            ours / theirs for ours, theirs in zip(computed, plain, strict=True)
        ),
        "tokens_are_equal": are_equal,
    }


def _first_token(engine: LLM, prompt: list[int]) -> tuple[float, list[int], int]:
    """(seconds, what it said, tokens that were loaded)."""
    began = time.perf_counter()
    (completion,) = engine.generate([prompt], ONE_TOKEN)
    taken_s = time.perf_counter() - began
    return taken_s, completion.token_ids, completion.num_transferred_tokens


def _config(model: Path, prompt_tokens: int, *, offloads: bool) -> EngineConfig:
    transfer = None
    if offloads:
        transfer = KVTransferConfig(
            kv_connector="BatonOffloadConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_gib": CPU_GIB},
        )
    return EngineConfig(
        model_config=load_model_config(model, max_model_len=prompt_tokens + BLOCK_TOKENS),
        # Room for one prompt: the next one drives it out.
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, num_gpu_blocks=prompt_tokens // BLOCK_TOKENS + 4),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=2048),
        kv_transfer_config=transfer,
    )


def print_tables(copies: dict[str, Any], returns: dict[str, Any], console: Console) -> None:
    table = Table(title=f"Copies of {copies['mib']:.0f} MiB in pieces of {copies['piece_kib']} KiB")
    for heading in ("what", "GB/s", "of memcpy"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for name, rate in copies["gb_per_s"].items():
        table.add_row(name, f"{rate:.2f}", f"{copies['of_memcpy'][name]:.2f}")
    console.print(table)
    table = Table(title=f"First token of {returns['prompt_tokens']} tokens (median, ms)")
    for heading in ("what", "ms"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for name, key in (
        ("computed, without a connector", "without_connector_s"),
        ("computed, and stored", "computed_s"),
        ("loaded from host memory", "loaded_s"),
    ):
        table.add_row(name, f"{statistics.median(returns[key]) * 1e3:.1f}")
    console.print(table)
    ratio = returns["computed_over_loaded"]
    verdict = "met" if ratio >= RATIO_MIN else "missed"
    console.print(
        f"{returns['loaded_tokens']} tokens loaded; {ratio:.1f} times as fast as computing them "
        f"(goal {RATIO_MIN:g}: {verdict}); storing costs {returns['storing_over_without'] - 1:+.1%}; "
        f"tokens are {'equal' if returns['tokens_are_equal'] else 'DIFFERENT'}"
    )


def main(arguments: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(prog="python -m baton.bench.offload")
    parser.add_argument("--tokens", type=int, default=PROMPT_TOKENS, help="of the prompt that returns")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the figures")
    given = parser.parse_args(list(arguments))
    console = Console(width=None if sys.stdout.isatty() else 120)
    copies, returns = measure_copies(), measure_returns(given.tokens, given.repeats)
    print_tables(copies, returns, console)
    text = json.dumps({"machine": machine_line(), "copies": copies, "returns": returns}, indent=1)
    console.print(text, soft_wrap=True, markup=False, highlight=False)
    if given.out is not None:
        given.out.write_text(text + "\n")
    return 0 if returns["tokens_are_equal"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
