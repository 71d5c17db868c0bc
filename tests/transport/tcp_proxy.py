"""A proxy between a tcp reader and its owner that changes frames in transit."""

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from baton.transport.tcp.sealing import TAG_BYTES
from baton.transport.tcp.wire import ANSWER, COPY_BYTES, DATA, REQUEST, receive_exactly

TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Frame:
    connection: int
    kind: str  # "challenge", "hello", "welcome", "request" or "answer".
    number: int  # Index among the frames of this kind on this connection, from 0.
    content: bytes


Tamper = Callable[[Frame], list[bytes]]
"""The bytes sent in place of a frame. `END` ends the connection."""

END = b""


def pass_on(frame: Frame) -> list[bytes]:
    return [frame.content]


class FrameProxy:
    """Listens on `port`; connects to `target` for each incoming connection."""

    def __init__(self) -> None:
        self.tamper: Tamper = pass_on
        self.target = 0
        self.frames: list[Frame] = []  # Frames as received, before `tamper`.
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._num_connections = 0
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        _shut(self._listener)
        self._threads[0].join(TIMEOUT_S)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
        for sock in self._sockets:
            sock.close()

    def cut(self) -> None:
        """Resets all connections."""
        for sock in list(self._sockets):
            _shut(sock)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                reader, _ = self._listener.accept()
                try:
                    owner = socket.create_connection(("127.0.0.1", self.target), timeout=TIMEOUT_S)
                except OSError:
                    reader.close()
                    continue
                for sock in (reader, owner):
                    sock.settimeout(None)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets += [reader, owner]
                _Connection(self, self._num_connections, reader, owner).start(self._threads)
                self._num_connections += 1


class _Connection:
    def __init__(self, proxy: FrameProxy, index: int, reader: socket.socket, owner: socket.socket) -> None:
        self._proxy = proxy
        self._index = index
        self._reader = reader
        self._owner = owner
        self._due: deque[int] = deque()  # Sizes of the answers that the reader waits for.

    def start(self, threads: list[threading.Thread]) -> None:
        for run in (self._from_reader, self._from_owner):
            thread = threading.Thread(target=self._guard, args=(run,))
            threads.append(thread)
            thread.start()

    def _guard(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception:  # Either end is gone, or has sent nonsense after tampering.
            pass
        finally:
            _shut(self._reader)
            _shut(self._owner)

    def _from_reader(self) -> None:
        self._forward("hello", 0, _prefixed(self._reader), self._owner)
        number = 0
        while True:
            header = receive_exactly(self._reader, REQUEST.size)
            count = REQUEST.unpack(header)[1]
            body = receive_exactly(self._reader, count * COPY_BYTES + TAG_BYTES)
            copies = np.frombuffer(body[:-TAG_BYTES], dtype="<i8").reshape(-1, 2)
            self._due.append(int(copies[:, 1].sum()))
            self._forward("request", number, bytes(header + body), self._owner)
            number += 1

    def _from_owner(self) -> None:
        self._forward("challenge", 0, _prefixed(self._owner), self._reader)
        self._forward("welcome", 0, _prefixed(self._owner), self._reader)
        number = 0
        while True:
            header = receive_exactly(self._owner, ANSWER.size)
            nbytes = self._due.popleft() if ANSWER.unpack(header)[0] == DATA else 0
            rest = receive_exactly(self._owner, nbytes + TAG_BYTES)
            self._forward("answer", number, bytes(header + rest), self._reader)
            number += 1

    def _forward(self, kind: str, number: int, content: bytes, to: socket.socket) -> None:
        frame = Frame(self._index, kind, number, content)
        self._proxy.frames.append(frame)
        for changed in self._proxy.tamper(frame):
            if changed == END:
                raise ConnectionError
            to.sendall(changed)


def _prefixed(sock: socket.socket) -> bytes:
    length = receive_exactly(sock, 4)
    return bytes(length + receive_exactly(sock, int.from_bytes(length, "little")))


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
