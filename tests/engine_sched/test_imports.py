"""A core whose ranks are other processes imports no torch, with any connector.

The import contracts in pyproject.toml forbid it to the scheduler, and clocks and random numbers, too.
"""

import subprocess
import sys

import pytest

from baton.connectors.registry import BUILT_IN

OF_A_CORE = [
    "baton.engine.core.core_process",
    "baton.engine.executor.multiprocess",
    "baton.engine.executor.ray",
    *sorted(place.partition(":")[0] for place in BUILT_IN.values()),
]


@pytest.mark.slow
@pytest.mark.processes
def test_a_core_loads_no_tensors() -> None:
    program = f"import sys, {', '.join(OF_A_CORE)}; print({{'torch', 'ray'}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "set()"
