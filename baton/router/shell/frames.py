"""Messages between the coordinator and a worker: MessagePack, each after its length, on a socket pair."""

import asyncio
import json
import socket
import sys
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import msgspec

from baton.http.rate_limits import Verdict
from baton.router.event_log import Happened
from baton.router.notes import Note
from baton.router.settings import RouterSettings
from baton.router.shell.metrics import Samples
from baton.router.timeline import RequestTimeline

LENGTH_BYTES = 4
LOAD_EVERY_S = 0.005  # At most: how old a picture of the others' load may be, on each of the two ways.
UNREAD_BYTES_MAX = 64 << 20  # The other side does not read any more: it hangs.


class _Frame(msgspec.Struct, frozen=True, array_like=True): ...


class Welcome(_Frame, frozen=True, tag="Welcome"):
    """To a worker, once, as the first frame."""

    settings: RouterSettings
    host: str
    port: int
    has_admin_port: bool  # In the coordinator; else workers pass the administrator's requests on.
    log_config: dict[str, Any]
    history: list[Note]
    index_path: str | None = None  # Of the index process's socket.


class Listening(_Frame, frozen=True, tag="Listening"):
    """From a worker that accepts connections."""


class Drain(_Frame, frozen=True, tag="Drain"):
    """To a worker: serve no new requests, and end when the running ones have."""

    timeout_s: float


class EndRequests(_Frame, frozen=True, tag="EndRequests"):
    """To a worker that drains: at once."""


class Fault(_Frame, frozen=True, tag="Fault"):
    """To a worker: the router is broken, as /health has to say."""

    why: str


class Collect(_Frame, frozen=True, tag="Collect"):
    """To a worker: send your metrics."""


class Collected(_Frame, frozen=True, tag="Collected"):
    samples: Samples


class Recall(_Frame, frozen=True, tag="Recall"):
    """To a worker: send the last requests with this id. None: all."""

    number: int
    request_id: str | None


class Recalled(_Frame, frozen=True, tag="Recalled"):
    number: int
    timelines: list[RequestTimeline]


class Asks(_Frame, frozen=True, tag="Asks"):
    """From a worker: an administrator's request, whose key has been checked."""

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
    """From a worker: a request to be counted against its tenant's limits."""

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


_BOOTSTRAP = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).main(int(sys.argv[3]))"
)


async def start_process(module: str, stream: "FrameStream") -> asyncio.subprocess.Process:
    """A Python process that runs the module's `main(descriptor)`: with the other end of `stream`.

    Raises OSError.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        await asyncio.get_running_loop().create_unix_connection(lambda: stream, sock=ours)
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), module, str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
        )


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
