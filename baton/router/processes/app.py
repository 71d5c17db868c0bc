"""The router of one process: its parts, its life, and what each path answers."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

import baton
from baton.http.rate_limits import RateLimits
from baton.http.watched_files import WatchedFiles
from baton.router.members.reader import Source
from baton.router.operator.admin import not_allowed
from baton.router.operator.control import PATHS as ADMIN_PATHS
from baton.router.operator.control import Administration, AdminPages, Control, is_admin_path, not_found
from baton.router.operator.ports import Ports
from baton.router.request.reply import SHUTTING_DOWN
from baton.router.request.timeline import RequestTimeline, latest_first
from baton.router.shell.client_http import Incoming, Reply
from baton.router.shell.in_flight import InFlight
from baton.router.shell.index_client import IndexClient
from baton.router.shell.intake import JSON, METHODS, Intake
from baton.router.shell.legs import Upstream
from baton.router.shell.metrics import Samples
from baton.router.shell.parts import Parts
from baton.router.shell.rate_limiting import Charges
from baton.router.shell.requests import Requests
from baton.router.shell.timers import TimerWheel
from baton.router.values.settings import RouterSettings

LOGS_LIMITED = ("baton.router.shell.intake", "baton.router.shell.client_http", "asyncio")
CLOSING_S = 5.0  # Time for clients to read their answers.
NO_LOG = {"version": 1}

Page = Callable[[], tuple[int, Mapping[str, str], bytes]]  # Status, headers, body.


class Router:
    """Made and used in one event loop. `start` it, open its ports with `listen`, and `close` it."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        administration: Administration | None = None,
        index_path: str | None = None,
        log_config: Mapping[str, Any] | None = None,
        sources: Sequence[Source] = (),
        charges: Charges | None = None,
    ) -> None:
        """`administration`: the coordinator's. None: this is the router's only process.

        `index_path`: socket of the coordinator's index process. `sources`: they name the fleet's members.
        `charges`: the coordinator's counts for rate limits. Raises ConfigError if a library for tokens or
        limits is missing.
        """
        self._parts = parts = Parts(settings)
        self.in_flight = InFlight(settings, parts.metrics)
        self.fleet, self.metrics, self.links = parts.fleet, parts.metrics, parts.links
        self.links.num_own = lambda: self.in_flight.num_requests
        self._index = None if index_path is None else IndexClient(index_path, parts.asker)
        self.control = None
        if administration is None:
            administration = self.control = Control(
                parts,
                collect=self._collect,
                recent=self._recent,
                on_fault=self.note_fault,
                sources=sources,
                log_config=log_config or NO_LOG,
            )
        self._admin_pages = AdminPages(administration)
        self._fault: str | None = None
        wheel = TimerWheel(asyncio.get_running_loop())
        self._ports = Ports(settings, wheel, self.note_fault)
        self._limits = None
        if settings.doors.may_limit and (charges is None or settings.doors.auth.storage is not None):
            charges = self._limits = RateLimits(self._ports.auth)
        upstream = Upstream(parts.pool, wheel, settings, parts.engine_keys)
        index = self._index if self.control is None else self.control.index
        requests = Requests(parts.view, upstream, parts.metrics, parts.introducer, parts.loans, index)
        self._intake = Intake(requests, self.links, self.in_flight, self._ports.auth, charges)

    # --- Its life

    async def open(self, host: str, port: int, admin_port: int | None) -> int:
        """`listen`, and watch the engines. Return the main port. Raises OSError."""
        bound = await self.listen(host, port, admin_port=admin_port)
        self.start()
        return bound

    def start(self) -> None:
        """Raises OSError."""
        self._ports.start()
        if self._index is not None:
            self._index.connect()
        if self.control is not None:
            self.control.start()

    async def listen(self, host: str, port: int, *, admin_port: int | None = None) -> int:
        """Open the main port, and one for metrics, /fleet and the page if `admin_port` is given.

        Return the main port. Raises OSError.
        """
        if admin_port is not None:
            await self._ports.listen(self._admin_pages.serve, host, admin_port, is_admin=lambda path: True)
        return await self._ports.listen(self.serve if admin_port is not None else self.serve_all, host, port)

    async def listen_beside_others(self, host: str, port: int, *, serves_admin: bool) -> None:
        """Listen on a port on which other processes of this router listen as well. Raises OSError."""
        await self._ports.listen(self.serve_all if serves_admin else self.serve, host, port, is_shared=True)

    async def close(self, timeout_s: float = 0.0) -> None:
        """`timeout_s`: how long answers may take to reach their clients."""
        self.end_requests()
        if self.control is not None:
            self.control.prober.stop()
        self._admin_pages.end_streams()
        await self._ports.close(timeout_s)
        if self.control is not None:
            await self.control.close()
        await self._admin_pages.close()
        if self._limits is not None:
            await self._limits.close()
        if self._index is not None:
            await self._index.close()
        await self._parts.close()
        await self.in_flight.close()

    async def reload(self) -> None:
        """Read the sources of members anew, and files that have changed."""
        WatchedFiles.look_now()
        if self.control is not None:
            await self.control.members.reload()

    def note_fault(self, why: str) -> None:
        """Make /health report that the router is broken."""
        self._fault = why

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and return when the running ones have ended, by themselves or after that time.

        A stream that is ended gets an error event and [DONE]; a request without an answer gets a 503.
        """
        await self.in_flight.drain(timeout_s)

    def end_requests(self) -> None:
        self.in_flight.stop()

    @property
    def paths(self) -> tuple[list[str], list[str]]:
        """Methods and paths: of the main port, and of the administrator's pages."""
        served = {**METHODS, "/health": "GET", "/version": "GET"}
        return [f"{method} {path}" for path, method in served.items()], [
            f"{method} {path}" for path, method in ADMIN_PATHS.items()
        ]

    # --- Requests

    def serve(self, incoming: Incoming, reply: Reply) -> None:
        """A request at the main port, if the administrator's pages have a port of their own."""
        path = incoming.path
        method = METHODS.get(path)
        if method is not None and incoming.method != method:
            _refuse_method(incoming, reply, method)
        elif method is not None:
            self._intake.take(incoming, reply)
        elif path == "/health":
            _show(self._health, incoming, reply)
        elif path == "/version":
            _show(_version, incoming, reply)
        else:
            reply.refuse(not_found(incoming))

    def serve_all(self, incoming: Incoming, reply: Reply) -> None:
        if is_admin_path(incoming.path):
            self._admin_pages.serve(incoming, reply)
        else:
            self.serve(incoming, reply)

    # --- Pages

    def _health(self) -> tuple[int, Mapping[str, str], bytes]:
        if self.in_flight.is_draining:
            return _json({"status": "draining", "reason": SHUTTING_DOWN}, 503)
        if self._fault is not None:
            return _json({"status": "broken", "reason": self._fault}, 500)
        if not self.fleet.can_serve:
            return _json({"status": "unavailable", "reason": "no decode engine has answered"}, 503)
        return _json({"status": "ok"})

    async def _collect(self) -> list[Samples]:
        return []

    async def _recent(self, request_id: str | None) -> list[RequestTimeline]:
        return latest_first([self.in_flight.find(request_id)])


def _show(page: Page, incoming: Incoming, reply: Reply) -> None:
    if incoming.method not in ("GET", "HEAD"):
        _refuse_method(incoming, reply, "GET, HEAD")
    else:
        reply.whole(*page())


def _refuse_method(incoming: Incoming, reply: Reply, allowed: str) -> None:
    reply.extra = {"allow": allowed}
    reply.refuse(not_allowed(incoming.method, incoming.path))


def _json(value: Any, status: int = 200) -> tuple[int, Mapping[str, str], bytes]:
    return status, JSON, msgspec.json.encode(value)


def _version() -> tuple[int, Mapping[str, str], bytes]:
    return _json({"version": baton.__version__})
