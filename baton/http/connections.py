"""uvicorn server with limits and deadlines for connections.

uvicorn alone only ends a connection that is idle after an answer. Here a connection must also send its
headers within `header_s` after it was opened or became idle. When there are too many connections, the one
that has waited longest for a request is closed; if all of them run a request, the new one is.
"""

import asyncio
import logging
import resource
from contextlib import suppress
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from baton.http.log_limit import limit_logs
from baton.http.settings import HttpSettings

logger = logging.getLogger(__name__)

BACKLOG = 512  # asyncio accepts as many at once; they must fit into the descriptors that are kept in reserve.
DESCRIPTORS_PER_CONNECTION = 4  # A client of the router needs its own and one for each leg.
FEWEST_CONNECTIONS = 16
WANTED_DESCRIPTORS = 65536


class _LimitedProtocol(H11Protocol):
    """One connection. `protocol_class` sets what the connections of one server share."""

    limits: HttpSettings
    max_connections: int
    # In the order in which they began to wait; the value is unused.
    waiting: dict["_LimitedProtocol", None]  # For a request's headers.
    receiving: dict["_LimitedProtocol", None]  # A request's body.
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.waiting[self] = None
        self._header_timer = self.loop.call_later(self.limits.header_s, self._give_up_headers)
        if len(self.connections) > self.max_connections:
            victim = next(iter(self.waiting))
            if victim is self:
                victim = next(iter(self.receiving), self)
            self._drop(victim, f"more than {self.max_connections} are open")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note_state()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_header_timer()
        self.waiting.pop(self, None)
        self.receiving.pop(self, None)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.receiving.pop(self, None)
        self.waiting[self] = None
        super().on_response_complete()
        if self.conn.trailing_data[0]:  # The beginning of the next request came with this one.
            self._note_state()

    def _note_state(self) -> None:
        if self.cycle is None or self.cycle.response_complete:  # type: ignore[redundant-expr]
            if self._header_timer is None and not self.transport.is_closing():
                self._header_timer = self.loop.call_later(self.limits.header_s, self._give_up_headers)
            return
        self._cancel_header_timer()
        self.waiting.pop(self, None)
        if self.cycle.more_body:
            self.receiving[self] = None
        else:
            self.receiving.pop(self, None)

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _give_up_headers(self) -> None:
        self._header_timer = None
        self._drop(self, f"no whole request in {self.limits.header_s:g} s")

    @staticmethod
    def _drop(connection: "_LimitedProtocol", reason: str) -> None:
        logger.warning("closed a connection: %s", reason)
        connection.waiting.pop(connection, None)
        connection.receiving.pop(connection, None)
        connection.transport.abort()


def protocol_class(settings: HttpSettings) -> type[H11Protocol]:
    """Return the protocol class of one server."""
    shared = {
        "limits": settings,
        "max_connections": max_connections(settings),
        "waiting": {},
        "receiving": {},
    }
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
