"""Returning prompts: times a prompt that the engine's own cache has lost, for `offload` and `shared_storage`.

    computed   by the engine with the connector, which also stores it
    plain      by an engine without a connector, which shows the cost of storing
    cached     the same prompt at once, by a step of its last block
    loaded     the same prompt, after another one has taken its blocks

The engines are in one process, on one thread, and alternate. The model is that of the handoff benchmark, with
90 million parameters.
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

from baton.bench.machine import machine_line
from baton.checkpoints.checkpoint import load_model_config
from baton.core.config import CacheConfig, EngineConfig, KVTransferConfig, SchedulerConfig
from baton.engine.api import SamplingParams
from baton.engine.llm import LLM
from lab.bench.handoff.system import Prompts, model_folder

FACTORY: Final = "baton.assemble:connector_factory"
ONE_TOKEN: Final = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
BLOCK_TOKENS = 16
PROMPT_TOKENS = 4000
STORING_SHARE = 0.02  # Most of the time to the first token that storing may take.

Measured = dict[str, Any]


def measure_returns(
    transfer: KVTransferConfig,
    prompt_tokens: int = PROMPT_TOKENS,
    repeats: int = 3,
    *,
    model: Path | None = None,
    wait_stored: Callable[[LLM], None] = lambda engine: None,
) -> Measured:
    """Measure seconds to the first token. `wait_stored`: waits until the connector has stored the prompt."""
    model = model if model is not None else model_folder()
    prompts = Prompts(seed=prompt_tokens)
    computed, loaded, plain, cached, hits = [], [], [], [], []
    are_equal = True
    with (
        LLM(_config(model, prompt_tokens, transfer), FACTORY) as engine,
        LLM(_config(model, prompt_tokens, None), FACTORY) as without,
    ):
        for each in (engine, without):
            _first_token(each, prompts.of(64))  # Warm-up of the process.
        for _ in range(repeats):
            prompt, other = prompts.of(prompt_tokens), prompts.of(prompt_tokens)
            taken_s, answer, _ = _first_token(engine, prompt)
            computed.append(taken_s)
            wait_stored(engine)  # Otherwise storing would slow down the other engine.
            plain_s, plain_answer, _ = _first_token(without, prompt)
            plain.append(plain_s)
            cached.append(_first_token(engine, prompt)[0])
            _first_token(engine, other)  # Evicts the prompt from the engine's own cache.
            wait_stored(engine)
            taken_s, loaded_answer, num_loaded = _first_token(engine, prompt)
            loaded.append(taken_s)
            hits.append(num_loaded)
            are_equal &= answer == loaded_answer == plain_answer
    return {
        "prompt_tokens": prompt_tokens,
        "loaded_tokens": min(hits),
        "computed_s": computed,
        "loaded_s": loaded,
        "without_connector_s": plain,
        "cached_s": cached,
        "loaded_less_cached_s": statistics.median(loaded) - statistics.median(cached),
        "computed_over_loaded": statistics.median(computed) / statistics.median(loaded),
        # The median of ratios of pairs, because the machine's speed drifts.
        "storing_over_without": statistics.median(
            ours / theirs for ours, theirs in zip(computed, plain, strict=True)
        ),
        "tokens_are_equal": are_equal,
    }


def _first_token(engine: LLM, prompt: list[int]) -> tuple[float, list[int], int]:
    """Return (seconds, token ids, number of loaded tokens)."""
    began = time.perf_counter()
    (completion,) = engine.generate([prompt], ONE_TOKEN)
    taken_s = time.perf_counter() - began
    return taken_s, completion.token_ids, completion.num_transferred_tokens


def _config(model: Path, prompt_tokens: int, transfer: KVTransferConfig | None) -> EngineConfig:
    return EngineConfig(
        model_config=load_model_config(model, max_model_len=prompt_tokens + BLOCK_TOKENS),
        # Room for one prompt: the next one evicts it.
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, num_gpu_blocks=prompt_tokens // BLOCK_TOKENS + 4),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=2048),
        kv_transfer_config=transfer,
    )


def median_rates(nbytes: int, turns: int, moves: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """Return median GB/s of each move of `nbytes`; the moves alternate, `turns` times."""
    seconds: dict[str, list[float]] = {name: [] for name in moves}
    for _ in range(turns):
        for name, move in moves.items():
            began = time.perf_counter()
            move()
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
    returns: Measured,
    source: str,
    console: Console,
    *,
    ratio_min: float,
    over_cached_s: float | None = None,
) -> None:
    """Print the results.

    Args:
        source: where the loaded prompt comes from.
        ratio_min: goal for computing over loading.
        over_cached_s: goal for loading, more than the step of the last block alone.
    """
    table = Table(title=f"First token of {returns['prompt_tokens']} tokens (median, ms)")
    for heading in ("what", "ms"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for name, key in (
        ("computed, without a connector", "without_connector_s"),
        ("computed, and stored", "computed_s"),
        ("in the engine's cache", "cached_s"),
        (f"loaded from {source}", "loaded_s"),
    ):
        table.add_row(name, f"{statistics.median(returns[key]) * 1e3:.1f}")
    console.print(table)
    ratio, storing = returns["computed_over_loaded"], returns["storing_over_without"] - 1
    more_s = returns["loaded_less_cached_s"]
    goal = "" if over_cached_s is None else _goal(f"{over_cached_s * 1e3:g} ms", met=more_s <= over_cached_s)
    console.print(
        f"{returns['loaded_tokens']} tokens loaded; {ratio:.1f} times as fast as computing them"
        f"{_goal(f'{ratio_min:g}', met=ratio >= ratio_min)}, "
        f"{more_s * 1e3:.1f} ms more than from the engine's cache{goal}; "
        f"storing costs {storing:+.1%}{_goal(f'{STORING_SHARE:.0%}', met=storing <= STORING_SHARE)}; "
        f"tokens are {'equal' if returns['tokens_are_equal'] else 'DIFFERENT'}"
    )


def _goal(goal: str, *, met: bool) -> str:
    return f" (goal {goal}: {'met' if met else 'missed'})"


def run_command(
    prog: str,
    arguments: Sequence[str],
    measure: Callable[[int, int], Measured],
    print_tables: Callable[[Measured, Console], None],
) -> int:
    """Run a benchmark. `measure`: (prompt tokens, repeats) -> figures, with "returns"."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}")
    parser.add_argument("--tokens", type=int, default=PROMPT_TOKENS, help="tokens of the prompt")
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
