"""Programs that the tests' fork server starts behave as those that an interpreter starts."""

import os
import socket
import subprocess
import sys

import pytest

from baton.engine.process.child import Child
from tests.fork_server import forking_programs

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="prctl(2) is Linux's"),
]


@pytest.mark.parametrize("arguments", [["--version"], ["serve", "/nowhere"], ["no-command"]])
def test_a_command_has_the_same_output_and_exit_status(arguments: list[str]) -> None:
    def run() -> tuple[int, bytes, bytes]:
        ended = subprocess.run([sys.executable, "-m", "baton.cli", *arguments], capture_output=True)
        return ended.returncode, ended.stdout, ended.stderr

    started = run()
    with forking_programs():
        assert run() == started


def tell(end: socket.socket) -> None:
    """The child's function: what it is, then it waits for the parent."""
    is_fork = "torch" in sys.modules
    end.sendall(repr((os.getppid(), os.getpgid(0), os.environ["TOLD"], is_fork)).encode())
    end.recv(1)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_child_has_its_parent_group_and_environment_and_reports_its_end(is_killed: bool) -> None:
    with forking_programs():
        child = Child.spawn(
            "tests.system.test_fork_server:tell",
            name="told",
            grace_s=0.0,
            environment={"TOLD": "yes"},
            leads_group=True,
        )
    pid = child.process.pid
    assert child.socket.recv(1000).decode() == repr((os.getpid(), pid, "yes", True))
    if is_killed:
        child.process.kill()
    else:
        child.socket.sendall(b".")
    assert (
        child.describe_exit() == f"told {'was ended by SIGKILL' if is_killed else 'ended with exit status 0'}"
    )
    child.kill()
