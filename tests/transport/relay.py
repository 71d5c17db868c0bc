"""A relay between a control channel and its peer that changes bytes in transit."""

import socket
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tests.tcp_proxy import Run, TcpProxy


class Piece(NamedTuple):
    """What one `recv` returned."""

    content: bytes
    way: str  # "forth": from the side that connects. "back": to it.
    num_before: int  # Bytes of this connection and way before the piece.
    source: socket.socket


class Relay(TcpProxy):
    """Forwards the bytes of each connection; `change` returns what is sent in place of a piece."""

    def __init__(
        self, target: int, change: Callable[[Piece], list[bytes]] = lambda piece: [piece.content]
    ) -> None:
        self.change = change
        super().__init__(target)
        self.url = f"tcp://127.0.0.1:{self.port}"

    def ways(self, client: socket.socket, server: socket.socket) -> tuple[Run, Run]:
        return partial(self._pass_on, "forth", client, server), partial(self._pass_on, "back", server, client)

    def _pass_on(self, way: str, source: socket.socket, sink: socket.socket) -> None:
        num_before = 0
        while content := source.recv(65536):
            for changed in self.change(Piece(content, way, num_before, source)):
                sink.sendall(changed)
            num_before += len(content)


def flipped(content: bytes, at: int) -> bytes:
    changed = bytearray(content)
    changed[at % len(changed)] ^= 4
    return bytes(changed)
