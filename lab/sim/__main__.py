"""python -m lab.sim pull|push [--seeds N] [--first SEED] [--minutes M] [--jobs N]   many worlds
python -m lab.sim pull|push [--seeds N] [--first SEED] --digest                   a hash of their traces
python -m lab.sim pull|push --seed SEED [--mutant GUARD]                          one world, line by line
python -m lab.sim mutants [--first SEED] [--seeds N] [GUARD ...]                  each guard taken away
"""

import argparse
import multiprocessing
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice, starmap

from baton.core.errors import UserError
from lab.sim import campaigns
from lab.sim.campaigns import MODES, Report
from lab.sim.mutants.guards import MUTANTS

SEEDS = 200
BATCHES = 100  # Batches in the default number of worlds. A process is idle for at most one batch at the end.
PENDING = 4  # Batches for each process: the others go on while one runs a slow batch.


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.sim", description="Simulated worlds of whole engines, connectors and router."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for mode in MODES:
        worlds = commands.add_parser(mode, help=f"worlds that hand off by {mode}")
        _add_options(worlds)
        worlds.add_argument("--mutant", choices=list(MUTANTS[mode]), help="without this guard")
    mutants = commands.add_parser("mutants", help="is each missing guard noticed?")
    mutants.add_argument("--seeds", type=int, default=SEEDS)
    mutants.add_argument("--first", type=int, default=0, help="the first seed")
    mutants.add_argument("guards", nargs="*", metavar="GUARD", default=[])
    options = parser.parse_args(argv)
    try:
        if options.command != "mutants":
            return _run(options.command, options)
        wanted = options.guards
        guards = [(mode, guard) for mode in MODES for guard in MUTANTS[mode]]
        guards = [(mode, guard) for mode, guard in guards if not wanted or guard in wanted]
        if not guards:
            raise UserError("there is no such guard", field="mutants")
        return _run_mutants(guards, options.first, options.seeds)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, help=f"how many worlds; {SEEDS} without --minutes")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay this one world")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run worlds side by side")
    parser.add_argument("--digest", action="store_true", help="print a hash of the traces of these worlds")


def _run(mode: str, options: argparse.Namespace) -> int:
    """One world line by line, or many of them. Returns the exit status."""
    if options.seed is not None:
        lines = campaigns.replay(mode, options.seed, mutant=options.mutant)
        print("\n".join(lines))
        return 1 if "VIOLATION" in lines[-1] else 0
    if options.digest:
        seeds = range(options.first, options.first + (options.seeds or SEEDS))
        print(campaigns.digest(mode, seeds, mutant=options.mutant))
        return 0
    total, began = Report(mode), time.monotonic()
    run_batch = partial(campaigns.run_worlds, mode, mutant=options.mutant)
    batches = _batches(options)
    several = options.jobs > 1
    for report in _spread(run_batch, batches, options.jobs) if several else starmap(run_batch, batches):
        total.add(report)
        for broken in report.broken:
            print(f"{broken.kind}: {broken.command}", flush=True)
    for what, count in sorted(total.counts.items()):
        print(f"{count:10d}  {what}")
    least_s = sys.float_info.epsilon  # Avoids a division by zero without worlds.
    print(
        f"{mode}: {total.num_worlds} worlds "
        f"(seeds {options.first} to {options.first + total.num_worlds - 1}), "
        f"{total.num_events} events, {len(total.broken)} violations, "
        f"{total.cpu_s:.0f} s of one core, {total.num_worlds / max(total.cpu_s, least_s):.0f} worlds/s; "
        f"{total.num_worlds / (time.monotonic() - began):.0f} worlds/s by the clock"
    )
    return 1 if total.broken else 0


def _batches(options: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """(first seed, number of seeds) of each batch, until the options end them."""
    minutes, seeds = options.minutes, options.seeds
    until = time.monotonic() + minutes * 60 if minutes is not None else float("inf")
    left = seeds if seeds is not None else (SEEDS if minutes is None else sys.maxsize)
    first = options.first
    while left > 0 and time.monotonic() < until:
        count = min(SEEDS // BATCHES, left)
        yield first, count
        first, left = first + count, left - count


def _spread(
    run_batch: Callable[[int, int], Report], batches: Iterator[tuple[int, int]], num_jobs: int
) -> Iterator[Report]:
    """Reports in the order of their batches, which run in `num_jobs` processes.

    Forked: a new interpreter takes as long to import what it needs as to run several worlds.
    """
    with ProcessPoolExecutor(num_jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        pending = deque(pool.submit(run_batch, *batch) for batch in islice(batches, PENDING * num_jobs))
        while pending:
            yield pending.popleft().result()
            pending.extend(pool.submit(run_batch, *batch) for batch in islice(batches, 1))


def _run_mutants(guards: list[tuple[str, str]], first: int, num_seeds: int) -> int:
    """Run worlds of each (mode, guard). Returns 1 if one of the missing guards is not found."""
    num_unnoticed = 0
    for mode, guard in guards:
        report = campaigns.run_worlds(mode, first, num_seeds, mutant=guard)
        num_unnoticed += not report.broken
        first_seed = report.broken[0].seed if report.broken else "never"
        kinds = "; ".join(f"{kind} {count}" for kind, count in report.kinds.most_common(3))
        noticed = f"{len(report.broken):6d} of {num_seeds}   first {first_seed:>6}"
        print(f"{mode} {guard:20s} {noticed}   {kinds}", flush=True)
    return 1 if num_unnoticed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
