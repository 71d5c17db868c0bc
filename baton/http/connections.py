"""uvicorn server with limits and deadlines for connections.

uvicorn alone only ends a connection that is idle after an answer. A connection of this server must also
send its headers within `header_s` after it was opened or became idle. When there are too many connections,
the one that has waited longest for a request is closed; if all of them run a request, the new one is.
"""

import asyncio
import logging
import resource
from contextlib import suppress
from typing import Any, Protocol

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from baton.http.log_limit import limit_logs
from baton.http.settings import HttpSettings
from baton.http.tls import BACKLOG

logger = logging.getLogger(__name__)

DESCRIPTORS_PER_CONNECTION = 4  # A client of the router needs its own and one for each leg.
FEWEST_CONNECTIONS = 16
WANTED_DESCRIPTORS = 65536


class Connection(Protocol):
    def drop(self, reason: str) -> None:
        """Close the connection at once."""


class Crowd:
    """The connections of one server that run no request, in the order in which they began to wait."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[Connection, None] = {}  # Connections that wait for headers. Values are unused.
        self._receiving: dict[Connection, None] = {}  # Connections that receive a request's body.

    def join(self, connection: Connection, num_open: int) -> None:
        """A connection was opened. If there are too many, the one that has waited longest is closed."""
        self._waiting[connection] = None
        if num_open > self._limit:
            victim = next(iter(self._waiting))
            if victim is connection:
                victim = next(iter(self._receiving), connection)
            self.leave(victim)
            victim.drop(f"more than {self._limit} are open")

    def wait(self, connection: Connection) -> None:
        self._receiving.pop(connection, None)
        self._waiting[connection] = None

    def receive(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)
        self._receiving[connection] = None

    def leave(self, connection: Connection) -> None:
        """The connection runs a request, or is closed."""
        self._waiting.pop(connection, None)
        self._receiving.pop(connection, None)


class _LimitedProtocol(H11Protocol):
    """One connection. `protocol_class` sets what the connections of one server share."""

    limits: HttpSettings
    crowd: Crowd
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(self.limits.header_s, self._give_up_headers)
        self.crowd.join(self, len(self.connections))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note_state()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_header_timer()
        self.crowd.leave(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.crowd.wait(self)
        super().on_response_complete()
        if self.conn.trailing_data[0]:  # The beginning of the next request came with this one.
            self._note_state()

    def _note_state(self) -> None:
        if self.cycle is None or self.cycle.response_complete:  # type: ignore[redundant-expr]
            if self._header_timer is None and not self.transport.is_closing():
                self._header_timer = self.loop.call_later(self.limits.header_s, self._give_up_headers)
            return
        self._cancel_header_timer()
        if self.cycle.more_body:
            self.crowd.receive(self)
        else:
            self.crowd.leave(self)

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _give_up_headers(self) -> None:
        self._header_timer = None
        self.drop(f"no whole request in {self.limits.header_s:g} s")

    def drop(self, reason: str) -> None:
        logger.warning("closed a connection: %s", reason)
        self.crowd.leave(self)
        self.transport.abort()


def protocol_class(settings: HttpSettings) -> type[H11Protocol]:
    """Return the protocol class of one server."""
    shared = {"limits": settings, "crowd": Crowd(max_connections(settings))}
    return type("LimitedProtocol", (_LimitedProtocol,), shared)


def max_connections(settings: HttpSettings) -> int:
    """Return the setting, or less if the file descriptors of this process do not suffice."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(FEWEST_CONNECTIONS, min(settings.max_connections, soft // DESCRIPTORS_PER_CONNECTION))


def raise_descriptor_limit() -> None:
    """Raise the soft limit of file descriptors: the usual 1,024 is for programs that use `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def server_config(app: Any, settings: HttpSettings, **options: Any) -> uvicorn.Config:
    """Return the configuration common to both servers."""
    limit_logs("uvicorn.error", "asyncio", __name__)
    return uvicorn.Config(
        app,
        http=protocol_class(settings),
        ws="none",
        interface="asgi3",
        proxy_headers=False,
        access_log=False,
        backlog=BACKLOG,
        timeout_keep_alive=int(settings.idle_s),
        server_header=False,
        **options,
    )
