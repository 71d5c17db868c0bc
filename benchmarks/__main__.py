"""Runs benchmarks and prints their tables with the machine: `make bench [ARGS="step handoff"]`.

`make bench ARGS="compare --quick"` compares Baton with its peers; see docs/benchmarks.md.
"""

import sys

import typer

from baton.bench.command import BENCHMARKS, run_benchmarks
from benchmarks.compare.command import compare

ALL = {
    **BENCHMARKS,
    "decode-graphs": "benchmarks.decode_graphs",
    "choice": "benchmarks.fleet.choice",
    "engine-steps": "benchmarks.engine_steps",
    "eviction": "benchmarks.eviction",
    "fleet": "benchmarks.fleet.command",
    "hedge": "benchmarks.fleet.hedge",
    "loans": "benchmarks.fleet.loans",
    "lmcache": "benchmarks.lmcache_disk",
    "offload": "benchmarks.offload",
    "overload": "benchmarks.fleet.overload",
    "policies": "benchmarks.fleet.real",
    "router": "benchmarks.router.command",
    "router-size": "benchmarks.router.size",
    "shared-storage": "benchmarks.shared_storage",
    "stalls": "benchmarks.stalls",
    "start": "benchmarks.start",
}


def main(arguments: list[str]) -> int:
    """Return the exit status: 0, 1 if a benchmark failed, 2 for an unknown one."""
    if arguments[:1] == ["compare"]:
        app = typer.Typer(add_completion=False)
        app.command()(compare)
        app(arguments[1:], prog_name="compare")
    return run_benchmarks(arguments, ALL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
