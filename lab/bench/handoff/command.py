"""Handoff benchmark: latency of prefill and decode on two engines, compared with one engine that does both.

    single engine <--- prompt of n tokens --- this ---> routers --> P, D         alternating, each prompt once

It uses real engines with a model of about 90 million parameters, one system per mode; the goals are in
`goals`. All engines share this machine, and a single engine has all of it to itself while it
computes, so compare differences, and check the load of other programs.

    python -m lab.bench.handoff.command                       a few minutes: two modes, two short lengths
    python -m lab.bench.handoff.command --whole               every mode and length; figures and plots stay
    python -m lab.bench.handoff.command --whole --modes pull  a part of it; other results are kept

Results are printed, and with `--out` written, as they come. A mode that fails is reported at the end; the
others are still measured.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.bench.machine import machine_line
from baton.core.errors import BatonError
from lab.bench.handoff.goals import Goal, Lengthwise, Overheads, Results
from lab.bench.handoff.measures import QUIET_CORES, measure
from lab.bench.handoff.plots import plot
from lab.bench.handoff.system import MODES

QUICK_MODES, QUICK_TOKENS, QUICK_REPEATS = ("pull", "push-layer"), (64, 512), 3
WHOLE_TOKENS, WHOLE_REPEATS = (64, 512, 2000, 4000), 5
FOLDER = Path("docs/benchmarks")
RESULTS = "handoff.json"
WHOLE_PATIENCE_S = 180.0


class ResultRecorder:
    """Prints and stores results."""

    def __init__(self, console: Console, folder: Path | None, machine: str) -> None:
        self.results = Results()
        self._console = console
        self._folder = folder
        self._machine = machine
        if folder is not None and (folder / RESULTS).is_file():
            stored = json.loads((folder / RESULTS).read_text())
            self.results = Results.of_json(stored)

    def record(self, result: Lengthwise | Overheads) -> None:
        self.results.add(result)
        busy = f" (others used {result.others_cores:.1f} cores)" if result.others_cores > QUIET_CORES else ""
        self._console.print(f"{_verdicts(result.goals)}{busy}", soft_wrap=True)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished = self._folder / f".{RESULTS}.{os.getpid()}"
            kept: dict[str, Any] = {"machine": self._machine, **self.results.to_json()}
            unfinished.write_text(json.dumps(kept, indent=1) + "\n")
            unfinished.rename(self._folder / RESULTS)

    def close(self) -> None:
        print_goals(self.results, self._console)
        if self._folder is not None and self.results.lengths:
            for picture in plot(self.results.lengths, self._folder):
                self._console.print(f"wrote {picture}")


def print_goals(results: Results, console: Console) -> None:
    table = Table(title="Handoff between two engines beside a single one (medians)")
    for heading in ("what", "measured", "goal", "", "cores used by others"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for result in results.all():
        for goal in result.goals:
            met = "met" if goal.is_met else "missed"
            row = (goal.name, goal.show(goal.measured), goal.show(goal.limit), met)
            table.add_row(*row, f"{result.others_cores:.1f}")
    console.print(table)
    print_phases(results, console)
    for result in results.overheads:
        handoffs_s, prompts_s = result.beside_handoffs_p99_s, result.beside_prompts_p99_s
        if handoffs_s is not None and prompts_s is not None:
            console.print(
                f"{result.mode}: p99 between tokens of an answer of D: {handoffs_s * 1e3:.1f} ms beside "
                f"handoffs, {prompts_s * 1e3:.1f} ms beside such prompts on another engine"
            )
    goals = list(results.goals())
    console.print(f"{sum(goal.is_met for goal in goals)} of {len(goals)} goals are met")


def print_phases(results: Results, console: Console) -> None:
    rows = [row for row in results.lengths if row.phases]
    if not rows:
        return
    table = Table(title="Where the gap before the second token goes, ms (medians)")
    table.add_column("mode, tokens")
    for name in (*rows[0].phases, "a step"):
        table.add_column(name, justify="right")
    for row in rows:
        shown = (f"{value * 1e3:.1f}" for value in (*row.phases.values(), row.step_s))
        table.add_row(f"{row.mode}, {row.num_tokens}", *shown)
    console.print(table)


def _verdicts(goals: Sequence[Goal]) -> str:
    """Return the common subject, then each figure with its goal."""
    of, _, _ = goals[0].name.partition(": ")
    parts = [
        f"{goal.name.partition(': ')[2]} {goal.show(goal.measured)} "
        f"({'' if goal.is_met else 'MISSES '}{goal.show(goal.limit)})"
        for goal in goals
    ]
    return f"{of}: {', '.join(parts)}"


def run(
    modes: Iterable[str],
    tokens: Sequence[int],
    repeats: int,
    recorder: ResultRecorder,
    console: Console,
    *,
    patience_s: float = 0.0,
) -> list[str]:
    """Measure the modes; return those that failed."""
    failed = []
    for mode in modes:
        console.print(f"{mode}: starting")
        try:
            measure(mode, tokens, repeats, recorder.record, patience_s=patience_s)
        except BatonError as error:
            console.print(f"{mode}: FAILED: {error}", markup=False)
            failed.append(mode)
    return failed


def main(arguments: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.bench.handoff.command")
    parser.add_argument(
        "--whole", action="store_true", help=f"every mode and length; results are kept in {FOLDER}"
    )
    parser.add_argument("--modes", help="comma-separated modes, of " + ", ".join(MODES))
    parser.add_argument("--tokens", help="comma-separated prompt lengths")
    parser.add_argument("--repeats", type=int)
    parser.add_argument(
        "--patience-s",
        type=float,
        help="at each length, how long to repeat trials that other programs disturbed",
    )
    parser.add_argument("--out", type=Path, help="folder for the figures and plots")
    given = parser.parse_args(list(arguments))
    modes = given.modes.split(",") if given.modes else list(MODES if given.whole else QUICK_MODES)
    if unknown := [mode for mode in modes if mode not in MODES]:
        parser.error(f"unknown mode {', '.join(unknown)}; there are: {', '.join(MODES)}")
    tokens: Sequence[int] = WHOLE_TOKENS if given.whole else QUICK_TOKENS
    if given.tokens:
        tokens = sorted(int(text) for text in given.tokens.split(","))
    repeats = given.repeats or (WHOLE_REPEATS if given.whole else QUICK_REPEATS)
    console = Console(width=None if sys.stdout.isatty() else 120)
    recorder = ResultRecorder(console, given.out or (FOLDER if given.whole else None), machine_line())
    patience_s = given.patience_s
    if patience_s is None:
        patience_s = WHOLE_PATIENCE_S if given.whole else 0.0
    failed = run(modes, tokens, repeats, recorder, console, patience_s=patience_s)
    recorder.close()
    if failed:
        console.print(f"could not be measured: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
