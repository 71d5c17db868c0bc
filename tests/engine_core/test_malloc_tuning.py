"""Steps reuse freed memory, measured by page faults in a separate process."""

import os
import subprocess
import sys

import pytest
import torch

from baton.engine.models.matmul import is_packable
from baton.engine.runner.malloc_tuning import compute_environment

PROGRAM = """
import resource, sys
import torch
from baton.engine.runner.malloc_tuning import keep_freed_memory
if not keep_freed_memory():
    sys.exit(77)
def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2048, 2048) * 2  # 16 MiB, twice.
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(12):  # Until the heap has its size.
    faults_of_a_step()
print(sum(faults_of_a_step() for _ in range(8)))
"""


def test_a_step_touches_no_fresh_pages() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    if answer.returncode == 77:
        pytest.skip("this C library cannot be told to keep freed memory")
    assert answer.returncode == 0, answer.stderr
    # Eight steps would touch 65,536 pages; the heap may still grow, half a step (4,096) at a time.
    assert int(answer.stdout) < 65_536 // 4


GROWS = """
import psutil, torch
from baton.engine.models.matmul import Matmul
torch.set_num_threads(1)
multiply = Matmul(torch.ones(64, 64))
x, me = torch.ones(500, 64), psutil.Process()
for rows in range(1, 500):
    multiply(x[:rows])
    if rows == 200:
        before = me.memory_info().rss
print(me.memory_info().rss - before)
"""


@pytest.mark.processes
@pytest.mark.skipif(not is_packable(torch.ones(1)), reason="oneDNN does not multiply here")
def test_products_of_new_sizes_take_bounded_memory() -> None:
    def growth(limits: dict[str, str]) -> int:
        command = [sys.executable, "-c", GROWS]
        environment = {**os.environ, **limits}
        return int(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)

    unbounded = growth({name: "100000" for name in compute_environment() if name.endswith("_CAPACITY")})
    assert growth(compute_environment()) < unbounded / 4


def test_the_users_own_limit_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    assert compute_environment()["LRU_CACHE_CAPACITY"] == "7"
    assert compute_environment()["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] != "7"
