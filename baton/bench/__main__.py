"""`make bench [ARGS="step handoff"]`: prints every benchmark's table, and the machine it ran on."""

import importlib
import sys
from collections.abc import Callable

from baton.bench.machine import machine_line

BENCHMARKS = {
    "step": "baton.bench.step_overhead",
    "transports": "baton.bench.transports",
    "cross-layer": "baton.bench.cross_layer",
    "decode-graphs": "baton.bench.decode_graphs",
    "handoff": "baton.bench.handoff",
    "offload": "baton.bench.offload",
    "shared-storage": "baton.bench.shared_storage",
    "stalls": "baton.bench.stalls",
}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"unknown benchmark {', '.join(unknown)}; there are: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    print(machine_line())
    failed = False
    for name in names or BENCHMARKS:
        run: Callable[[], object] = importlib.import_module(BENCHMARKS[name]).main
        failed |= bool(run())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
