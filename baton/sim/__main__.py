"""python -m baton.sim pull|push [--seeds N] [--first SEED] [--minutes M]    many worlds
python -m baton.sim pull|push --seed SEED [--mutant GUARD]                one world, line by line
python -m baton.sim mutants [--seeds N] [GUARD ...]                       each guard taken away
python -m baton.sim full ...                                              whole engines; see --help
"""

import argparse
import sys
import time

from baton.core.errors import UserError
from baton.sim.runs import GUARDS, MODES, Report, replay, run_worlds

DEFAULT_SEEDS = 1_000
SLICE = 100


def main(argv: list[str]) -> int:
    if argv[:1] == ["full"]:
        from baton.sim.full.command import main as full  # Imports torch, as real halves do.

        return full(argv[1:])
    parser = argparse.ArgumentParser(prog="baton sim", description="Simulated worlds of the handoff.")
    commands = parser.add_subparsers(dest="command", required=True)
    for mode in MODES:
        worlds = commands.add_parser(mode, help=f"worlds that hand off by {mode}")
        worlds.add_argument("--seeds", type=int, help=f"how many worlds; {DEFAULT_SEEDS} without --minutes")
        worlds.add_argument("--minutes", type=float, help="stop after so long")
        worlds.add_argument("--first", type=int, default=0, help="the first seed")
        worlds.add_argument("--seed", type=int, help="replay this one world")
        worlds.add_argument("--mutant", choices=list(GUARDS[mode]), help="without this guard")
    mutants = commands.add_parser("mutants", help="is each missing guard noticed?")
    mutants.add_argument("--seeds", type=int, default=DEFAULT_SEEDS)
    mutants.add_argument("guards", nargs="*", metavar="GUARD", default=[])
    options = parser.parse_args(argv)
    try:
        if options.command == "mutants":
            return _mutants(options.seeds, options.guards)
        if options.seed is not None:
            lines = replay(options.command, options.seed, mutant=options.mutant)
            print("\n".join(lines))
            return 1 if "VIOLATION" in lines[-1] else 0
        return _worlds(options.command, options.first, options.seeds, options.minutes, options.mutant)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def _worlds(mode: str, first: int, seeds: int | None, minutes: float | None, mutant: str | None) -> int:
    began = time.monotonic()
    until = began + minutes * 60 if minutes is not None else float("inf")
    left = seeds if seeds is not None else (DEFAULT_SEEDS if minutes is None else sys.maxsize)
    total = Report(mode)
    while left > 0 and time.monotonic() < until:
        report = run_worlds(mode, first + total.num_worlds, min(SLICE, left), mutant=mutant)
        total.add(report)
        left -= report.num_worlds
        for broken in report.broken:
            print(f"{broken.kind}: {broken.command}", flush=True)
    _print_report(total, first, time.process_time())
    return 1 if total.broken else 0


def _print_report(report: Report, first: int, cpu_s: float) -> None:
    for what, count in sorted(report.counts.items()):
        print(f"{count:10d}  {what}")
    print(
        f"{report.mode}: {report.num_worlds} worlds (seeds {first} to {first + report.num_worlds - 1}), "
        f"{report.num_events} events, {len(report.broken)} violations, "
        f"{cpu_s:.0f} s of one core, {report.num_worlds / cpu_s:.0f} worlds/s"
    )


def _mutants(num_seeds: int, wanted: list[str]) -> int:
    guards = [(mode, guard) for mode in MODES for guard in GUARDS[mode] if not wanted or guard in wanted]
    if not guards:
        raise UserError("there is no such guard", field="mutants")
    unnoticed = 0
    for mode, guard in guards:
        report = run_worlds(mode, 0, num_seeds, mutant=guard)
        unnoticed += not report.broken
        first = report.broken[0].seed if report.broken else "never"
        kinds = "; ".join(f"{kind} {count}" for kind, count in report.kinds.most_common(3))
        noticed = f"{len(report.broken):6d} of {num_seeds}   first {first:>6}"
        print(f"{mode} {guard:16s} {noticed}   {kinds}", flush=True)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
