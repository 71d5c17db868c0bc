"""Child processes of an engine: connected to their parent by one socket, and ended with it.

    parent  Child.spawn("package.module:function")      child  function(socket)
      |<------------------- socket pair ----------------------->|
      |  end of stream: the child has ended                      |  end of stream: the parent has ended

A child learns of its parent's death in three ways: the end of the stream where it reads it, a thread that
waits for that end (a busy child ends after `grace_s`), and on Linux a signal from the kernel. The signal is
SIGKILL, which also ends a child that holds the GIL, or SIGCONT, which wakes a stopped child (SIGSTOP).

A child that leads a process group ends the whole group with itself, for example the processes of Ray.

The child is a plain interpreter. `multiprocessing`'s spawn would run the user's main module again in each
child.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass

logger = logging.getLogger(__name__)

PARENT_GONE = 70  # Exit status of a child that outlived its parent; EX_SOFTWARE.
KILL_WAIT_S = 10.0  # The kernel ends a killed process at once, unless it is in a driver.
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15

_BOOTSTRAP = (
    "import json, sys; arguments = json.loads(sys.argv[1]); sys.path[:] = arguments.pop('path'); "
    "from baton.engine.process.child import run; run(**arguments)"
)


@dataclass(slots=True)
class Child:
    """A child process and the parent's end of its socket."""

    name: str
    process: subprocess.Popen[bytes]
    socket: socket.socket  # The parent's end.
    leads_group: bool = False

    @classmethod
    def spawn(
        cls,
        target: str,
        *,
        name: str,
        grace_s: float,
        environment: Mapping[str, str],
        dies_with_thread: bool = False,
        leads_group: bool = False,
    ) -> Child:
        """Start a child that runs `target` ("package.module:function") with its end of the socket.

        `environment` is added to the parent's. `dies_with_thread`: Linux kills the child when the calling
        *thread* ends. Without it, Linux wakes the child then, which does not affect a running child.
        """
        ours, theirs = socket.socketpair()
        with ExitStack() as stack, theirs:
            stack.callback(ours.close)
            arguments = {
                "path": [os.path.abspath(entry) for entry in sys.path],
                "target": target,
                "name": name,
                "fd": theirs.fileno(),
                "parent_pid": os.getpid(),
                "grace_s": grace_s,
                "dies_with_thread": dies_with_thread,
                "leads_group": leads_group,
                "log_level": logging.getLogger().getEffectiveLevel(),
            }
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **environment},
                process_group=0 if leads_group else None,
            )
            stack.pop_all()
        return cls(name, process, ours, leads_group)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def describe_exit(self) -> str:
        """Text for messages, after the end of the stream."""
        try:
            status = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return f"{self.name} closed its connection"
        if status < 0:
            return f"{self.name} was ended by {signal.Signals(-status).name}"
        return f"{self.name} ended with exit status {status}"

    def resume(self) -> None:
        """Wake the child if it is stopped (SIGSTOP), so that it handles its messages."""
        self.process.send_signal(signal.SIGCONT)

    def stop(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the child to end, then kill it. Idempotent."""
        try:
            self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("%s did not end within %.0f s; killing it", self.name, timeout_s)
            self.process.kill()
            self.process.wait(timeout=KILL_WAIT_S)
        self._clear_up()

    def kill(self) -> None:
        """Kill the child. Idempotent."""
        self.process.kill()
        self.process.wait(timeout=KILL_WAIT_S)
        self._clear_up()

    def _clear_up(self) -> None:
        """Kill the rest of the child's process group."""
        if self.leads_group:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.leads_group = False  # The system may reuse the number from now on.
        self.socket.close()


def run(
    *,
    target: str,
    name: str,
    fd: int,
    parent_pid: int,
    grace_s: float,
    dies_with_thread: bool,
    leads_group: bool,
    log_level: int,
) -> None:
    """The child's first call."""
    logging.basicConfig(level=log_level, format=f"%(asctime)s %(levelname)s {name} %(name)s: %(message)s")
    # Ctrl-C reaches the whole terminal group; the parent decides what the child does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The kernel sends SIGHUP and SIGCONT to a group with stopped members when its parent dies. The child then
    # ends in order.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    signal_parents_death(signal.SIGKILL if dies_with_thread else signal.SIGCONT)
    if os.getppid() != parent_pid:
        os._exit(PARENT_GONE)  # The parent died before the signal was requested.
    follow = (os.dup(fd), grace_s, leads_group)
    threading.Thread(target=_follow_parent, args=follow, name="parent", daemon=True).start()
    module_name, _, function_name = target.partition(":")
    function: Callable[[socket.socket], None] = getattr(importlib.import_module(module_name), function_name)
    with end:
        function(end)


def signal_parents_death(number: signal.Signals) -> None:
    """Make the kernel send this process a signal when the thread that started it ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def _follow_parent(fd: int, grace_s: float, leads_group: bool) -> None:
    """End this process, or its group, `grace_s` after its parent. Runs in a daemon thread."""
    poll = select.poll()
    poll.register(fd, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
    poll.poll()
    threading.Event().wait(grace_s)
    if leads_group:
        os.killpg(0, signal.SIGKILL)
    os._exit(PARENT_GONE)
