"""Runs benchmarks and prints their tables with the machine: `make bench [ARGS="step handoff"]`.

`make bench ARGS="compare --quick"` compares Baton with its peers; see docs/benchmarks.md.
"""

import sys

import typer

from baton.bench.command import BENCHMARKS, run_benchmarks
from lab.bench.compare.command import compare

ALL = {
    "step": "lab.bench.step_overhead",
    **BENCHMARKS,
    "handoff": "lab.bench.handoff.command",
    "decode-graphs": "lab.bench.decode_graphs",
    "agent": "lab.bench.agent_session",
    "choice": "lab.bench.fleet.choice",
    "engine-steps": "lab.bench.engine_steps",
    "eviction": "lab.bench.eviction",
    "fleet": "lab.bench.fleet.command",
    "hedge": "lab.bench.fleet.hedge",
    "loans": "lab.bench.fleet.loans",
    "lmcache": "lab.bench.lmcache_disk",
    "offload": "lab.bench.offload",
    "overload": "lab.bench.fleet.overload",
    "policies": "lab.bench.fleet.real",
    "router": "lab.bench.router.command",
    "router-size": "lab.bench.router.size",
    "shared-storage": "lab.bench.shared_storage",
    "stalls": "lab.bench.stalls",
    "start": "lab.bench.start",
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
