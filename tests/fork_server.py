"""Fork server: starts Baton's programs as forks of a process that has imported torch and Baton.

    subprocess.Popen([python, "-m", "baton.cli", ...])  --request-->  server  --fork, fork-->  program
      |<---------------------------------- pid, by wait and signals ----------------------------|

Most of the processor time of a start is imports: 1.7 s for torch in each core and rank, 0.7 s for the HTTP
server. Tests that use the fixture `forked_programs` do not pay it. The others start real interpreters.

The program is a child of the process that asked for it, as without the server: that process is the subreaper
(prctl(2)) while the server forks twice, so it adopts the program when the process between them ends. The
program has its own environment, folder, descriptors, process group and standard streams. A program that
starts others has a server of its own, a fork of this one. A server has one thread, never uses CUDA and ends
with its parent.

Not as in a real start: /proc shows the server's command line and environment, and the hash seed is shared.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from baton.cli import processes
from baton.engine.process import child
from baton.router.shell import frames

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
NAME = "fork-server"  # The process's name.
LENGTH_BYTES = 8
DESCRIPTORS_MAX = 64
ROOT = Path(__file__).parents[1]

# Workers of `baton.http` are not among them: torch would not leave them enough of their memory limit.
_BOOTSTRAPS = (child._BOOTSTRAP, frames._BOOTSTRAP)
_IMPORTS = (
    "baton.assemble",
    "baton.cli.demo",
    "baton.cli.model",
    "baton.cli.route",
    "baton.cli.serve",
    "baton.cli.up",
    "baton.engine.core.core_process",
    "baton.engine.executor.worker",
    "baton.router.processes.app",
    "baton.server.run",
    "uvloop",
)

_libc = ctypes.CDLL(None, use_errno=True)
start_interpreter = subprocess._fork_exec


class Request(NamedTuple):
    arguments: list[str]  # Arguments after the interpreter.
    targets: list[int]  # The program's descriptors.
    folder: str
    environment: dict[bytes, bytes]
    signals_blocked: set[int]
    is_session: bool
    process_group: int
    parent: int
    dies_with_parent: bool


class ForkServer:
    """The caller's end of a server."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()

    def start(self, request: Request, descriptors: Sequence[int]) -> int:
        """Start the program; return its process id."""
        payload = pickle.dumps(request)
        with self._lock:
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [len(payload).to_bytes(LENGTH_BYTES, "little")], descriptors)
                self._socket.sendall(payload)
                return int.from_bytes(_receive(self._socket, LENGTH_BYTES), "little")
            finally:
                _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


_server: ForkServer | None = None


@contextmanager
def forking_programs() -> Iterator[None]:
    """Start Baton's programs by a fork server in this block, on Linux. It is kept for the next block."""
    if sys.platform != "linux":
        yield
        return
    _follow(_server or _first_server())
    try:
        yield
    finally:
        subprocess._fork_exec = start_interpreter


def _first_server() -> ForkServer:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-c", "from tests.fork_server import main; main()", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=ROOT)
    atexit.register(_end, ours, process)
    return ForkServer(ours)


def _end(end: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    end.close()
    process.wait()


def _fork_or_exec(
    args: Sequence[Any],
    executables: Any,
    close_fds: bool,
    kept: tuple[int, ...],
    cwd: Any,
    env: list[bytes] | None,
    p2cread: int,
    p2cwrite: int,
    c2pread: int,
    c2pwrite: int,
    errread: int,
    errwrite: int,
    errpipe_read: int,
    errpipe_write: int,
    restore_signals: bool,
    start_new_session: bool,
    process_group: int,
    *others: Any,
) -> int:
    """Replacement of `_posixsubprocess.fork_exec`, with its arguments."""
    command = [os.fsdecode(arg) for arg in args]
    with_parent = [sys.executable, "-I", "-S", str(processes._WITH_PARENT), str(os.getpid())]
    if dies_with_parent := command[:5] == with_parent:
        command = command[5:]
    is_ours = command[:3] == [sys.executable, "-m", "baton.cli"] or (
        command[:2] == [sys.executable, "-c"] and command[2] in _BOOTSTRAPS
    )
    environment = dict(os.environb) if env is None else dict(map(_split, env))
    is_ours &= close_fds and _settings(environment) == _SETTINGS
    if _server is None or not is_ours:
        return int(
            start_interpreter(
                args, executables, close_fds, kept, cwd, env, p2cread, p2cwrite, c2pread, c2pwrite,
                errread, errwrite, errpipe_read, errpipe_write, restore_signals, start_new_session,
                process_group, *others,
            )
        )  # fmt: skip
    streams = [given if given != -1 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
    passed = [descriptor for descriptor in kept if descriptor != errpipe_write]
    request = Request(
        arguments=command[1:],
        targets=[0, 1, 2, *passed],
        folder=os.fsdecode(cwd) if cwd is not None else os.getcwd(),
        environment=environment,
        signals_blocked=set(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        is_session=start_new_session,
        process_group=process_group,
        parent=os.getpid(),
        dies_with_parent=dies_with_parent,
    )
    return _server.start(request, [errpipe_write, *streams, *passed])


def _settings(environment: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Variables that the interpreter, the loader and the C library read only when a process starts."""
    prefixes = (b"PYTHON", b"LD_", b"GLIBC_", b"MALLOC_")
    return {
        name: value
        for name, value in environment.items()
        # Ray's import sets PYTHONBREAKPOINT; `_run` reads PYTHONPATH.
        if name.startswith(prefixes) and name not in (b"PYTHONBREAKPOINT", b"PYTHONPATH")
    }


_SETTINGS = _settings(os.environb)  # The server has them, too.


def _split(entry: bytes) -> tuple[bytes, bytes]:
    name, _, value = entry.partition(b"=")
    return name, value


def main() -> None:
    """The server: its arguments are the descriptor of its end."""
    for name in _IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # No collection touches what the forks share.
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads"
    _serve(socket.socket(fileno=int(sys.argv[1])))


def _serve(end: socket.socket) -> NoReturn:
    """Serve until the caller ends."""
    _libc.prctl(PR_SET_NAME, NAME.encode(), 0, 0, 0)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        length, descriptors, _, _ = socket.recv_fds(end, LENGTH_BYTES, DESCRIPTORS_MAX)
        if not length:
            os._exit(0)
        request: Request = pickle.loads(_receive(end, int.from_bytes(length, "little")))
        pid_read, pid_written = os.pipe()
        is_adopted, holds = os.pipe()
        if (between := os.fork()) == 0:
            if (pid := os.fork()) != 0:
                os.write(pid_written, pid.to_bytes(LENGTH_BYTES, "little"))
                os._exit(0)
            os.close(holds)
            os.read(is_adopted, 1)
            end.close()
            _run(request, descriptors)
        os.waitpid(between, 0)
        end.sendall(os.read(pid_read, LENGTH_BYTES))
        for descriptor in (pid_read, pid_written, is_adopted, holds, *descriptors):
            os.close(descriptor)


def _run(request: Request, descriptors: list[int]) -> NoReturn:
    """Run the program in this process, which is the fork."""
    if os.getppid() != request.parent:
        os._exit(child.PARENT_GONE)
    _libc.prctl(PR_SET_NAME, b"python", 0, 0, 0)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL if request.dies_with_parent else 0, 0, 0, 0)
    if request.is_session:
        os.setsid()
    elif request.process_group != -1:
        os.setpgid(0, request.process_group)
    above = max(*request.targets, *descriptors) + 1
    ready, *given = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in descriptors]
    for descriptor, target in zip(given, request.targets, strict=True):
        os.dup2(descriptor, target)
    _close_all_but({ready, *request.targets})
    os.chdir(request.folder)
    os.environb.clear()
    os.environb.update(request.environment)
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in folders if folder and folder not in sys.path]
    _follow(_start_server() if _starts_others(request.arguments) else None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.signals_blocked)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.close(ready)
    status = _status_of(request.arguments)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


def _status_of(arguments: list[str]) -> int:
    """The exit status of the program. `arguments`: of the interpreter, -c or -m first."""
    option, program, *others = arguments
    sys.argv[:] = [option, *others]
    sys.path[0] = os.getcwd() if option == "-m" else ""
    try:
        if option == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = ModuleType("__main__")
            exec(program, sys.modules["__main__"].__dict__)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _starts_others(arguments: list[str]) -> bool:
    return arguments[0] == "-m" or "core_process" in arguments[2]


def _start_server() -> ForkServer:
    """The server of this program, a fork of it."""
    ours, theirs = socket.socketpair()
    if os.fork() != 0:
        theirs.close()
        return ForkServer(ours)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    ours.close()
    _close_all_but({0, 1, 2, theirs.fileno()})
    _serve(theirs)


def _follow(server: ForkServer | None) -> None:
    """Start this process's programs by `server`; None: as interpreters."""
    global _server
    _server = server
    subprocess._fork_exec = start_interpreter if server is None else _fork_or_exec


def _close_all_but(kept: set[int]) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept:
            with suppress(OSError):  # The listing's own has gone.
                os.close(descriptor)


def _receive(end: socket.socket, num_bytes: int) -> bytes:
    received = end.recv(num_bytes, socket.MSG_WAITALL)
    assert len(received) == num_bytes, "the fork server has ended"
    return received
