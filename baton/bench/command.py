"""`baton bench [NAME ...]`: transports and stores of this machine, as ratios to limits of the same run."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import typer

from baton.bench.machine import machine_line

BENCHMARKS = {
    "transports": "baton.bench.transports",
    "tiers": "baton.bench.tiers",
}

app = typer.Typer(add_completion=False)


@app.command()
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"Benchmarks to run, of {', '.join(BENCHMARKS)} (default: all)."),
    ] = None,
) -> None:
    """Measure this machine: the transports between processes, and files as a tier."""
    if status := run_benchmarks(names or [], BENCHMARKS):
        raise typer.Exit(status)


def run_benchmarks(names: Sequence[str], known: Mapping[str, str]) -> int:
    """Run the `main` of each named module, or of all. Returns 1 if one failed, 2 for an unknown name."""
    if unknown := [name for name in names if name not in known]:
        print(f"unknown benchmark {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    print(machine_line())
    failed = False
    for name in names or known:
        run: Callable[[], object] = importlib.import_module(known[name]).main
        failed |= bool(run())
    return int(failed)
