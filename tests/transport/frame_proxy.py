"""A proxy between a tcp reader and its owner that changes frames in transit."""

import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from baton.transport.tcp.sealing import TAG_BYTES
from baton.transport.tcp.wire import ANSWER, COPY_BYTES, DATA, REQUEST, receive_exactly
from tests.tcp_proxy import Run, TcpProxy


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


class FrameProxy(TcpProxy):
    """A test sets `target` when the owner listens."""

    def __init__(self) -> None:
        self.tamper: Tamper = pass_on
        self.frames: list[Frame] = []  # Frames as received, before `tamper`.
        self._num_connections = 0
        super().__init__()

    def ways(self, client: socket.socket, server: socket.socket) -> tuple[Run, Run]:
        connection = _Connection(self, self._num_connections, client, server)
        self._num_connections += 1
        return connection.from_reader, connection.from_owner


class _Connection:
    def __init__(self, proxy: FrameProxy, index: int, reader: socket.socket, owner: socket.socket) -> None:
        self._proxy = proxy
        self._index = index
        self._reader = reader
        self._owner = owner
        self._due: deque[int] = deque()  # Sizes of the answers that the reader waits for.

    def from_reader(self) -> None:
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

    def from_owner(self) -> None:
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
