"""A prompt that returns when the engine's own cache has lost it: what `offload` and `shared_storage` measure.

    computed   by the engine with the connector, which stores it meanwhile
    plain      by an engine without, so that the cost of storing shows
    loaded     the same prompt, after another one has taken its blocks

The engines live in one process, on one thread, and take turns; the model is that of the handoff's benchmark,
with 90 million parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from baton.bench.handoff_system import Prompts, model_folder
from baton.bench.machine import machine_line
from baton.core.config import CacheConfig, EngineConfig, KVTransferConfig, SchedulerConfig
from baton.engine.api import SamplingParams
from baton.engine.checkpoints.checkpoint import load_model_config
from baton.engine.llm import LLM

FACTORY: Final = "baton.assemble:connector_factory"
ONE_TOKEN: Final = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
BLOCK_TOKENS = 16
PROMPT_TOKENS = 4000

Measured = dict[str, Any]


def measure_returns(
    transfer: KVTransferConfig,
    prompt_tokens: int = PROMPT_TOKENS,
    repeats: int = 3,
    *,
    model: Path | None = None,
    wait_stored: Callable[[LLM], None] = lambda engine: None,
) -> Measured:
    """Seconds to the first token. `wait_stored`: until the connector has kept what it was to keep."""
    model = model if model is not None else model_folder()
    prompts = Prompts(seed=prompt_tokens)
    computed, loaded, plain, hits = [], [], [], []
    are_equal = True
    with (
        LLM(_config(model, prompt_tokens, transfer), FACTORY) as engine,
        LLM(_config(model, prompt_tokens, None), FACTORY) as without,
    ):
        for each in (engine, without):
            _first_token(each, prompts.of(64))  # What a process does once.
        for _ in range(repeats):
            prompt, other = prompts.of(prompt_tokens), prompts.of(prompt_tokens)
            taken_s, said, _ = _first_token(engine, prompt)
            computed.append(taken_s)
            wait_stored(engine)  # Beside the other engine it would slow that down.
            plain_s, said_without, _ = _first_token(without, prompt)
            plain.append(plain_s)
            _first_token(engine, other)  # Takes the blocks of the engine's own cache.
            wait_stored(engine)
            taken_s, said_again, num_loaded = _first_token(engine, prompt)
            loaded.append(taken_s)
            hits.append(num_loaded)
            are_equal &= said == said_again == said_without
    return {
        "prompt_tokens": prompt_tokens,
        "loaded_tokens": min(hits),
        "computed_s": computed,
        "loaded_s": loaded,
        "without_connector_s": plain,
        "computed_over_loaded": statistics.median(computed) / statistics.median(loaded),
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


def _config(model: Path, prompt_tokens: int, transfer: KVTransferConfig | None) -> EngineConfig:
    return EngineConfig(
        model_config=load_model_config(model, max_model_len=prompt_tokens + BLOCK_TOKENS),
        # Room for one prompt: the next one drives it out.
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, num_gpu_blocks=prompt_tokens // BLOCK_TOKENS + 4),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=2048),
        kv_transfer_config=transfer,
    )


def median_rates(nbytes: int, turns: int, ways: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """GB/s of each way to move so many bytes. They take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    return {name: nbytes / statistics.median(taken) / 1e9 for name, taken in seconds.items()}


def print_rates(
    title: str, of: str, rates: Mapping[str, float], ratios: Mapping[str, float], console: Console
) -> None:
    table = Table(title=title)
    for heading in ("what", "GB/s", of):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for name, rate in rates.items():
        table.add_row(name, f"{rate:.2f}", f"{ratios[name]:.2f}")
    console.print(table)


def print_returns(
    returns: Measured, source: str, console: Console, *, ratio_min: float | None = None
) -> None:
    """`source`: where from the prompt is loaded. `ratio_min`: the goal, of computing over loading."""
    table = Table(title=f"First token of {returns['prompt_tokens']} tokens (median, ms)")
    for heading in ("what", "ms"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for name, key in (
        ("computed, without a connector", "without_connector_s"),
        ("computed, and stored", "computed_s"),
        (f"loaded from {source}", "loaded_s"),
    ):
        table.add_row(name, f"{statistics.median(returns[key]) * 1e3:.1f}")
    console.print(table)
    ratio = returns["computed_over_loaded"]
    goal = ""
    if ratio_min is not None:
        goal = f" (goal {ratio_min:g}: {'met' if ratio >= ratio_min else 'missed'})"
    console.print(
        f"{returns['loaded_tokens']} tokens loaded; {ratio:.1f} times as fast as computing them{goal}; "
        f"storing costs {returns['storing_over_without'] - 1:+.1%}; "
        f"tokens are {'equal' if returns['tokens_are_equal'] else 'DIFFERENT'}"
    )


def run_command(
    prog: str,
    arguments: Sequence[str],
    measure: Callable[[int, int], Measured],
    print_tables: Callable[[Measured, Console], None],
) -> int:
    """`measure`: of (tokens of the prompt, repeats), under "returns" what `measure_returns` says."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}")
    parser.add_argument("--tokens", type=int, default=PROMPT_TOKENS, help="of the prompt that returns")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the figures")
    given = parser.parse_args(list(arguments))
    console = Console(width=None if sys.stdout.isatty() else 120)
    measured = measure(given.tokens, given.repeats)
    print_tables(measured, console)
    text = json.dumps({"machine": machine_line(), **measured}, indent=1)
    console.print(text, soft_wrap=True, markup=False, highlight=False)
    if given.out is not None:
        given.out.write_text(text + "\n")
    return 0 if measured["returns"]["tokens_are_equal"] else 1
