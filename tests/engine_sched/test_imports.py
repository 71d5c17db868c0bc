"""Import rules for the simulator: the scheduler imports no torch and reads no clock.

A core whose ranks are other processes imports no torch either, with any connector.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import baton.engine
from baton.connectors.registry import BUILT_IN

ENGINE = Path(baton.engine.__file__).parent
MODULES = sorted([*ENGINE.glob("scheduling/*.py"), *ENGINE.glob("cache/*.py"), ENGINE / "request.py"])
OF_A_CORE = [
    "baton.engine.core.core_process",
    "baton.engine.executor.multiprocess",
    "baton.engine.executor.ray",
    *sorted(place.partition(":")[0] for place in BUILT_IN.values()),
]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("modules", "heavy"),
    [(["baton.engine.scheduling.scheduler"], {"torch", "numpy", "zmq"}), (OF_A_CORE, {"torch", "ray"})],
    ids=["scheduler", "core"],
)
def test_it_loads_no_tensors(modules: list[str], heavy: set[str]) -> None:
    program = f"import sys, {', '.join(modules)}; print({heavy} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_no_module_of_the_scheduler_names_a_clock_or_chance(module: Path) -> None:
    source = module.read_text()
    for word in ("import time", "import random", "import asyncio", "import threading", "from time"):
        assert word not in source
