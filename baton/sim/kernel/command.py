"""Output of `baton sim` for a campaign."""

import argparse
import sys
import time

from baton.sim.kernel.runs import Campaign, Report


def add_options(parser: argparse.ArgumentParser, default_seeds: int) -> None:
    parser.add_argument("--seeds", type=int, help=f"how many worlds; {default_seeds} without --minutes")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay this one world")


def run(campaign: Campaign, mode: str, options: argparse.Namespace, default_seeds: int) -> int:
    """One world line by line, or many of them. Returns the exit status."""
    if options.seed is not None:
        lines = campaign.replay(mode, options.seed, mutant=options.mutant)
        print("\n".join(lines))
        return 1 if "VIOLATION" in lines[-1] else 0
    minutes, seeds = options.minutes, options.seeds
    until = time.monotonic() + minutes * 60 if minutes is not None else float("inf")
    left = seeds if seeds is not None else (default_seeds if minutes is None else sys.maxsize)
    total, began = Report(mode), time.process_time()
    while left > 0 and time.monotonic() < until:
        first = options.first + total.num_worlds
        report = campaign.run_worlds(mode, first, min(default_seeds // 10, left), mutant=options.mutant)
        total.add(report)
        left -= report.num_worlds
        for broken in report.broken:
            print(f"{broken.kind}: {broken.command}", flush=True)
    cpu_s = time.process_time() - began
    for what, count in sorted(total.counts.items()):
        print(f"{count:10d}  {what}")
    print(
        f"{campaign.name_of(mode)}: {total.num_worlds} worlds "
        f"(seeds {options.first} to {options.first + total.num_worlds - 1}), "
        f"{total.num_events} events, {len(total.broken)} violations, "
        f"{cpu_s:.0f} s of one core, {total.num_worlds / cpu_s:.0f} worlds/s"
    )
    return 1 if total.broken else 0


def run_mutants(campaign: Campaign, guards: list[tuple[str, str]], first: int, num_seeds: int) -> int:
    """Run worlds of each (mode, guard). Returns 1 if one of the missing guards is not found."""
    num_unnoticed = 0
    for mode, guard in guards:
        report = campaign.run_worlds(mode, first, num_seeds, mutant=guard)
        num_unnoticed += not report.broken
        first_seed = report.broken[0].seed if report.broken else "never"
        kinds = "; ".join(f"{kind} {count}" for kind, count in report.kinds.most_common(3))
        noticed = f"{len(report.broken):6d} of {num_seeds}   first {first_seed:>6}"
        print(f"{mode} {guard:20s} {noticed}   {kinds}", flush=True)
    return 1 if num_unnoticed else 0
