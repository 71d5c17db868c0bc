"""The scheduler runs in the simulator as it is: loading it loads no tensors, and none of it reads a clock."""

import subprocess
import sys
from pathlib import Path

import pytest

import baton.engine

MODULES = [
    "door",
    "request",
    "waiting",
    "free_queue",
    "block_pool",
    "kv_cache",
    "connector_calls",
    "remote_kv",
    "step_builder",
    "step_counts",
    "scheduler",
]


@pytest.mark.slow
@pytest.mark.processes
def test_the_scheduler_loads_no_tensors() -> None:
    program = "import sys, baton.engine.scheduler; print({'torch', 'numpy', 'zmq'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("module", MODULES)
def test_no_module_of_the_scheduler_names_a_clock_or_chance(module: str) -> None:
    source = (Path(baton.engine.__file__).parent / f"{module}.py").read_text()
    for word in ("import time", "import random", "import asyncio", "import threading", "from time"):
        assert word not in source
