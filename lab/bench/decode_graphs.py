"""Decode graphs: the gain of replaying decode steps from CUDA graphs, by batch size; modes alternate.

    python -m lab.bench.decode_graphs                 on a GPU
    python -m lab.bench.decode_graphs --device cpu    the same buckets without graphs: the cost of padding

A step is timed as in the engine: from the scheduler's decision to the sampled tokens.
"""

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.bench.machine import machine_line
from baton.checkpoints.checkpoint import load_model_config
from baton.core.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from baton.engine.api import EngineRequest, SamplingParams
from baton.engine.attention.cuda import why_unavailable
from baton.engine.core.engine_core import EngineCore
from lab.bench.handoff.system import model_folder

MODES = ("off", "piecewise", "full")
BATCHES = (1, 5, 16, 64)
PROMPT_TOKENS, NUM_STEPS, WARM_UP_STEPS = 200, 100, 10


@dataclass(frozen=True)
class Row:
    mode: str
    num_running: int
    step_ms: float  # Median.
    ratio: float  # Ratio to eager in the same round; median.


class DecodingEngine:
    """An engine core with `num_running` requests that decode for at least `num_steps` steps."""

    def __init__(
        self,
        model: ModelConfig,
        num_running: int,
        *,
        num_steps: int = NUM_STEPS + WARM_UP_STEPS,
        num_other_tokens: int = 0,
        device: DeviceConfig | None = None,
    ) -> None:
        """`num_other_tokens`: room for requests that are added later. No prefix is cached."""
        block_tokens = CacheConfig().block_size
        blocks_each = (PROMPT_TOKENS + num_steps) // block_tokens + 2
        num_blocks = num_running * blocks_each + num_other_tokens // block_tokens + 2
        self.core = EngineCore(
            EngineConfig(
                model_config=model,
                cache_config=CacheConfig(num_gpu_blocks=num_blocks, enable_prefix_caching=False),
                scheduler_config=SchedulerConfig(
                    max_num_seqs=max(1, num_running), max_num_batched_tokens=8192
                ),
                device_config=device or DeviceConfig(),
            ),
            None,
        )
        for index in range(num_running):
            self.add(f"request-{index}", PROMPT_TOKENS, num_steps + block_tokens)

    def add(self, request_id: str, num_tokens: int, max_tokens: int, *, grammar: str | None = None) -> None:
        prompt = [5 + (7 * len(request_id) + 31 * token) % 500 for token in range(num_tokens)]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, grammar=grammar)
        refusal = self.core.add_request(
            EngineRequest(
                request_id=request_id, prompt_token_ids=prompt, sampling_params=sampling, arrival_time_s=0.0
            )
        )
        assert refusal is None

    def step(self) -> float:
        """Run one step; return its seconds."""
        before = self.core.times.execute_s
        self.core.step()
        return self.core.times.execute_s - before

    def close(self) -> None:
        self.core.shutdown()


def run(
    model: ModelConfig, device: str, batches: Sequence[int] = BATCHES, steps: int = NUM_STEPS
) -> list[Row]:
    rows: list[Row] = []
    for num_running in batches:
        with contextlib.ExitStack() as stack:
            engines = {
                mode: stack.enter_context(
                    contextlib.closing(
                        DecodingEngine(
                            model,
                            num_running,
                            device=DeviceConfig(device=device, graph_mode=mode),  # type: ignore[arg-type]
                        )
                    )
                )
                for mode in MODES
            }
            for engine in engines.values():
                for _ in range(WARM_UP_STEPS):
                    engine.step()
            seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
            for _ in range(steps):
                for mode, engine in engines.items():
                    seconds[mode].append(engine.step())
        for mode, taken in seconds.items():
            ratios = [this / eager for this, eager in zip(taken, seconds["off"], strict=True)]
            rows.append(Row(mode, num_running, statistics.median(taken) * 1e3, statistics.median(ratios)))
    return rows


def main(arguments: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and (reason := why_unavailable()) is not None:
        print(f"decode graphs were not measured: {reason}")
        return 0
    rows = run(load_model_config(model_folder(), max_model_len=4096), options.device)
    table = Table(title="Decode step by graph mode, median", title_justify="left")
    for heading in ("requests", "mode", "ms", "of eager"):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for row in rows:
        table.add_row(str(row.num_running), row.mode, f"{row.step_ms:.3f}", f"{row.ratio:.2f}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        kept = {"machine": machine_line(), "device": options.device, "steps": [asdict(row) for row in rows]}
        options.out.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
