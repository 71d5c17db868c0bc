"""A relay between a control channel and its peer that changes bytes in transit."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

TIMEOUT_S = 30.0


class Piece(NamedTuple):
    """What one `recv` returned."""

    content: bytes
    way: str  # "forth": from the side that connects. "back": to it.
    num_before: int  # Bytes of this connection and way before the piece.
    source: socket.socket


class Relay:
    """Forwards the bytes of each connection; `change` returns what is sent in place of a piece."""

    def __init__(
        self, target: int, change: Callable[[Piece], list[bytes]] = lambda piece: [piece.content]
    ) -> None:
        self.change = change
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        _shut(self._listener)
        self._threads[0].join(TIMEOUT_S)
        _shut(*self._ends)
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
        for end in (self._listener, *self._ends):
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(("127.0.0.1", self._target), timeout=TIMEOUT_S)
                there.settimeout(None)
                self._ends += [here, there]
                for way, source, sink in (("forth", here, there), ("back", there, here)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=(way, source, sink)))
                    self._threads[-1].start()

    def _pass_on(self, way: str, source: socket.socket, sink: socket.socket) -> None:
        num_before = 0
        with suppress(OSError):
            while content := source.recv(65536):
                for changed in self.change(Piece(content, way, num_before, source)):
                    sink.sendall(changed)
                num_before += len(content)
        _shut(source, sink)


def flipped(content: bytes, at: int) -> bytes:
    changed = bytearray(content)
    changed[at % len(changed)] ^= 4
    return bytes(changed)


def _shut(*sockets: socket.socket) -> None:
    for end in sockets:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
