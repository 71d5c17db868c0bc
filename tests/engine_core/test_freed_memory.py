"""Steps reuse each other's memory: measured in page faults, in a process of its own."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from baton.engine.freed_memory import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit(77)
def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2048, 2048) * 2  # 16 MiB, twice.
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(4):  # Until the heap has its size.
    faults_of_a_step()
print(sum(faults_of_a_step() for _ in range(8)))
"""


def faults(how: str) -> int:
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=60, check=False
    )
    if answer.returncode == 77:
        pytest.skip("this C library cannot be told to keep freed memory")
    assert answer.returncode == 0, answer.stderr
    return int(answer.stdout)


def test_a_step_touches_no_fresh_pages() -> None:
    kept, given_back = faults("keep"), faults("give back")
    assert kept < given_back / 10, (kept, given_back)
