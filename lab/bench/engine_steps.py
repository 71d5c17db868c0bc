"""Engine steps: the whole of a step beside its bare matrix products, for each dtype of the model.

    python -m lab.bench.engine_steps                    all dtypes
    python -m lab.bench.engine_steps --dtypes bfloat16  some

    decode        a step of 1, 8 and 16 requests           / its products      goal: at most 1.15
    prefill       the products of a prompt of 512 tokens   / its step without attention    goal: at least 0.85
    constrained   a step of 8 requests, one with a grammar / the same without  goal: at most 1.05

The products of a step are recorded with their inputs and multiplied again after it, in turns, by one thread.
Each figure is the least processor time of all turns, so a busy machine changes it little.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from baton.bench.machine import machine_line
from baton.checkpoints.checkpoint import load_model_config
from baton.core.config import ModelConfig
from baton.engine.attention.sdpa import SdpaBackend
from baton.engine.models.decoder import Decoder
from baton.engine.models.matmul import Matmul
from baton.engine.text.grammar import compile_job
from lab.bench.decode_graphs import DecodingEngine
from lab.bench.handoff.system import model_folder

DTYPES = ("float32", "bfloat16")

NUM_RUNNING = (1, 8, 16)
PREFILL_TOKENS = 512
WARM_UP_STEPS, TURNS, PREFILL_TURNS = 3, 15, 7
DECODE_GOAL, PREFILL_GOAL, CONSTRAINED_GOAL = 1.15, 0.85, 1.05
CONSTRAINED_TURNS = 100

Call = tuple[Matmul, torch.Tensor]


class Recorder:
    """Records the products of a step and the time of its attention."""

    def __init__(self) -> None:
        self.products: list[Call] = []
        self.attention_s = 0.0

    @contextmanager
    def recording(self) -> Iterator[None]:
        self.products, self.attention_s = [], 0.0
        multiply, attend, write = Matmul.__call__, SdpaBackend.attend, SdpaBackend.write

        def multiplied(matmul: Matmul, x: torch.Tensor) -> torch.Tensor:
            self.products.append((matmul, x.clone()))
            return multiply(matmul, x)

        def timed(run: Callable[..., Any]) -> Callable[..., Any]:
            def record(*args: Any, **options: Any) -> Any:
                started_s = time.thread_time()
                try:
                    return run(*args, **options)
                finally:
                    self.attention_s += time.thread_time() - started_s

            return record

        replaced: list[tuple[type, str, Any, Any]] = [
            (Matmul, "__call__", multiply, multiplied),
            (Decoder, "compiled_for", Decoder.compiled_for, lambda *_: None),  # The same products in Python.
            (SdpaBackend, "attend", attend, timed(attend)),
            (SdpaBackend, "write", write, timed(write)),
        ]
        for owner, name, _, new in replaced:
            setattr(owner, name, new)
        try:
            yield
        finally:
            for owner, name, old, _ in replaced:
                setattr(owner, name, old)

    def multiply_again(self) -> float:
        """Return the seconds of the recorded products alone."""
        started_s = time.thread_time()
        with torch.inference_mode():
            for matmul, x in self.products:
                matmul(x)
        return time.thread_time() - started_s


def model_of(dtype: str) -> ModelConfig:
    return load_model_config(str(model_folder()), dtype=dtype)


def decode(dtype: str, num_running: int) -> tuple[float, float, float]:
    """Least seconds of a step, of its products, and of its attention."""
    recorder, num_steps = Recorder(), WARM_UP_STEPS + 2 * TURNS
    with closing(DecodingEngine(model_of(dtype), num_running, num_steps=num_steps)) as engine:
        for _ in range(WARM_UP_STEPS):
            engine.step()
        steps, products, attention = [], [], []
        for _ in range(TURNS):
            started_s = time.thread_time()
            engine.step()
            steps.append(time.thread_time() - started_s)
            with recorder.recording():
                engine.step()
            attention.append(recorder.attention_s)
            products.append(recorder.multiply_again())
        return min(steps), min(products), min(attention)


def prefill(dtype: str) -> tuple[float, float, float]:
    """Least seconds of a step that computes a prompt, of its products, and of its attention."""
    recorder = Recorder()
    with closing(DecodingEngine(model_of(dtype), 0, num_other_tokens=PREFILL_TOKENS)) as engine:
        steps, products, attention = [], [], []
        for turn in range(PREFILL_TURNS):
            engine.add(f"{turn}", PREFILL_TOKENS, 1)
            started_s = time.thread_time()
            engine.step()
            steps.append(time.thread_time() - started_s)
            engine.add(f"{turn}, recorded", PREFILL_TOKENS, 1)
            with recorder.recording():
                engine.step()
            attention.append(recorder.attention_s)
            products.append(recorder.multiply_again())
        return min(steps), min(products), min(attention)


def constrained(dtype: str) -> tuple[float, float]:
    """Least seconds of a step of 8 requests, one of them with a grammar, and of such a step without one."""
    num_steps = WARM_UP_STEPS + CONSTRAINED_TURNS
    times: dict[str | None, list[float]] = {compile_job("schema", '{"type": "object"}'): [], None: []}
    with ExitStack() as stack:
        engines: dict[str | None, DecodingEngine] = {}
        for grammar in times:
            engine = DecodingEngine(model_of(dtype), 7, num_steps=num_steps, num_other_tokens=1024)
            engines[grammar] = stack.enter_context(closing(engine))
            engine.add("the eighth", 64, num_steps, grammar=grammar)
        for _ in range(num_steps):
            for grammar, engine in engines.items():
                started_s = time.thread_time()
                engine.step()
                times[grammar].append(time.thread_time() - started_s)
    with_one, without = (min(times[grammar][WARM_UP_STEPS:]) for grammar in times)
    return with_one, without


def run(dtypes: Sequence[str]) -> Table:
    table = Table(title="A step and its matrix products, one thread, ms of processor time (least)")
    table.title_justify = "left"
    for heading in ("dtype", "step", "whole", "products", "attention", "figure", "goal"):
        table.add_column(heading, justify="left" if heading in ("dtype", "step") else "right", no_wrap=True)
    for dtype in dtypes:
        for num_running in NUM_RUNNING:
            step_s, products_s, attention_s = decode(dtype, num_running)
            figure = step_s / products_s
            what = f"decode, {num_running} running"
            _add_row(table, dtype, what, step_s, products_s, attention_s, figure, most=DECODE_GOAL)
        step_s, products_s, attention_s = prefill(dtype)
        figure = products_s / (step_s - attention_s)
        what = f"prefill, {PREFILL_TOKENS} tokens"
        _add_row(table, dtype, what, step_s, products_s, attention_s, figure, least=PREFILL_GOAL)
        with_one_s, without_s = constrained(dtype)
        figure = with_one_s / without_s
        _add_row(table, dtype, "8 running, 1 constrained", with_one_s, 0, 0, figure, most=CONSTRAINED_GOAL)
    return table


def _add_row(
    table: Table,
    dtype: str,
    what: str,
    step_s: float,
    products_s: float,
    attention_s: float,
    figure: float,
    *,
    most: float = math.inf,
    least: float = 0.0,
) -> None:
    goal = f">= {least}" if least else f"<= {most}"
    verdict = "met" if least <= figure <= most else "missed"
    milliseconds = (
        f"{seconds * 1e3:.2f}" if seconds else "" for seconds in (step_s, products_s, attention_s)
    )
    table.add_row(dtype, what, *milliseconds, f"{figure:.2f}", f"{goal}, {verdict}")


def main(arguments: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="with commas")
    dtypes = parser.parse_args(arguments).dtypes.split(",")
    torch.set_num_threads(1)
    Console().print(run(dtypes))
    return 0


if __name__ == "__main__":
    print(machine_line())
    sys.exit(main(sys.argv[1:]))
