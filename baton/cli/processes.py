"""Child processes that are watched, logged and always ended.

    with Fleet(log_folder) as fleet:
        child = fleet.start("decode-0", [sys.executable, ...])
        fleet.wait_ready({child: "http://127.0.0.1:8200/health"}, timeout_s=60)
        fleet.wait_exit(None)           # the first child that ends
                                        # leaving the block ends all of them, and their children

Children end in three ways: leaving the block sends SIGTERM, then SIGKILL to each child's whole process group;
the kernel ends children whose parent was killed with -9 (`with_parent.py`); processes that children start end
by their own means (`baton.engine.process.child`). The thread that starts a child must live as long as the
child, because Linux treats the end of that thread as the end of the parent.
"""

import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Self

import httpx

from baton.core.errors import BatonError

STOP_GRACE_S = 8.0  # Time from SIGTERM to SIGKILL; an engine needs below a second, a busy machine more.
READY_POLL_S = 0.1
HEALTH_TIMEOUT_S = 2.0
LOG_TAIL_LINES = 20
_TAIL_BYTES = 16 << 10
_LOOPBACK = "127.0.0.1"

_WITH_PARENT = Path(__file__).with_name("with_parent.py")


class ChildDied(BatonError):
    """A child ended unexpectedly. The message has its name, exit status and the end of its log."""

    def __init__(self, child: "Child") -> None:
        tail = child.log_tail()
        details = f"; the end of {child.log_path}:\n{tail}" if tail else f"; {child.log_path} is empty"
        super().__init__(f"{child.name} {child.describe_exit()}{details}")
        self.child = child


class StartTimeout(BatonError):
    """Children did not become ready in time."""


class Stopped(BatonError):
    """This program got a signal to end (SIGTERM, SIGHUP)."""


class Child:
    """One process, leader of its own process group, with its output in a file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log_path: Path,
        keeps_log: bool = False,
    ) -> None:
        """`keeps_log`: append to the file."""
        self.name = name
        self.command = command
        self.env = env
        self.log_path = log_path
        with log_path.open("ab" if keeps_log else "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_WITH_PARENT), str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(env),
                process_group=0,  # Ctrl-C in a terminal reaches only us; we stop the children in order.
            )
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._is_reaped = False

    def fileno(self) -> int:
        """Return a descriptor that is readable once the process has ended."""
        return self._pidfd

    def has_ended(self) -> bool:
        return self._is_reaped or bool(select.select([self._pidfd], [], [], 0)[0])

    def exit_status(self) -> int:
        """Return the status as `subprocess` does: minus the signal's number if a signal ended the process."""
        assert self.has_ended()
        if self._is_reaped:
            return self._process.returncode
        # Left as a zombie, so that its process group's number is not reused.
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        assert result is not None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    def describe_exit(self) -> str:
        status = self.exit_status()
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with exit status {status}"

    def log_tail(self, num_lines: int = LOG_TAIL_LINES) -> str:
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - _TAIL_BYTES))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-num_lines:])

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it has ended."""
        if not self._is_reaped:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def reap(self) -> None:
        """End the rest of the process group and release it. Idempotent."""
        if self._is_reaped:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._is_reaped = True
        os.close(self._pidfd)


class Fleet:
    """Children that start and end together. `env`: their environment; ours by default."""

    def __init__(
        self, log_folder: Path, *, env: Mapping[str, str] | None = None, stop_grace_s: float = STOP_GRACE_S
    ) -> None:
        self.log_folder = log_folder
        self._env = dict(os.environ if env is None else env)
        self.children: list[Child] = []
        self._stop_grace_s = stop_grace_s
        log_folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> Child:
        """Start a child. `env` is added to the fleet's."""
        log_path = self.log_folder / f"{name}.log"
        child = Child(name, command, env={**self._env, **(env or {})}, log_path=log_path)
        self.children.append(child)
        return child

    def start_again(self, ended: Child) -> Child:
        """Start an ended and forgotten child again with the same command. Its log continues in the same
        file.
        """
        assert ended not in self.children
        child = Child(ended.name, ended.command, env=ended.env, log_path=ended.log_path, keeps_log=True)
        self.children.append(child)
        return child

    def forget(self, child: Child) -> None:
        """Remove a child whose end was expected or handled."""
        assert child.has_ended()
        self.children.remove(child)
        child.reap()

    def wait_exit(self, timeout_s: float | None) -> Child | None:
        """Return the first child that has ended; None after the timeout."""
        ended, _, _ = select.select(self.children, [], [], timeout_s)
        return ended[0] if ended else None

    def wait_ready(
        self,
        health_urls: Mapping[Child, str],
        *,
        timeout_s: float,
        on_ready: Callable[[Child], None] = lambda child: None,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        """Wait until every URL answers 200. `verify`: httpx's.

        Raises ChildDied at once if any child ends, StartTimeout after the timeout.
        """
        deadline_s = time.monotonic() + timeout_s
        waiting = dict(health_urls)
        with httpx.Client(timeout=HEALTH_TIMEOUT_S, trust_env=False, verify=verify) as client:
            while waiting:
                for child, url in list(waiting.items()):
                    if _is_healthy(client, url):
                        del waiting[child]
                        on_ready(child)
                if not waiting:
                    return
                if ended := self.wait_exit(READY_POLL_S):
                    raise ChildDied(ended)
                if time.monotonic() > deadline_s:
                    late = next(iter(waiting))
                    raise StartTimeout(
                        f"{', '.join(child.name for child in waiting)} not ready after {timeout_s:.0f} s; "
                        f"the end of {late.log_path}:\n{late.log_tail()}"
                    )

    def stop(self) -> None:
        """Ask all to end, last started first; end those that do not. Idempotent."""
        children = list(reversed(self.children))
        self.children.clear()
        deadline_s = time.monotonic() + self._stop_grace_s
        try:
            for child in children:
                child.send_signal(signal.SIGTERM)
            running = [child for child in children if not child.has_ended()]
            while running and (left_s := deadline_s - time.monotonic()) > 0:
                select.select(running, [], [], left_s)
                running = [child for child in running if not child.has_ended()]
        finally:
            for child in children:  # Also if a second Ctrl-C interrupts the grace period.
                child.reap()


def _is_healthy(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx.HTTPError:
        return False


def free_ports(count: int) -> list[int]:
    """Return different free loopback TCP ports that the kernel gives to no other program for a minute.

    While a connection at a port is in TIME_WAIT (RFC 9293), the kernel does not choose that port for a
    bind to port 0 or for an outgoing connection; a server that binds it by number with SO_REUSEADDR gets
    it. Later another program may take it before our child does; the child then ends with an error.
    """
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server((_LOOPBACK, 0))) for _ in range(count)]
        for listener in listeners:
            with socket.create_connection(listener.getsockname()) as caller:
                listener.accept()[0].close()
                caller.recv(1)  # The end of the stream: the side that closes first is in TIME_WAIT.
        return [listener.getsockname()[1] for listener in listeners]


def is_port_free(host: str, port: int) -> bool:
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # The server sets it, too.
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


@contextmanager
def raising_on_stop_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise `Stopped` in the block, as Ctrl-C raises KeyboardInterrupt."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(signal.Signals(number).name)

    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, stop) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
