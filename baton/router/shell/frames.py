"""Messages between the coordinator and a worker: MessagePack, each after its length, on a socket pair."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import msgspec

from baton.http.rate_limits import Verdict
from baton.router.fleet.event_log import Happened
from baton.router.fleet.notes import Note
from baton.router.request.timeline import RequestTimeline
from baton.router.shell.metrics import Samples
from baton.router.values.settings import RouterSettings

LENGTH_BYTES = 4
# Maximum age of the others' load, on each of the two ways: worker to coordinator, and back.
LOAD_EVERY_S = 0.005
UNREAD_BYTES_MAX = 64 << 20  # The other side does not read any more: it hangs.


class _Frame(msgspec.Struct, frozen=True, array_like=True): ...


class Welcome(_Frame, frozen=True, tag="Welcome"):
    """The first frame that the coordinator sends to a worker."""

    settings: RouterSettings
    host: str
    port: int
    # Whether the coordinator has an admin port; else workers pass the administrator's requests on.
    has_admin_port: bool
    log_config: dict[str, Any]
    history: list[Note]
    index_path: str | None = None  # Path of the index process's socket.


class Listening(_Frame, frozen=True, tag="Listening"):
    """A worker reports that it accepts connections."""


class Drain(_Frame, frozen=True, tag="Drain"):
    """The coordinator tells a worker to refuse new requests, and to end after the running ones."""

    timeout_s: float


class EndRequests(_Frame, frozen=True, tag="EndRequests"):
    """The coordinator tells a worker that drains to end its requests at once."""


class LookAtFiles(_Frame, frozen=True, tag="LookAtFiles"):
    """The coordinator tells a worker to read again the files that have changed."""


class Fault(_Frame, frozen=True, tag="Fault"):
    """The coordinator tells a worker that the router is broken; /health reports this."""

    why: str


class Collect(_Frame, frozen=True, tag="Collect"):
    """The coordinator asks a worker for its metrics."""


class Collected(_Frame, frozen=True, tag="Collected"):
    samples: Samples


class Recall(_Frame, frozen=True, tag="Recall"):
    """The coordinator asks a worker for its last requests with this id. None: all."""

    number: int
    request_id: str | None


class Recalled(_Frame, frozen=True, tag="Recalled"):
    number: int
    timelines: list[RequestTimeline]


class Asks(_Frame, frozen=True, tag="Asks"):
    """A worker passes on an administrator's request, whose key has been checked."""

    number: int
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Answers(_Frame, frozen=True, tag="Answers"):
    number: int
    status: int
    headers: dict[str, str]
    body: bytes


class Charges(_Frame, frozen=True, tag="Charges"):
    """A worker asks to count a request against its tenant's limits."""

    number: int
    tenant: str
    num_prompt_tokens: int


class Charged(_Frame, frozen=True, tag="Charged"):
    number: int
    verdict: Verdict


Frame: TypeAlias = (
    Welcome
    | Listening
    | Drain
    | EndRequests
    | LookAtFiles
    | Fault
    | Collect
    | Collected
    | Recall
    | Recalled
    | Asks
    | Answers
    | Charges
    | Charged
    | Note
    | Happened
)

_decoder = msgspec.msgpack.Decoder(Frame)


# The parent obeys a signal to the process group, or one that systemd sends to the service.
_SIGNALS_OF_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BOOTSTRAP = f"""
import importlib, json, signal, sys
for number in {[int(number) for number in _SIGNALS_OF_PARENT]}:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
sys.path[:] = json.loads(sys.argv[1])
importlib.import_module(sys.argv[2]).main(int(sys.argv[3]))
"""


class Process:
    """A child of this process. Used in one event loop."""

    def __init__(self, child: "subprocess.Popen[bytes]") -> None:
        self._child, self._loop = child, asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._descriptor = os.pidfd_open(child.pid)
        self._loop.add_reader(self._descriptor, self._reap)

    def _reap(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._ended.set_result(self._child.wait())

    async def wait(self) -> int:
        """Return the exit status: minus the signal's number if a signal ended it."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """Kill the process. If it has ended, nothing happens."""
        self._child.kill()


async def start_process(module: str, stream: "FrameStream") -> Process:
    """Start a Python process that runs the module's `main(descriptor)` with the other end of `stream`.

    The child starts with its parent's signals blocked, until it ignores them: else a signal during its
    imports would end it. `asyncio.create_subprocess_exec` cannot do this: uvloop gives a child an empty mask.
    Raises OSError.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        await asyncio.get_running_loop().create_unix_connection(lambda: stream, sock=ours)
        return Process(_spawn(module, theirs.fileno()))


def _spawn(module: str, descriptor: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), module, str(descriptor)]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_OF_PARENT)
    try:
        return subprocess.Popen(command, pass_fds=[descriptor], stdin=subprocess.DEVNULL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class FrameStream(asyncio.Protocol):
    """One end of a socket between two of our processes."""

    def __init__(
        self,
        on_frame: Callable[[Any], None],
        on_lost: Callable[[], None],
        decode: Callable[[bytes], Any] = _decoder.decode,
    ) -> None:
        self._on_frame, self._on_lost, self._decode = on_frame, on_lost, decode
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()

    def send(self, frame: msgspec.Struct) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        payload = msgspec.msgpack.encode(frame)
        self._transport.write(len(payload).to_bytes(LENGTH_BYTES, "little") + payload)
        if self._transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's have another base.

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._received[:LENGTH_BYTES], "little")
            if len(self._received) < end:
                return
            payload = bytes(self._received[LENGTH_BYTES:end])
            del self._received[:end]
            self._on_frame(self._decode(payload))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()
