"""Pool of worker processes for input whose cost has no bound: killed at a deadline, then replaced.

Threads do not help, because the JSON decoder and a template's loop hold the interpreter's lock. Processes
are started when they are first needed, kept, and end with the pool. A cancelled call kills its process.
"""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec

from baton.core.errors import BatonError, UserError

HEADER_BYTES = 8
NUM_WORKERS = 2  # A slow job leaves one for the others.
START_S = 60.0  # Time to start a Python process on a busy machine.
GRACE_S = 10.0  # Time beyond a job's processor time: the machine may be busy, or the worker stopped.
EXIT_S = 5.0  # Time from a worker's end of stream to its exit status.

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from baton.http.worker import main; main(int(sys.argv[2]))"
)


class WorkerTimeout(BatonError):
    """The job passed its deadline. Its process has been killed."""


class WorkerOutOfMemory(BatonError):
    """The job needed more memory than a worker may have."""


class WorkerFailed(BatonError):
    """The worker ended, or the job raised an exception that it should not raise."""


class Job(NamedTuple):
    target: str  # "package.module:function"; arguments and result are msgpack's types.
    processor_s: float


class JobResult(msgspec.Struct, array_like=True):
    kind: str  # value, user, memory or failed.
    value: Any
    field: str | None = None


def receive_exactly(stream: socket.socket, num_bytes: int) -> bytes:
    """Receive exactly this many bytes. Raises EOFError if the stream ends earlier."""
    received = bytearray(num_bytes)
    view = memoryview(received)
    while view:
        num = stream.recv_into(view)
        if num == 0:
            raise EOFError
        view = view[num:]
    return bytes(received)


class _Worker:
    """One process and the socket to it. Blocks: used from the pool's threads."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
        except BaseException:
            ours.close()
            raise
        self._stream = ours
        self.has_ended = False

    def run(self, job: Job, arguments: Sequence[Any], *, extra_s: float = GRACE_S) -> Any:
        """Run one job. Raises UserError as the job does, WorkerTimeout, WorkerOutOfMemory or WorkerFailed."""
        payload = msgspec.msgpack.encode((job.target, job.processor_s, list(arguments)))
        try:
            self._stream.settimeout(job.processor_s + extra_s)
            self._stream.sendall(len(payload).to_bytes(HEADER_BYTES, "little") + payload)
            length = int.from_bytes(receive_exactly(self._stream, HEADER_BYTES), "little")
            answer = msgspec.msgpack.decode(receive_exactly(self._stream, length), type=JobResult)
        except TimeoutError:
            self.end()
            raise WorkerTimeout(f"took more than {job.processor_s:g} s") from None
        except (OSError, EOFError, msgspec.MsgspecError):
            if (status := self.end(wait_s=EXIT_S)) == -signal.SIGPROF:
                raise WorkerTimeout(f"took more than {job.processor_s:g} s") from None
            raise WorkerFailed(f"a worker process ended with status {status}") from None
        match answer.kind:
            case "value":
                return answer.value
            case "user":
                raise UserError(answer.value, field=answer.field)
            case "memory":
                self.end()
                raise WorkerOutOfMemory("needs more memory than a worker process may have")
            case _:
                raise WorkerFailed(answer.value)

    def end(self, *, wait_s: float = 0.0) -> int:
        """Return the exit status; kill the process if it has not ended within `wait_s`. Idempotent."""
        try:
            status = self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self._stream.close()
        self.has_ended = True
        return status


class _Call:
    """One job in the pool, from `run` to its end in a thread."""

    def __init__(self) -> None:
        self.worker: _Worker | None = None
        self.is_cancelled = False


class WorkerPool:
    """Owns the processes and the threads that wait for them; `close` ends both."""

    def __init__(self, size: int = NUM_WORKERS) -> None:
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="worker")
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._is_closed = False

    async def run(self, job: Job, *arguments: Any) -> Any:
        """Run a job in a worker and return its result.

        Raises UserError as the job does, WorkerTimeout, WorkerOutOfMemory or WorkerFailed.
        """
        call = _Call()
        try:
            return await asyncio.wrap_future(self._threads.submit(self._run, call, job, arguments))
        except asyncio.CancelledError:
            with self._lock:
                call.is_cancelled = True
                if call.worker is not None:
                    call.worker.process.kill()
            raise

    def _run(self, call: _Call, job: Job, arguments: Sequence[Any]) -> Any:
        worker = self._take(call)
        try:
            return worker.run(job, arguments)
        finally:
            with self._lock:
                call.worker = None
                self._busy.discard(worker)
                is_kept = not (worker.has_ended or call.is_cancelled or self._is_closed)
                if is_kept:
                    self._idle.append(worker)
            if not is_kept:
                worker.end()

    def _take(self, call: _Call) -> _Worker:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None or worker.process.poll() is not None:
            worker = _Worker()
            worker.run(_READY, (), extra_s=START_S)
        with self._lock:
            if call.is_cancelled or self._is_closed:
                is_wanted = False
            else:
                is_wanted, call.worker = True, worker
                self._busy.add(worker)
        if not is_wanted:
            worker.end()
            raise WorkerFailed("the job was cancelled")
        return worker

    def close(self) -> None:
        """Kill the processes; running jobs fail. Idempotent."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for worker in self._busy:
                worker.process.kill()
        for worker in idle:
            worker.end()
        self._threads.shutdown(wait=True, cancel_futures=True)


def ready() -> None:
    """Do nothing: each worker's first job, so that its start does not count against a request's deadline."""


_READY = Job("baton.http.workers:ready", START_S)
