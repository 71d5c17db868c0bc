"""A TCP proxy in front of a real server, with faults that a test switches on while connections are open."""

import contextlib
import socket
import threading
from typing import Literal

Fault = Literal["", "refuse", "hang", "cut"]
PIECE_BYTES = 4096


class FaultyProxy:
    """`fault`: "" forwards; "refuse" closes at once; "hang" forwards nothing; "cut" ends after one piece."""

    def __init__(self, port: int) -> None:
        self.fault: Fault = ""
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.drop()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def drop(self) -> None:
        """Closes the open connections, so that the next request meets the fault from its beginning."""
        for one in self._sockets[1:]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        del self._sockets[1:]

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.fault == "refuse":
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [client, server]
            for source, target, is_answer in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._forward, args=(source, target, is_answer), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError), source, target:
            while piece := source.recv(PIECE_BYTES):
                if self.fault == "hang":
                    continue
                target.sendall(piece)
                if self.fault == "cut" and is_answer:
                    target.shutdown(socket.SHUT_RDWR)
                    return
            target.shutdown(socket.SHUT_WR)
