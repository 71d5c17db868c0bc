"""A TCP proxy in front of a real server, with faults that a test switches on while connections are open."""

import socket
from functools import partial
from typing import Literal

from tests.tcp_proxy import Run, TcpProxy

Fault = Literal["", "refuse", "hang", "cut"]
PIECE_BYTES = 4096


class FaultyProxy(TcpProxy):
    """`fault`: "" forwards; "refuse" closes at once; "hang" forwards nothing; "cut" ends after one piece."""

    fault: Fault = ""

    def connect(self) -> socket.socket:
        if self.fault == "refuse":
            raise ConnectionRefusedError
        return super().connect()

    def ways(self, client: socket.socket, server: socket.socket) -> tuple[Run, Run]:
        return partial(self._forward, client, server, False), partial(self._forward, server, client, True)

    def _forward(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        while piece := source.recv(PIECE_BYTES):
            if self.fault != "hang":
                target.sendall(piece)
            if self.fault == "cut" and is_answer:
                return
