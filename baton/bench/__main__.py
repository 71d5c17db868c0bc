"""`make bench [ARGS="step handoff"]`: prints every benchmark's table, and the machine it ran on."""

import importlib
import os
import platform
import sys
from collections.abc import Callable

BENCHMARKS = {
    "step": "baton.bench.step_overhead",
    "transports": "baton.bench.transports",
    "handoff": "baton.bench.handoff",
}


def machine_line() -> str:
    """What a reader needs to judge the figures by."""
    load_1min = os.getloadavg()[0]
    return (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, "
        f"Python {platform.python_version()}, load {load_1min:.2f}"
    )


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"unknown benchmark {', '.join(unknown)}; there are: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    print(machine_line())
    for name in names or BENCHMARKS:
        run: Callable[[], object] = importlib.import_module(BENCHMARKS[name]).main
        run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
