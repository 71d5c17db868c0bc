"""The router of one process: its parts, its life, and what each path answers.

A client that goes away, in whatever phase, ends its request at once: its legs are closed, and the engines
abort.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

import baton
from baton.core.errors import UserError
from baton.core.retention import SESSION_HEADER
from baton.http.bodies import Bodies
from baton.http.errors import ApiError
from baton.http.forms import is_form
from baton.http.rate_limits import RateLimits
from baton.http.watched_files import WatchedFiles
from baton.http.workers import WorkerPool
from baton.router.fleet.admission import NO_OBJECTIVE, objective_of
from baton.router.fleet.replica import Replica
from baton.router.fleet.turns import session_of
from baton.router.members.peers import PeerLink
from baton.router.members.reader import Source
from baton.router.operator.admin import not_allowed
from baton.router.operator.client_auth import ClientAuth
from baton.router.operator.control import PATHS as ADMIN_PATHS
from baton.router.operator.control import Administration, AdminPages, Control, is_admin_path, not_found
from baton.router.request import machine
from baton.router.request.answers import end_to_end
from baton.router.request.machine import Machine
from baton.router.request.pass_through import FORM_PATHS, PATHS, Looked, Passed, PassThrough, read_form
from baton.router.request.reply import SHUTTING_DOWN
from baton.router.request.spans import spans_of
from baton.router.request.timeline import RecentRequests, Recorder, RequestTimeline, latest_first
from baton.router.shell.access_log import AccessLog
from baton.router.shell.client_http import DEFECT, REQUEST_ID, Incoming, Listener, Reply
from baton.router.shell.index_client import IndexClient, IndexOwner
from baton.router.shell.legs import Ask, Upstream
from baton.router.shell.metrics import Samples
from baton.router.shell.parts import Parts
from baton.router.shell.rate_limiting import Charges, Charging
from baton.router.shell.requests import RequestDriver, Requests, report_refusal
from baton.router.shell.timers import TimerWheel
from baton.router.values.errors import RouterError
from baton.router.values.legs import CHARS_PER_TOKEN, parse_body, shape_of, take_kept, without_alias
from baton.router.values.settings import RouterSettings
from baton.tracing import open_tracer
from baton.tracing.trace_context import TRACEPARENT, TRACESTATE

logger = logging.getLogger(__name__)

LOGS_LIMITED = ("baton.router.processes.app", "baton.router.shell.client_http", "asyncio")
_GOOD_REQUEST_ID = re.compile(r"[!-~]{1,256}")
CLOSING_S = 5.0  # Time for clients to read their answers.
CHAT_PATH = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
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
        self._settings, self._loop = settings, asyncio.get_running_loop()
        self._parts = parts = Parts(settings)
        self.recent = RecentRequests()
        self._tracer = open_tracer("baton-router", settings.otlp_traces_endpoint)
        self._access_log = None if settings.access_log is None else AccessLog(settings.access_log)
        self.fleet, self.metrics, self.replica = parts.fleet, parts.metrics, Replica(parts.view)
        self._wheel = TimerWheel(asyncio.get_running_loop())
        upstream = Upstream(parts.pool, self._wheel, settings, parts.engine_keys)
        self._index_owner = None
        if administration is None and settings.kv_events:
            self._index_owner = IndexOwner(parts, log_config or NO_LOG)
            index_path = self._index_owner.path
        self._index = None if index_path is None else IndexClient(index_path, parts.asker)
        self.peers = None
        if administration is None and settings.peers is not None:
            self.peers = PeerLink(
                settings.peers,
                load=lambda: self.replica.load(self.num_requests),
                kept=self.replica.kept_turns,
                on_note=lambda note: self.replica.apply(note, asyncio.get_running_loop().time()),
                on_load=self._learn_peers,
            )
            self.fleet.tell, self.fleet.on_load = self.peers.tell, self.peers.load_has_changed
        self._requests = Requests(
            parts.view, upstream, parts.metrics, parts.introducer, parts.loans, self._index
        )
        self.control = None
        if administration is None:
            administration = self.control = Control(
                parts,
                num_requests=lambda: self.num_requests,
                exposition=self._exposition,
                recent=self._recent,
                samples=self._samples,
                on_fault=self.note_fault,
                index=self._index,
                peers=self.peers,
                sources=sources,
            )
        self._admin_pages = AdminPages(administration)
        self._workers = WorkerPool()
        self._bodies = Bodies(settings.doors, self._workers)
        self._auth = settings.doors.auth_file(self._loop.time)
        self._client_auth = ClientAuth(settings, self._auth, self.note_fault)
        self._charges, self._limits = charges, None
        if settings.doors.may_limit and (charges is None or settings.doors.auth.storage is not None):
            self._charges = self._limits = RateLimits(self._auth)
        self._listeners: list[Listener] = []
        self._fault: str | None = None
        self._running: set[RequestDriver | Charging] = set()
        self.num_requests = 0  # Requests in flight.
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    # --- Its life

    async def open(self, host: str, port: int, admin_port: int | None) -> int:
        """`listen`, and watch the engines. Return the main port. Raises OSError."""
        bound = await self.listen(host, port, admin_port=admin_port)
        self.start()
        return bound

    def start(self) -> None:
        self._client_auth.start()
        if self.peers is not None:
            self.peers.start()
        if self._index_owner is not None:
            self._index_owner.start()
        if self._index is not None:
            self._index.connect()
        if self.control is not None:
            self.control.start()

    async def listen(self, host: str, port: int, *, admin_port: int | None = None) -> int:
        """Open the main port, and one for metrics, /fleet and the page if `admin_port` is given.

        Return the main port. Raises OSError.
        """
        if admin_port is not None:
            await self._listener(self._admin_pages.serve, lambda path: True).listen(host, admin_port)
        serve = self.serve if admin_port is not None else self.serve_all
        return await self._listener(serve).listen(host, port)

    async def listen_beside_others(self, host: str, port: int, *, serves_admin: bool) -> None:
        """Listen on a port on which other processes of this router listen as well. Raises OSError."""
        serve = self.serve_all if serves_admin else self.serve
        await self._listener(serve).listen(host, port, is_shared=True)

    def _listener(
        self,
        serve: Callable[[Incoming, Reply], None],
        is_admin: Callable[[str], bool] = is_admin_path,
    ) -> Listener:
        settings, reads_in_s = self._settings, self._settings.timeouts.idle_s
        checks = self._client_auth.checks(is_admin)
        listener = Listener(
            serve, settings.doors, checks, self._bodies, self._wheel, reads_in_s=reads_in_s, tls=settings.tls
        )
        self._listeners.append(listener)
        return listener

    async def close(self, timeout_s: float = 0.0) -> None:
        """`timeout_s`: how long answers may take to reach their clients."""
        self.end_requests()
        if self.control is not None:
            self.control.prober.stop()
        self._admin_pages.end_streams()
        await asyncio.gather(*(listener.close(timeout_s) for listener in self._listeners))
        if self.control is not None:
            await self.control.close()
        await self._admin_pages.close()
        await self._client_auth.close()
        if self._limits is not None:
            await self._limits.close()
        if self.peers is not None:
            await self.peers.close()
        if self._index is not None:
            await self._index.close()
        if self._index_owner is not None:
            await self._index_owner.close()
        await self._parts.close()
        self._workers.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        if self._access_log is not None:
            self._access_log.close()

    def _learn_peers(self) -> None:
        assert self.peers is not None
        self.replica.apply(self.peers.peers.load(), asyncio.get_running_loop().time())

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
        self._is_draining = True
        logger.info("draining for at most %g s: %d requests are running", timeout_s, self.num_requests)
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            logger.warning("%d requests are ended after %g s", self.num_requests, timeout_s)
        self.end_requests()

    def end_requests(self) -> None:
        self._is_draining = True
        for request in list(self._running):
            request.stop()

    @property
    def paths(self) -> tuple[list[str], list[str]]:
        """Methods and paths: of the main port, and of the administrator's pages."""
        served = {**COMPLETIONS, **PASSED, "/health": "GET", "/version": "GET"}
        return [f"{method} {path}" for path, method in served.items()], [
            f"{method} {path}" for path, method in ADMIN_PATHS.items()
        ]

    # --- Requests

    def serve(self, incoming: Incoming, reply: Reply) -> None:
        """A request at the main port, if the administrator's pages have a port of their own."""
        path = incoming.path
        method = COMPLETIONS.get(path) or PASSED.get(path)
        if method is not None and incoming.method != method:
            _refuse_method(incoming, reply, method)
        elif method is not None:
            self._count_in(incoming, reply)
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

    def _count_in(self, incoming: Incoming, reply: Reply) -> None:
        request_id = incoming.headers.get(REQUEST_ID, "")
        if not _GOOD_REQUEST_ID.fullmatch(request_id):
            request_id = str(uuid.uuid4())
        reply.extra = {REQUEST_ID: request_id}
        recorder = self._recorder(incoming, request_id)
        self.recent.begin(recorder)
        self.num_requests += 1
        self._is_idle.clear()
        self.metrics.in_flight.set(self.num_requests)
        self._try(lambda: self._begin(incoming, reply, request_id, recorder), reply, recorder)

    def _try(self, begin: Callable[[], None], reply: Reply, recorder: Recorder) -> None:
        try:
            begin()
        except UserError as error:
            self._refuse(reply, ApiError.of_user(error), recorder)
        except ApiError as error:
            report_refusal(self.fleet, error, reply.extra[REQUEST_ID])
            self._refuse(reply, error, recorder)
        except Exception:
            logger.exception("%s: a request has failed", reply.extra[REQUEST_ID])
            self._refuse(reply, ApiError(500, DEFECT), recorder)

    def _recorder(self, incoming: Incoming, request_id: str) -> Recorder:
        received_at_s, span = incoming.received_at_s, None
        if self._tracer is not None:
            span = self._tracer.begin(incoming.headers, incoming.path)
        arrived_at_s = time.time() - (self._loop.time() - received_at_s)
        return Recorder(
            request_id,
            incoming.method,
            incoming.path,
            received_at_s=received_at_s,
            arrived_at_s=arrived_at_s,
            span=span,
        )

    def _refuse(self, reply: Reply, error: ApiError, recorder: Recorder) -> None:
        reply.refuse(error)
        self._count_out(error.status, recorder)

    def _count_out(self, status: int, recorder: Recorder) -> None:
        timeline = recorder.timeline(status, self._loop.time())
        self.recent.end(recorder, timeline)
        if self._access_log is not None:
            self._access_log.write(timeline)
        if timeline.span is not None and self._tracer is not None:
            self._tracer.export(spans_of(timeline))
        self.num_requests -= 1
        if not self.num_requests:
            self._is_idle.set()
        self.metrics.in_flight.set(self.num_requests)
        self.metrics.observe(timeline)

    def _begin(self, incoming: Incoming, reply: Reply, request_id: str, recorder: Recorder) -> None:
        """Raises UserError, ApiError."""
        path = incoming.path
        if self._is_draining:
            raise RouterError.unavailable(SHUTTING_DOWN)
        if isinstance(incoming.body, ApiError):
            raise incoming.body
        if self.num_requests + self.replica.num_requests_elsewhere > self._settings.max_requests:
            raise RouterError.unavailable(f"{self._settings.max_requests} requests are in flight; try again")
        headers = {**self._passed_on(incoming.headers), REQUEST_ID: request_id}
        if (span := recorder.span) is not None:
            headers.pop(TRACESTATE, None)
            headers.pop(TRACEPARENT, None)
            if not span.is_sampled:  # Else each leg has a span of its own.
                headers |= span.headers
        ends_at_s = incoming.received_at_s + self._settings.timeouts.total_s
        ask = Ask(incoming.method, incoming.target, headers, ends_at_s)
        if path == "/v1/models" and (cards := self.fleet.models.model_cards()) is not None:
            reply.whole(200, {**JSON, **reply.extra}, msgspec.json.encode({"object": "list", "data": cards}))
            return self._count_out(200, recorder)
        if path in PASSED:
            aliases = self._settings.model_aliases
            num_estimated = None
            if path in FORM_PATHS and is_form(incoming.headers):
                raw, looked = read_form(incoming.body, incoming.headers["content-type"], aliases)
                num_estimated = 0  # Files are no text.
            else:
                raw = without_alias(incoming.body, aliases)
                looked = Looked.of_json(raw)
                if incoming.method == "POST":
                    num_estimated = len(raw) // CHARS_PER_TOKEN
            passed = Passed(request_id, path, raw, incoming.received_at_s, looked)
            return self._charge(
                incoming, num_estimated, reply, recorder, lambda: self._pass(passed, ask, reply, recorder)
            )
        body = parse_body(incoming.body, self._settings.model_aliases)
        recorder.asked(body)
        return self._charge(
            incoming, body, reply, recorder, lambda: self._drive(incoming, body, ask, reply, recorder)
        )

    def _charge(
        self,
        incoming: Incoming,
        cost: dict[str, Any] | int | None,
        reply: Reply,
        recorder: Recorder,
        then: Callable[[], None],
    ) -> None:
        """`cost`: number of tokens, or the body that has them; None: nothing. Raises UserError, ApiError."""
        tenant = incoming.caller.tenant
        rate = self._auth.current.rate_of(tenant)
        if self._charges is None or not rate.is_limited or cost is None:
            return then()
        num_tokens = 0
        if rate.prompt_tokens_per_minute is not None:
            num_tokens = cost if isinstance(cost, int) else shape_of(cost).num_prompt_tokens
        charges = self._charges
        verdict = charges.charge_here(tenant, num_tokens)
        if verdict is not None:
            self.metrics.charged(verdict.outcome)
            if (error := verdict.error) is not None:
                return self._refuse(reply, error, recorder)
            reply.rate_headers = verdict.headers
            return then()

        def begin() -> None:
            self._running.discard(charging)
            reply.handler = None
            self._try(then, reply, recorder)

        charging = Charging(
            lambda: charges.charge(tenant, num_tokens),
            reply,
            begin,
            self.metrics.charged,
            lambda status: self._end(charging, recorder, status),
        )
        return self._run(charging, reply)

    def _pass(self, passed: Passed, ask: Ask, reply: Reply, recorder: Recorder) -> None:
        driver = RequestDriver(self._requests, PassThrough(self._parts.view, passed), ask, reply, recorder)
        self._run(driver, reply)
        driver.begin(lambda status: self._end(driver, recorder, status))

    def _drive(
        self, incoming: Incoming, body: dict[str, Any], ask: Ask, reply: Reply, recorder: Recorder
    ) -> None:
        """Raises UserError, ApiError."""
        admission, caller = self._settings.admission, incoming.caller
        session, named = incoming.headers.get(SESSION_HEADER), caller.tenant if caller.is_named else ""
        ask.kept = take_kept(body, session=session, tenant=named)
        objective = NO_OBJECTIVE
        if admission is not None:
            objective = objective_of(admission, body, incoming.headers, named)
        request = machine.Request(
            id=ask.headers[REQUEST_ID],
            body=body,
            is_chat=incoming.path == CHAT_PATH,
            session=session_of(session, named),
            received_at_s=incoming.received_at_s,
            objective=objective,
        )
        driver = RequestDriver(self._requests, Machine(self._parts.view, request), ask, reply, recorder)
        self._run(driver, reply)
        driver.begin(lambda status: self._end(driver, recorder, status))

    def _run(self, request: "RequestDriver | Charging", reply: Reply) -> None:
        self._running.add(request)
        reply.handler = request

    def _end(self, request: "RequestDriver | Charging", recorder: Recorder, status: int) -> None:
        self._running.discard(request)
        self._count_out(status, recorder)

    def _passed_on(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Drop a key that is meant for this router, or that the engines' own keys replace."""
        passed = end_to_end(headers)
        settings = self._settings
        if not settings.doors.is_open or settings.engine_api_key or settings.engine_api_keys:
            passed.pop("authorization", None)
            passed.pop("x-api-key", None)
        return passed

    # --- Pages

    def _health(self) -> tuple[int, Mapping[str, str], bytes]:
        if self._is_draining:
            return _json({"status": "draining", "reason": SHUTTING_DOWN}, 503)
        if self._fault is not None:
            return _json({"status": "broken", "reason": self._fault}, 500)
        if not self.fleet.can_serve:
            return _json({"status": "unavailable", "reason": "no decode engine has answered"}, 503)
        return _json({"status": "ok"})

    async def _exposition(self) -> bytes:
        return self.metrics.exposition()

    async def _recent(self, request_id: str | None) -> list[RequestTimeline]:
        return latest_first([self.recent.find(request_id, self._loop.time())])

    async def _samples(self) -> Samples:
        return self.metrics.samples()


COMPLETIONS = {"/v1/completions": "POST", CHAT_PATH: "POST"}
PASSED = {path: passed.method for path, passed in PATHS.items()}


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
