"""A TCP proxy on a loopback port, whose subclasses decide what each way of a connection forwards."""

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

TIMEOUT_S = 30.0
Run = Callable[[], None]


class TcpProxy(ABC):
    """Connects to the port `target` for each incoming connection."""

    def __init__(self, target: int = 0) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @abstractmethod
    def ways(self, client: socket.socket, server: socket.socket) -> tuple[Run, Run]:
        """What the two threads of a connection run. It ends with the first of them."""

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.target), timeout=TIMEOUT_S)

    def cut(self) -> None:
        """Ends all connections."""
        _shut(*self._ends)

    def close(self) -> None:
        _shut(self._listener)
        self._threads[0].join(TIMEOUT_S)
        self.cut()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
        for end in (self._listener, *self._ends):
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = self.connect()
                except OSError:
                    client.close()
                    continue
                for end in (client, server):
                    end.settimeout(None)
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._ends += [client, server]
                for run in self.ways(client, server):
                    self._threads.append(threading.Thread(target=_guard, args=(run, client, server)))
                    self._threads[-1].start()


def _guard(run: Run, *ends: socket.socket) -> None:
    with suppress(Exception):  # Either end is gone, or has sent nonsense after a change.
        run()
    _shut(*ends)


def _shut(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
