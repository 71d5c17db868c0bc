"""What a handoff costs a client: prefill and decode on two engines beside one engine that does both.

    single engine <--- prompt of n tokens --- this ---> router --> P, D          in turns, each prompt once

Real engines with a model of about 90 million parameters, one system per mode. Judge the differences, not the
figures: all engines share this machine, and a single engine has all of it to itself while it computes.

    first token      P/D less single; goal: within 3% of the single engine's time plus 5 ms
    second token     the gap behind the first; goal: one decode step plus 10 ms (pull: plus the copy)
    new pair         the first request of all less a later one of that length; goal: below 20 ms
    idle             CPU of the producer while it holds a loan; goal: below 2% of a core
    decode           gap between tokens on D asked directly, with its connector, against single; goal: 1.02

    python -m baton.bench.handoff --modes pull,push-chunk --tokens 64,512 --repeats 3 --plots docs/benchmarks
"""

import argparse
import json
import os
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from baton.bench.asking import REQUEST_TIMEOUT_S, Answer, ask, lend
from baton.cli.processes import Child, Fleet, free_ports
from baton.cli.system import EngineArguments

MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "pull": ("BatonPullConnector", {}),
    "push-off": ("BatonPushConnector", {"stream": "off"}),
    "push-chunk": ("BatonPushConnector", {"stream": "chunk"}),
    "push-layer": ("BatonPushConnector", {"stream": "layer"}),
}
TOKENS = (64, 512, 2000, 4000)
REPEATS = 5
ANSWER_TOKENS = 8
DECODE_TOKENS = 48
IDLE_S = 5.0
SETTLE_S = 0.5  # After the last request, for what it left to do.
START_TIMEOUT_S = 300.0
TTFT_SHARE, TTFT_EXTRA_S = 0.03, 0.005
SECOND_EXTRA_S = 0.010
NEW_PAIR_GOAL_S = 0.020
IDLE_GOAL = 0.02
DECODE_GOAL = 1.02

# 88 million parameters; 24 KiB of KV cache per token.
MODEL: dict[str, Any] = {
    "family": "qwen3",
    "hidden": 768,
    "layers": 12,
    "heads": 12,
    "kv_heads": 4,
    "intermediate": 2048,
    "vocab": 8192,
    "max_position": 8192,
}


@dataclass(frozen=True, slots=True)
class Lengthwise:
    """Medians at one prompt length."""

    mode: str
    num_tokens: int
    single_s: float
    handoff_s: float
    second_gap_s: float
    step_s: float  # Of the single engine.

    @property
    def meets_first_goal(self) -> bool:
        return self.handoff_s <= self.single_s * (1 + TTFT_SHARE) + TTFT_EXTRA_S

    @property
    def meets_second_goal(self) -> bool:
        return self.second_gap_s <= self.step_s + SECOND_EXTRA_S


@dataclass(frozen=True, slots=True)
class Overheads:
    """Of one mode's system."""

    mode: str
    new_pair_s: float
    idle_share: float  # Of one core.
    idle_loan_share: float
    decode_ratio: float


@dataclass(frozen=True, slots=True)
class System:
    producer: str
    consumer: str
    single: str
    router: str
    producer_process: Child


def model_folder() -> Path:
    """A checkpoint, made the first time and kept in the folder for temporary files."""
    from baton.engine.new_model import write_checkpoint

    folder = Path(tempfile.gettempdir()) / f"baton-bench-model-{os.getuid()}"
    if not (folder / "config.json").is_file():
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        write_checkpoint(unfinished, **MODEL)
        unfinished.rename(folder)
    return folder


@contextmanager
def running_system(mode: str, model: Path, max_tokens: int) -> Iterator[System]:
    connector, extra = MODES[mode]
    arguments = EngineArguments(
        model, max_model_len=max_tokens, num_blocks=4 * max_tokens // 16, served_model_name="bench"
    )
    producer, consumer, single, router = (f"http://127.0.0.1:{port}" for port in free_ports(4))

    def engine(url: str, role: str | None) -> list[str]:
        command = arguments.command(httpx.URL(url).port or 0, None)
        if role is None:
            return command
        transfer = {
            "kv_connector": connector,
            "kv_role": role,
            "engine_id": role,
            "kv_connector_extra_config": extra,
        }
        return [*command, "--kv-transfer-config", json.dumps(transfer), "--drain-timeout-s", "0"]

    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    environment |= {"BATON_SECRET": secrets.token_hex(32), "TOKENIZERS_PARALLELISM": "false"}
    logs = Path(tempfile.mkdtemp(prefix="baton-bench-logs-"))
    with Fleet(logs, env=environment) as fleet:
        engines = {
            fleet.start("producer", engine(producer, "kv_producer")): producer,
            fleet.start("consumer", engine(consumer, "kv_consumer")): consumer,
            fleet.start("single", engine(single, None)): single,
        }
        fleet.wait_ready(
            {child: f"{url}/health" for child, url in engines.items()}, timeout_s=START_TIMEOUT_S
        )
        route = [sys.executable, "-m", "baton.cli", "route", "--port", str(httpx.URL(router).port)]
        child = fleet.start("router", [*route, "--prefill", producer, "--decode", consumer])
        fleet.wait_ready({child: f"{router}/health"}, timeout_s=START_TIMEOUT_S)
        yield System(producer, consumer, single, router, next(iter(engines)))


class Prompts:
    """Random tokens, never the same twice: no prefix may be cached anywhere."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def of(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(300, MODEL["vocab"] - 8) for _ in range(num_tokens)]


def measure(mode: str, tokens: Sequence[int], repeats: int) -> tuple[list[Lengthwise], Overheads]:
    prompts = Prompts()
    with (
        running_system(mode, model_folder(), max(tokens) + 64) as system,
        httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client,
    ):
        for url in (system.producer, system.consumer, system.single):  # First kernels, first allocations.
            for num_tokens in (tokens[0], tokens[-1]):
                ask(client, url, prompts.of(num_tokens), max_tokens=4)
        first = ask(client, system.router, prompts.of(tokens[0]), max_tokens=ANSWER_TOKENS)
        rows = [_at_length(client, system, mode, n, prompts, repeats) for n in tokens]
        overheads = Overheads(
            mode,
            new_pair_s=first.first_token_s + first.second_gap_s - rows[0].handoff_s - rows[0].second_gap_s,
            idle_share=_idle_share(system.producer_process),
            idle_loan_share=_idle_with_loan(client, system, prompts),
            decode_ratio=_decode_ratio(client, system, prompts, repeats),
        )
    return rows, overheads


def _at_length(
    client: httpx.Client, system: System, mode: str, num_tokens: int, prompts: Prompts, repeats: int
) -> Lengthwise:
    single: list[Answer] = []
    handoff: list[Answer] = []
    for _ in range(repeats):
        for url, answers in ((system.single, single), (system.router, handoff)):
            answers.append(ask(client, url, prompts.of(num_tokens), max_tokens=ANSWER_TOKENS))
    return Lengthwise(
        mode,
        num_tokens,
        single_s=statistics.median(answer.first_token_s for answer in single),
        handoff_s=statistics.median(answer.first_token_s for answer in handoff),
        second_gap_s=statistics.median(answer.second_gap_s for answer in handoff),
        step_s=statistics.median(gap for answer in single for gap in answer.later_gaps_s),
    )


def _idle_with_loan(client: httpx.Client, system: System, prompts: Prompts) -> float:
    lend(client, system.producer, prompts.of(256), f"bench-{secrets.token_hex(4)}")
    return _idle_share(system.producer_process)


def _idle_share(child: Child) -> float:
    """CPU seconds per second of a process and its children."""
    process = psutil.Process(child.pid)
    tree = [process, *process.children(recursive=True)]
    time.sleep(SETTLE_S)
    before = sum(sum(member.cpu_times()[:2]) for member in tree)
    time.sleep(IDLE_S)
    return (sum(sum(member.cpu_times()[:2]) for member in tree) - before) / IDLE_S


def _decode_ratio(client: httpx.Client, system: System, prompts: Prompts, repeats: int) -> float:
    """Time per token of an engine with a connector, asked directly, over one without."""
    gaps: dict[str, list[float]] = {system.consumer: [], system.single: []}
    for _ in range(repeats):
        for url, measured in gaps.items():
            answer = ask(client, url, prompts.of(64), max_tokens=DECODE_TOKENS)
            measured.append(statistics.median(answer.later_gaps_s))
    return statistics.median(gaps[system.consumer]) / statistics.median(gaps[system.single])


def print_rows(rows: Sequence[Lengthwise], console: Console) -> None:
    table = Table(title="Handoff between two engines beside a single one, ms (median)")
    for heading in ("mode", "tokens", "single", "P/D", "more", "goal", "", "gap to 2nd", "step", "goal", ""):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for row in rows:
        table.add_row(
            row.mode,
            str(row.num_tokens),
            _ms(row.single_s),
            _ms(row.handoff_s),
            _ms(row.handoff_s - row.single_s),
            _ms(row.single_s * TTFT_SHARE + TTFT_EXTRA_S),
            _verdict(row.meets_first_goal),
            _ms(row.second_gap_s),
            _ms(row.step_s),
            _ms(row.step_s + SECOND_EXTRA_S),
            _verdict(row.meets_second_goal),
        )
    console.print(table)


def print_overheads(overheads: Sequence[Overheads], console: Console) -> None:
    table = Table(title="Around the handoff")
    for heading in ("mode", "new pair, ms", "", "idle", "idle with a loan", "", "decode / single", ""):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for row in overheads:
        table.add_row(
            row.mode,
            _ms(row.new_pair_s),
            _verdict(row.new_pair_s < NEW_PAIR_GOAL_S),
            f"{row.idle_share:.1%}",
            f"{row.idle_loan_share:.1%}",
            _verdict(row.idle_loan_share < IDLE_GOAL),
            f"{row.decode_ratio:.3f}",
            _verdict(row.decode_ratio <= DECODE_GOAL),
        )
    console.print(table)


def plot(rows: Sequence[Lengthwise], folder: Path) -> list[Path]:
    """One picture for the first token, one for the gap behind it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    curves: dict[str, tuple[str, Callable[[Lengthwise], float]]] = {
        "handoff-first-token": (
            "First token: P/D less single engine, ms",
            lambda row: row.handoff_s - row.single_s,
        ),
        "handoff-second-token": ("Gap before the second token, ms", lambda row: row.second_gap_s),
    }
    pictures = []
    for name, (title, of_row) in curves.items():
        figure, axes = pyplot.subplots(figsize=(7, 4))
        for mode in dict.fromkeys(row.mode for row in rows):
            line = [row for row in rows if row.mode == mode]
            axes.plot([r.num_tokens for r in line], [of_row(r) * 1e3 for r in line], marker="o", label=mode)
        axes.set(xlabel="prompt tokens", title=title)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        figure.tight_layout()
        pictures.append(folder / f"{name}.png")
        figure.savefig(pictures[-1], dpi=110)
        pyplot.close(figure)
    return pictures


def _ms(duration_s: float) -> str:
    return f"{duration_s * 1e3:.1f}"


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "missed"


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m baton.bench.handoff")
    parser.add_argument("--modes", default=",".join(MODES), help="of " + ", ".join(MODES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="prompt lengths")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--plots", type=Path, help="folder for PNG pictures")
    given = parser.parse_args(list(arguments))
    modes = given.modes.split(",")
    if unknown := [mode for mode in modes if mode not in MODES]:
        parser.error(f"unknown mode {', '.join(unknown)}; there are: {', '.join(MODES)}")
    tokens = sorted(int(text) for text in given.tokens.split(","))
    console = Console(width=None if sys.stdout.isatty() else 120)
    rows: list[Lengthwise] = []
    overheads: list[Overheads] = []
    for mode in modes:
        measured, around = measure(mode, tokens, given.repeats)
        rows += measured
        overheads.append(around)
    print_rows(rows, console)
    print_overheads(overheads, console)
    if given.plots is not None:
        for picture in plot(rows, given.plots):
            console.print(f"wrote {picture}")


if __name__ == "__main__":
    main(sys.argv[1:])
