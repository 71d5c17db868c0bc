"""Frames between the processes of one router: MessagePack, each after its length, on a socket of their own.

Each end decodes the types that the other end may send. A frame of another type, or one that is too long, ends
the connection: the owner of the process replaces it, and a process whose parent is lost ends. Questions are
frames too: `FrameStream.ask` waits for the answer, up to a deadline.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar, cast

import msgspec

logger = logging.getLogger(__name__)

LENGTH_BYTES = 4
FRAME_BYTES_MAX = 64 << 20
UNREAD_BYTES_MAX = 64 << 20  # The other side does not read any more: it hangs.

Question = TypeVar("Question")
Value = TypeVar("Value")


class Asked(msgspec.Struct, Generic[Question], frozen=True, array_like=True, tag="Asked"):
    number: int
    question: Question


class Answered(msgspec.Struct, frozen=True, array_like=True, tag="Answered"):
    number: int
    value: msgspec.Raw


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


@asynccontextmanager
async def child(module: str, stream: "FrameStream") -> AsyncIterator[Process]:
    """Run a Python process with the module's `main(descriptor)` and the other end of `stream`. Kill it after.

    The child starts with its parent's signals blocked, until it ignores them: else a signal during its
    imports would end it. `asyncio.create_subprocess_exec` cannot do this: uvloop gives a child an empty mask.
    Raises OSError.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        await asyncio.get_running_loop().create_unix_connection(lambda: stream, sock=ours)
        process = Process(_spawn(module, theirs.fileno()))
    try:
        yield process
    finally:
        stream.close()
        process.kill()
        await process.wait()


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
        decode: Callable[[bytes], Any],
        on_frame: Callable[[Any], None],
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`decode`: raises MsgspecError for what the other side may not send. `on_frame` gets no answers."""
        self._decode, self._on_frame, self._on_lost = decode, on_frame, on_lost
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._asked: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._num_asked = 0

    def send(self, frame: msgspec.Struct) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        payload = msgspec.msgpack.encode(frame)
        self._transport.write(len(payload).to_bytes(LENGTH_BYTES, "little") + payload)
        if self._transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
            self._transport.abort()

    async def ask(self, question: msgspec.Struct, kind: type[Value], timeout_s: float) -> Value:
        """Return the answer of the other side. Raises TimeoutError, ConnectionError."""
        if self._transport is None:
            raise ConnectionError("the other process has ended")
        self._num_asked += 1
        number = self._num_asked
        answered: asyncio.Future[msgspec.Raw]
        answered = self._asked[number] = asyncio.get_running_loop().create_future()
        self.send(Asked(number, question))
        try:
            async with asyncio.timeout(timeout_s):
                return msgspec.msgpack.decode(await answered, type=kind)
        finally:
            del self._asked[number]

    def answer(self, asked: Asked[Any], value: Any) -> None:
        self.send(Answered(asked.number, msgspec.Raw(msgspec.msgpack.encode(value))))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's have another base.

    def data_received(self, data: bytes) -> None:
        self._received += data
        while self._transport is not None and len(self._received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._received[:LENGTH_BYTES], "little")
            if end > LENGTH_BYTES + FRAME_BYTES_MAX:
                return self._refuse(f"a frame of {end} bytes")
            if len(self._received) < end:
                return None
            payload = bytes(self._received[LENGTH_BYTES:end])
            del self._received[:end]
            try:
                frame = self._decode(payload)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                return self._refuse(str(error))
            if not isinstance(frame, Answered):
                self._on_frame(frame)
            elif (asked := self._asked.get(frame.number)) is not None and not asked.done():
                asked.set_result(frame.value)
        return None

    def _refuse(self, why: str) -> None:
        logger.error("another process of this router sent what it may not: %s; its connection is closed", why)
        if self._transport is not None:
            self._transport.abort()
        self._received.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(ConnectionError("the other process has ended"))
        self._on_lost()
