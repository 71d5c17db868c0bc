"""Runs floods one after the other and prints figures: `python -m baton.testing.fuzz --frames 1000000`."""

import argparse
import logging
import resource
import sys
import time

from baton.testing.fuzz.listener import FloodResult, flood

FRAMES_PER_FLOOD = 20_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m baton.testing.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first flood; the next add one each")
    parser.add_argument("--verbose", action="store_true", help="show what the listener logs")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING if arguments.verbose else logging.CRITICAL)

    total = FloodResult()
    started_s, warm_kib = time.monotonic(), 0
    for seed in range(arguments.seed, arguments.seed + -(-arguments.frames // FRAMES_PER_FLOOD)):
        total.add(flood(min(FRAMES_PER_FLOOD, arguments.frames - total.num_frames), seed))
        warm_kib = warm_kib or _peak_kib()
    duration_s = time.monotonic() - started_s
    print(
        f"{total.num_frames:,} frames in {duration_s:.1f} s, {total.num_frames / duration_s:,.0f} per second"
    )
    print("  " + ", ".join(f"{kind} {count:,}" for kind, count in total.kinds.most_common()))
    print(
        f"  well-formed {total.num_decoded:,}, dropped {total.num_dropped:,}, answers {total.num_answers:,}"
    )
    print(f"  peak memory after the first flood {warm_kib >> 10} MiB, at the end {_peak_kib() >> 10} MiB")
    print(f"  objects left by one flood, at most {total.num_objects_left:,}")
    for violation in total.violations:
        print(f"VIOLATION {violation}")
    return 1 if total.violations else 0


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    sys.exit(main())
