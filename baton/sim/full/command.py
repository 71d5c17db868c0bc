"""python -m baton.sim full [--seeds N] [--first SEED] [--minutes M] [--mode pull]      many full worlds
python -m baton.sim full --seed SEED [--mutant GUARD]                               one, line by line
python -m baton.sim full --mutants [--seeds N]                                      each guard taken away
"""

from __future__ import annotations

import argparse
import sys
import time

from baton.core.errors import UserError
from baton.sim.full.mutants import MUTANTS
from baton.sim.full.runs import MODES, replay, run_worlds
from baton.sim.runs import Report

DEFAULT_SEEDS = 200
SLICE = 20


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="baton sim full", description="Simulated worlds of whole engines, connectors and router."
    )
    parser.add_argument("--mode", choices=MODES, default=MODES[0])
    parser.add_argument("--seeds", type=int, help=f"how many worlds; {DEFAULT_SEEDS} without --minutes")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay this one world")
    parser.add_argument("--mutant", help="without this guard")
    parser.add_argument("--mutants", action="store_true", help="is each missing guard noticed?")
    options = parser.parse_args(argv)
    try:
        if options.mutants:
            return _mutants(options.mode, options.first, options.seeds or DEFAULT_SEEDS)
        if options.seed is not None:
            lines = replay(options.mode, options.seed, mutant=options.mutant)
            print("\n".join(lines))
            return 1 if "VIOLATION" in lines[-1] else 0
        return _worlds(options.mode, options.first, options.seeds, options.minutes, options.mutant)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def _worlds(mode: str, first: int, seeds: int | None, minutes: float | None, mutant: str | None) -> int:
    until = time.monotonic() + minutes * 60 if minutes is not None else float("inf")
    left = seeds if seeds is not None else (DEFAULT_SEEDS if minutes is None else sys.maxsize)
    total = Report(mode)
    began = time.process_time()
    while left > 0 and time.monotonic() < until:
        report = run_worlds(mode, first + total.num_worlds, min(SLICE, left), mutant=mutant)
        total.add(report)
        left -= report.num_worlds
        for broken in report.broken:
            print(f"{broken.kind}: {broken.command}", flush=True)
    cpu_s = time.process_time() - began
    for what, count in sorted(total.counts.items()):
        print(f"{count:10d}  {what}")
    print(
        f"full {mode}: {total.num_worlds} worlds (seeds {first} to {first + total.num_worlds - 1}), "
        f"{total.num_events} events, {len(total.broken)} violations, "
        f"{cpu_s:.0f} s of one core, {total.num_worlds / cpu_s:.0f} worlds/s"
    )
    return 1 if total.broken else 0


def _mutants(mode: str, first: int, num_seeds: int) -> int:
    num_unnoticed = 0
    for guard in MUTANTS[mode]:
        report = run_worlds(mode, first, num_seeds, mutant=guard)
        num_unnoticed += not report.broken
        first_seed = report.broken[0].seed if report.broken else "never"
        kinds = "; ".join(f"{kind} {count}" for kind, count in report.kinds.most_common(3))
        print(
            f"{guard:20s} {len(report.broken):6d} of {num_seeds}   first {first_seed:>6}   {kinds}",
            flush=True,
        )
    return 1 if num_unnoticed else 0
