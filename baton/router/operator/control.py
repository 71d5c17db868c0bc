"""The part of a router that exists once: it watches the engines, and answers the administrator."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import quote, unquote

import msgspec

from baton.core.json_text import NotJson, decode_json
from baton.http.errors import ApiError
from baton.router.fleet.engine import Engine
from baton.router.members.peers import PeerLink
from baton.router.members.probes import Prober
from baton.router.members.reader import Members, Source
from baton.router.operator import admin, page
from baton.router.operator.feed import LATEST, SNAPSHOT, Feed
from baton.router.operator.live import Live
from baton.router.request.timeline import RequestTimeline
from baton.router.shell.asking import AskFailed
from baton.router.shell.client_http import DEFECT, Incoming, Reply
from baton.router.shell.index_client import IndexClient, IndexOwner
from baton.router.shell.metrics import Samples, sum_families
from baton.router.shell.parts import Parts
from baton.router.shell.tasks import Tasks

logger = logging.getLogger(__name__)

LAST_PROBES_S = 0.5  # Time for probes in flight when the router is told to stop.
REQUESTS = "/requests"
REQUEST = "/requests/{id}"
EVENTS, STREAM = "/fleet/events", "/fleet/stream"
PAGES = ("/metrics", "/fleet", REQUESTS, REQUEST, SNAPSHOT, LATEST, EVENTS)
PATHS = {**dict.fromkeys((*PAGES, STREAM, *sorted(page.PATHS)), "GET"), **admin.METHODS}
_REQUEST_PREFIX = "/requests/"


def is_admin_path(path: str) -> bool:
    return path in PATHS or path.startswith(_REQUEST_PREFIX)


class Administration(Protocol):
    async def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> admin.Reply:
        """`is_admin_path(path)` holds. The keys in `headers` have been checked."""


class AdminPages:
    """Serves the administrator's requests of a listener. Implements the listener's `serve`."""

    def __init__(self, administration: Administration) -> None:
        self._administration = administration
        self._calls = Tasks()
        self._feed = Feed(lambda path: administration.answer("GET", path, {}, b""))

    def serve(self, incoming: Incoming, reply: Reply) -> None:
        if not is_admin_path(incoming.path):
            return reply.refuse(not_found(incoming))
        if isinstance(incoming.body, ApiError):
            return reply.refuse(incoming.body)
        if incoming.path == STREAM or incoming.path in page.PATHS:
            if incoming.method not in ("GET", "HEAD"):
                reply.extra = {"allow": "GET, HEAD"}
                return reply.refuse(admin.not_allowed(incoming.method, incoming.path))
            if incoming.path == STREAM:
                return self._feed.join(incoming, reply)
            return reply.whole(*page.file_at(incoming.path))
        self._calls.start(self._answer(incoming, incoming.body, reply), f"{incoming.path}: no answer")
        return None

    async def _answer(self, incoming: Incoming, body: bytes, reply: Reply) -> None:
        method, path, headers = incoming.method, incoming.path, incoming.headers
        reply.whole(*await self._administration.answer(method, path, headers, body))
        reply.flush()

    def end_streams(self) -> None:
        """End the event streams, before the listener waits for its connections."""
        self._feed.end()

    async def close(self) -> None:
        await self._feed.close()
        await self._calls.close()


def not_found(incoming: Incoming) -> ApiError:
    return ApiError(404, f"{incoming.method} {incoming.path}: Not Found")


class Control:
    """Implements `Administration`. `start` it, and `close` it."""

    def __init__(
        self,
        parts: Parts,
        *,
        collect: Callable[[], Awaitable[list[Samples]]],
        recent: Callable[[str | None], Awaitable[list[RequestTimeline]]],
        on_fault: Callable[[str], None],
        sources: Sequence[Source],
        log_config: Mapping[str, Any],
    ) -> None:
        """`collect`: metrics of the other processes. `recent`: requests with this id, or all, latest first.

        `on_fault`: a task that watches the engines, or reads `sources` of members, has ended.
        """
        self._parts, self._collect, self._recent, self._tasks = parts, collect, recent, Tasks(on_fault)
        settings = parts.settings
        self.index_owner = self.index = self.peers = None
        if settings.kv_events:
            self.index_owner = IndexOwner(parts, log_config)
            self.index = IndexClient(self.index_owner.path, parts.asker)
        if settings.peers is not None:
            self.peers = PeerLink(settings.peers, parts.links)
        self.prober = Prober(parts.fleet, parts.asker, settings.probe, parts.introducer.refresh)
        self.members = Members(settings, parts.fleet, self.prober, parts.metrics, sources, on_fault)
        self._admin = admin.Admin(parts.view, self.members, self.index, self.peers)
        self._live = Live(parts, self._admin, self._samples)
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Raises OSError."""
        if self.peers is not None:
            self.peers.start()
        if self.index_owner is not None and self.index is not None:
            self.index_owner.start()
            self.index.connect()
        fault = "the task that watches the engines has ended"
        self._watch = self._tasks.start(self.prober.run(), fault)
        self.members.start()
        self._live.start()

    async def close(self) -> None:
        await self.members.close()
        await self._live.close()
        self.prober.stop()
        if self._watch is not None:
            await asyncio.wait({self._watch}, timeout=LAST_PROBES_S)
        await self._tasks.close()
        if self.peers is not None:
            await self.peers.close()
        if self.index_owner is not None and self.index is not None:
            await self.index.close()
            await self.index_owner.close()

    async def _samples(self) -> Samples:
        return sum_families([self._parts.metrics.samples(), *await self._collect()])

    async def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> admin.Reply:
        try:
            if path in admin.METHODS:
                return await self._admin.answer(method, path, headers, body)
            if method not in ("GET", "HEAD"):
                return admin.refusal(admin.not_allowed(method, path), allow="GET, HEAD")
            if path == "/metrics":
                kind = {"content-type": "text/plain; version=0.0.4; charset=utf-8"}
                return admin.Reply(200, kind, self._parts.metrics.exposition(await self._collect()))
            if path == REQUESTS:
                return _json({"requests": await self._recent(None)})
            if path.startswith(_REQUEST_PREFIX):
                return await self._request(unquote(path.removeprefix(_REQUEST_PREFIX)))
            if path == SNAPSHOT:
                return admin.Reply(200, admin.JSON, await self._live.snapshot())
            if path == LATEST:
                return admin.Reply(200, admin.JSON, await self._live.latest())
            if path == EVENTS:
                return _json({"events": self._live.events()})
            return self._fleet_state()
        except Exception:
            logger.exception("%s: a request has failed", path)
            return admin.refusal(ApiError(500, DEFECT))

    def _fleet_state(self) -> admin.Reply:
        settings, parts = self._parts.settings, self._parts
        state: dict[str, Any] = {
            "mode": settings.mode,
            "decode_leg": settings.decode_leg,
            "first_token": settings.first_token,
            "policy": settings.policy,
            "on_prefill_failure": settings.on_prefill_failure,
            "in_flight": parts.links.num_requests,
            "engines": parts.fleet.snapshot(),
            "pairs": parts.pairs.snapshot(parts.fleet.engines, asyncio.get_running_loop().time()),
        }
        return _json(state)

    async def _request(self, request_id: str) -> admin.Reply:
        """The last request with this id, and what its engines report about it."""
        found = await self._recent(request_id)
        if not found:
            return admin.refusal(ApiError(404, f"no recent request has the id {request_id!r}"))
        legs = {(leg.role, leg.engine) for leg in found[0].legs}
        engines = sorted(
            (one for one in self._parts.fleet.engines if one.key in legs), key=lambda one: one.key
        )
        parts = await asyncio.gather(*(self._part_of(one, request_id) for one in engines))
        return _json({"request": found[0], "engines": parts})

    async def _part_of(self, engine: Engine, request_id: str) -> dict[str, Any]:
        part: dict[str, Any] = {"role": engine.role, "engine": engine.url, "timelines": [], "error": None}
        url = f"{engine.admin_address}/baton{_REQUEST_PREFIX}{quote(request_id, safe='')}"
        try:
            answer = await self._parts.asker.ask(url, timeout_s=self._parts.settings.probe.timeout_s)
            if answer.status == 200:
                part["timelines"] = decode_json(answer.body, _EnginePart).timelines
            else:
                part["error"] = f"answered with {answer.status}"
        except (TimeoutError, AskFailed, NotJson) as error:
            part["error"] = str(error) or type(error).__name__
        return part


class _EnginePart(msgspec.Struct):
    timelines: list[dict[str, Any]]


def _json(value: Any) -> admin.Reply:
    return admin.Reply(200, admin.JSON, msgspec.json.encode(value))
