"""Real child processes: their death is noticed, their output kept, and none outlives its parent.

Each process connects to a socket and keeps it open, so the end of that stream shows its end, without polling.
"""

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from baton.cli.processes import (
    Child,
    ChildDied,
    Fleet,
    StartTimeout,
    Stopped,
    free_ports,
    is_port_free,
    raising_on_stop_signals,
)

pytestmark = pytest.mark.processes

IP_LOCAL_PORT_RANGE = 51  # Python has no name for it yet.
WAIT_S = 30.0  # Only reached when something is wrong.

CALLS_IN = """
import socket, sys
call = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
call.sendall(sys.argv[2].encode())
"""
WAITS = CALLS_IN + "call.recv(1)"
# Ignores SIGTERM, and has a child of its own.
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "import subprocess, sys\n"
    f"subprocess.Popen([sys.executable, '-S', '-c', {WAITS!r}, sys.argv[1], 'grandchild'])\n"
) + WAITS


class Roll:
    """Accepts connections of processes, by name."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(WAIT_S)
        self.port = self._listener.getsockname()[1]
        self._calls: dict[str, socket.socket] = {}

    def command(self, script: str, name: str) -> list[str]:
        return [sys.executable, "-S", "-c", script, str(self.port), name]

    def wait_calls(self, *names: str) -> None:
        while not self._calls.keys() >= set(names):
            call, _ = self._listener.accept()
            call.settimeout(WAIT_S)
            self._calls[call.recv(64).decode()] = call

    def wait_end(self, name: str) -> None:
        """Wait until the process with this name has ended."""
        with suppress(ConnectionResetError):
            assert self._calls[name].recv(1) == b""

    def is_alive(self, name: str) -> bool:
        self._calls[name].setblocking(False)
        try:
            return self._calls[name].recv(1) != b""
        except BlockingIOError:
            return True

    def close(self) -> None:
        for call in self._calls.values():
            call.close()
        self._listener.close()


@pytest.fixture
def roll() -> Iterator[Roll]:
    roll = Roll()
    yield roll
    roll.close()


def test_a_childs_death_is_noticed_and_explained(tmp_path: Path, roll: Roll) -> None:
    with Fleet(tmp_path) as fleet:
        fleet.start("steady", roll.command(WAITS, "steady"))
        brief = fleet.start("brief", [sys.executable, "-S", "-c", "print('last words'); raise SystemExit(3)"])
        assert fleet.wait_exit(WAIT_S) is brief
        message = str(ChildDied(brief))
    assert "brief ended with exit status 3" in message
    assert "last words" in message


def test_a_child_that_was_killed_is_named_with_its_signal(tmp_path: Path, roll: Roll) -> None:
    with Fleet(tmp_path) as fleet:
        child = fleet.start("one", roll.command(WAITS, "one"))
        roll.wait_calls("one")
        os.kill(child.pid, signal.SIGKILL)
        assert fleet.wait_exit(WAIT_S) is child
        assert child.describe_exit() == "was ended by SIGKILL"
    assert child.describe_exit() == "was ended by SIGKILL"  # Known also after it was reaped.


def test_no_child_has_ended_while_all_run(tmp_path: Path, roll: Roll) -> None:
    with Fleet(tmp_path) as fleet:
        fleet.start("one", roll.command(WAITS, "one"))
        assert fleet.wait_exit(0) is None


def test_leaving_the_block_ends_children_and_their_children_however_stubborn(
    tmp_path: Path, roll: Roll
) -> None:
    with Fleet(tmp_path, stop_grace_s=0.05) as fleet:
        fleet.start("stubborn", roll.command(STUBBORN, "child"))
        roll.wait_calls("child", "grandchild")
    roll.wait_end("child")
    roll.wait_end("grandchild")


def test_an_error_in_the_block_ends_children_too(tmp_path: Path, roll: Roll) -> None:
    def work() -> None:
        with Fleet(tmp_path) as fleet:
            fleet.start("one", roll.command(WAITS, "one"))
            roll.wait_calls("one")
            raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        work()
    roll.wait_end("one")


SUPERVISOR = """
import sys
from pathlib import Path
from baton.cli.processes import Fleet
with Fleet(Path(sys.argv[1])) as fleet:
    fleet.start("child", sys.argv[2:])
    fleet.wait_exit(None)
"""


def test_no_child_outlives_a_parent_that_was_killed(tmp_path: Path, roll: Roll) -> None:
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path), *roll.command(WAITS, "child")]
    with subprocess.Popen(command) as supervisor:
        roll.wait_calls("child")
        supervisor.kill()
    roll.wait_end("child")


def test_ctrl_c_in_a_terminal_does_not_reach_children(tmp_path: Path, roll: Roll) -> None:
    with Fleet(tmp_path) as fleet:
        child = fleet.start("one", roll.command(WAITS, "one"))
        roll.wait_calls("one")
        assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
        assert roll.is_alive("one")


def test_waiting_for_health_ends_at_once_when_a_child_dies(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        child = fleet.start("brief", [sys.executable, "-S", "-c", "raise SystemExit(1)"])
        with pytest.raises(ChildDied, match="brief ended with exit status 1"):
            fleet.wait_ready({child: f"http://127.0.0.1:{free_ports(1)[0]}/health"}, timeout_s=WAIT_S)


def test_waiting_for_health_has_an_end(tmp_path: Path, roll: Roll) -> None:
    with Fleet(tmp_path) as fleet:
        child = fleet.start("silent", roll.command(WAITS, "silent"))
        with pytest.raises(StartTimeout, match="silent not ready"):
            fleet.wait_ready({child: f"http://127.0.0.1:{free_ports(1)[0]}/health"}, timeout_s=0.01)


def test_a_child_whose_end_was_expected_is_forgotten(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        child = fleet.start("brief", [sys.executable, "-S", "-c", ""])
        assert fleet.wait_exit(WAIT_S) is child
        assert child.exit_status() == 0
        fleet.forget(child)
        assert fleet.wait_exit(0) is None


def test_the_environment_of_children_is_the_fleets_and_their_own(tmp_path: Path) -> None:
    script = "import os; print(sorted(name for name in os.environ if name.startswith('X_')))"
    with Fleet(tmp_path, env={"X_FLEET": "1"}) as fleet:
        child = fleet.start("one", [sys.executable, "-S", "-c", script], env={"X_OWN": "1"})
        fleet.wait_exit(WAIT_S)
        assert child.log_tail() == "['X_FLEET', 'X_OWN']"


def test_a_stop_signal_ends_the_block_and_the_old_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def work() -> None:
        with raising_on_stop_signals():
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped, match="SIGTERM"):
        work()
    assert signal.getsignal(signal.SIGTERM) is before


def test_free_ports_are_different_and_free() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        with socket.create_server(("127.0.0.1", port)) as server:
            socket.create_connection(server.getsockname()).close()
    assert is_port_free("127.0.0.1", free_ports(1)[0])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert not is_port_free("127.0.0.1", taken.getsockname()[1])


def test_a_free_port_is_outside_the_range_of_automatic_ports() -> None:
    (port,) = free_ports(1)
    with (
        socket.socket() as other,
        socket.socket() as caller,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        for choosing in (other, caller):
            choosing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                choosing.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("=HH", port, port))
            except OSError:
                pytest.skip("before Linux 6.3 the kernel cannot be told which ports to choose from")
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", 0))
        with pytest.raises(OSError, match="Cannot assign"):
            caller.connect(server.getsockname())


def test_a_child_keeps_only_the_end_of_its_log_for_messages(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        script = "for number in range(5000): print('line', number)"
        child: Child = fleet.start("chatty", [sys.executable, "-S", "-c", script])
        fleet.wait_exit(WAIT_S)
        assert child.log_tail(2) == "line 4998\nline 4999"
