"""The router of one process: its parts, its life, and what each path answers.

A client that goes away, in whatever phase, ends its request at once: its legs are closed, and the engines
abort.
"""

import asyncio
import logging
import re
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

import baton
from baton.core.errors import UserError
from baton.http.bodies import Bodies
from baton.http.errors import ApiError
from baton.http.gate import Checks
from baton.http.workers import WorkerPool
from baton.router import machine
from baton.router.answers import end_to_end
from baton.router.errors import RouterError
from baton.router.events import Count
from baton.router.fleet import Fleet
from baton.router.fleet_view import FleetView
from baton.router.legs import parse_body
from baton.router.machine import CLIENT_CLOSED_REQUEST, SHUTTING_DOWN, Machine
from baton.router.pairs import Pairs
from baton.router.settings import RouterSettings
from baton.router.shell import admin
from baton.router.shell.asking import Asker
from baton.router.shell.client_http import DEFECT, REQUEST_ID, Incoming, Listener, Reply
from baton.router.shell.dashboard import PAGE
from baton.router.shell.engine_http import EnginePool
from baton.router.shell.introductions import Introducer
from baton.router.shell.legs import Ask, Upstream
from baton.router.shell.loans import LoanReturns
from baton.router.shell.metrics import RouterMetrics
from baton.router.shell.probes import Prober, ProberDied
from baton.router.shell.requests import RequestDriver, Requests, forward
from baton.router.shell.timers import TimerWheel
from baton.router.turns import SESSION_HEADER, TurnTable

logger = logging.getLogger(__name__)

_GOOD_REQUEST_ID = re.compile(r"[!-~]{1,256}")
LAST_PROBES_S = 0.5  # For probes in flight when the router is told to stop.
CLOSING_S = 5.0  # For clients to have read their answers.
CHAT_PATH = "/v1/chat/completions"
JSON = {"content-type": "application/json"}

Page = Callable[[], tuple[int, Mapping[str, str], bytes]]  # Status, headers, body.


class Router:
    """Made and used in one event loop. `start` it, open its ports with `listen`, and `close` it."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self.fleet = Fleet(settings)
        self._pairs = Pairs()
        self._metrics = RouterMetrics(self.fleet, self._pairs)
        self._pool = EnginePool(connect_s=settings.timeouts.connect_s)
        self._wheel = TimerWheel(asyncio.get_running_loop())
        self.asker = Asker(self._pool, settings.engine_api_key)
        upstream = Upstream(self._pool, self._wheel, settings)
        timeout_s = settings.probe.timeout_s
        self._introducer = Introducer(self.asker, self.fleet, timeout_s, pushes=settings.mode == "push")
        self._loans = LoanReturns(self.asker, self._metrics, timeout_s)
        self._view = FleetView(settings, self.fleet, self._pairs, TurnTable(self._loans.give_back))
        self._requests = Requests(self._view, upstream, self._metrics, self._introducer, self._loans)
        self._prober = Prober(self.fleet, self.asker, settings.probe, self._introducer.refresh)
        self._admin = admin.Admin(settings, self.fleet, self._prober)
        self._admin_calls: set[asyncio.Task[None]] = set()
        self.fleet.on_removed += [self._pairs.forget, self._metrics.forget]
        self._watch: asyncio.Task[None] | None = None
        self._workers = WorkerPool()
        self._bodies = Bodies(settings.doors, self._workers)
        self._checks = Checks(api_keys=settings.doors.api_keys, allowed_hosts=settings.checked_hosts)
        self._listeners: list[Listener] = []
        self._fault: ProberDied | None = None
        self._running: set[RequestDriver | Forwarding] = set()
        self._num_requests = 0
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._pages: dict[str, Page] = {"/health": self._health, "/version": _version}
        self._admin_pages: dict[str, Page] = {
            "/metrics": self._exposition,
            "/fleet": self._fleet_state,
            "/": _dashboard,
        }

    # --- Its life

    def start(self) -> None:
        self._watch = asyncio.create_task(self._prober.run(), name="baton-router-prober")
        self._watch.add_done_callback(self._hear_prober)

    async def listen(self, host: str, port: int, *, admin_port: int | None = None) -> int:
        """Open the main port, and one for metrics, /fleet and the dashboard if `admin_port` is given.

        Return the main port. Raises OSError.
        """
        if admin_port is not None:
            await self._listener(self.serve_admin).listen(host, admin_port)
        serve = self.serve if admin_port is not None else self.serve_all
        return await self._listener(serve).listen(host, port)

    def _listener(self, serve: Callable[[Incoming, Reply], None]) -> Listener:
        settings, reads_in_s = self._settings, self._settings.timeouts.idle_s
        listener = Listener(
            serve, settings.doors, self._checks, self._bodies, self._wheel, reads_in_s=reads_in_s
        )
        self._listeners.append(listener)
        return listener

    async def close(self, timeout_s: float = 0.0) -> None:
        """`timeout_s`: for answers to reach their clients."""
        self.end_requests()
        self._prober.stop()
        await asyncio.gather(*(listener.close(timeout_s) for listener in self._listeners))
        if self._watch is not None:
            await asyncio.wait({self._watch}, timeout=LAST_PROBES_S)
            self._watch.cancel()
            with suppress(asyncio.CancelledError, ExceptionGroup):  # Heard of already, see `_hear_prober`.
                await self._watch
        for call in self._admin_calls:
            call.cancel()
        await asyncio.gather(*self._admin_calls, return_exceptions=True)
        await self._introducer.close()
        await self._loans.close()
        await self._pool.close()
        self._workers.close()

    def _hear_prober(self, watch: asyncio.Task[None]) -> None:
        if watch.cancelled() or self._prober.is_stopping:
            return
        self._fault = ProberDied(f"the task that watches the engines has ended: {watch.exception()!r}")
        logger.critical("%s", self._fault, exc_info=watch.exception())

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and return when the running ones have ended, by themselves or after that time.

        A stream that is ended gets an error event and [DONE]; a request without an answer gets a 503.
        """
        self._is_draining = True
        logger.info("draining for at most %g s: %d requests are running", timeout_s, self._num_requests)
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            logger.warning("%d requests are ended after %g s", self._num_requests, timeout_s)
        self.end_requests()

    def end_requests(self) -> None:
        self._is_draining = True
        for request in list(self._running):
            request.stop()

    @property
    def paths(self) -> tuple[list[str], list[str]]:
        """Methods and paths: of the main port, and of the administrator's pages."""
        served = {**COMPLETIONS, **FORWARDED, **dict.fromkeys(self._pages, "GET")}
        pages = {**dict.fromkeys(self._admin_pages, "GET"), **admin.METHODS}
        return [f"{method} {path}" for path, method in served.items()], [
            f"{method} {path}" for path, method in pages.items()
        ]

    # --- Requests

    def serve(self, incoming: Incoming, reply: Reply) -> None:
        """A request at the main port, if the administrator's pages have a port of their own."""
        path = incoming.path
        method = COMPLETIONS.get(path) or FORWARDED.get(path)
        if method is not None and incoming.method != method:
            _refuse_method(incoming, reply, method)
        elif method is not None:
            self._count_in(incoming, reply)
        else:
            _show(self._pages, incoming, reply)

    def serve_all(self, incoming: Incoming, reply: Reply) -> None:
        if incoming.path in self._admin_pages or incoming.path in admin.METHODS:
            self.serve_admin(incoming, reply)
        else:
            self.serve(incoming, reply)

    def serve_admin(self, incoming: Incoming, reply: Reply) -> None:
        if incoming.path not in admin.METHODS:
            return _show(self._admin_pages, incoming, reply)
        if isinstance(incoming.body, ApiError):
            return reply.refuse(incoming.body)
        call = asyncio.create_task(self._administer(incoming, incoming.body, reply))
        self._admin_calls.add(call)
        return call.add_done_callback(self._admin_calls.discard)

    async def _administer(self, incoming: Incoming, body: bytes, reply: Reply) -> None:
        try:
            answer = await self._admin.answer(incoming.method, incoming.path, incoming.headers, body)
            assert answer is not None
        except Exception:
            logger.exception("%s: a request has failed", incoming.path)
            reply.refuse(ApiError(500, DEFECT))
        else:
            reply.whole(*answer)
        reply.flush()

    def _count_in(self, incoming: Incoming, reply: Reply) -> None:
        request_id = incoming.headers.get(REQUEST_ID, "")
        if not _GOOD_REQUEST_ID.fullmatch(request_id):
            request_id = str(uuid.uuid4())
        reply.extra = {REQUEST_ID: request_id}
        self._num_requests += 1
        self._is_idle.clear()
        self._metrics.in_flight.set(self._num_requests)
        try:
            self._begin(incoming, reply, request_id)
        except UserError as error:
            self._refuse(reply, ApiError.of_user(error))
        except ApiError as error:
            self._refuse(reply, error)
        except Exception:
            logger.exception("%s: a request has failed", request_id)
            self._refuse(reply, ApiError(500, DEFECT))

    def _refuse(self, reply: Reply, error: ApiError) -> None:
        reply.refuse(error)
        self._count_out(error.status)

    def _count_out(self, status: int) -> None:
        self._num_requests -= 1
        if not self._num_requests:
            self._is_idle.set()
        self._metrics.in_flight.set(self._num_requests)
        self._metrics.requests.labels(str(status)).inc()

    def _begin(self, incoming: Incoming, reply: Reply, request_id: str) -> None:
        """Raises UserError, ApiError."""
        path = incoming.path
        if self._is_draining:
            raise RouterError.unavailable(SHUTTING_DOWN)
        if isinstance(incoming.body, ApiError):
            raise incoming.body
        if self._num_requests > self._settings.max_requests:
            raise RouterError.unavailable(f"{self._settings.max_requests} requests are in flight; try again")
        headers = {**self._passed_on(incoming.headers), REQUEST_ID: request_id}
        ends_at_s = incoming.received_at_s + self._settings.timeouts.total_s
        ask = Ask(incoming.method, incoming.target, headers, ends_at_s)
        if path == "/v1/models" and (cards := self.fleet.model_cards()) is not None:
            reply.whole(200, {**JSON, **reply.extra}, msgspec.json.encode({"object": "list", "data": cards}))
            return self._count_out(200)
        if path in FORWARDED:
            forwarding = Forwarding(self._requests, ask, incoming.body, incoming.received_at_s, reply)
            self._run(forwarding, reply)
            return forwarding.begin(lambda status: self._end(forwarding, status))
        request = machine.Request(
            id=request_id,
            body=parse_body(incoming.body),
            is_chat=path == CHAT_PATH,
            session=incoming.headers.get(SESSION_HEADER),
            received_at_s=incoming.received_at_s,
        )
        driver = RequestDriver(self._requests, Machine(self._view, request), ask, reply)
        self._run(driver, reply)
        return driver.begin(lambda status: self._end(driver, status))

    def _run(self, request: "RequestDriver | Forwarding", reply: Reply) -> None:
        self._running.add(request)
        reply.handler = request

    def _end(self, request: "RequestDriver | Forwarding", status: int) -> None:
        self._running.discard(request)
        self._count_out(status)

    def _passed_on(self, headers: Mapping[str, str]) -> dict[str, str]:
        """A key for this router, or one that the engines' replaces, is not for engines."""
        passed = end_to_end(headers)
        if self._settings.doors.api_keys or self._settings.engine_api_key is not None:
            passed.pop("authorization", None)
            passed.pop("x-api-key", None)
        return passed

    # --- Pages

    def _health(self) -> tuple[int, Mapping[str, str], bytes]:
        if self._is_draining:
            return _json({"status": "draining", "reason": SHUTTING_DOWN}, 503)
        if self._fault is not None:
            return _json({"status": "broken", "reason": str(self._fault)}, 500)
        if not self.fleet.can_serve:
            return _json({"status": "unavailable", "reason": "no decode engine has answered"}, 503)
        return _json({"status": "ok"})

    def _exposition(self) -> tuple[int, Mapping[str, str], bytes]:
        headers = {"content-type": "text/plain; version=0.0.4; charset=utf-8"}
        return 200, headers, self._metrics.exposition()

    def _fleet_state(self) -> tuple[int, Mapping[str, str], bytes]:
        return _json(
            {
                "mode": self._settings.mode,
                "decode_leg": self._settings.decode_leg,
                "first_token": self._settings.first_token,
                "policy": self._settings.policy,
                "on_prefill_failure": self._settings.on_prefill_failure,
                "in_flight": self._num_requests,
                "engines": self.fleet.snapshot(),
                "pairs": self._pairs.snapshot(self.fleet.engines, asyncio.get_running_loop().time()),
            }
        )


class Forwarding:
    """A request that goes to a decode engine as it is. Implements `Handler`."""

    def __init__(self, requests: Requests, ask: Ask, body: bytes, received_at_s: float, reply: Reply) -> None:
        self._requests, self._ask, self._body, self._reply = requests, ask, body, reply
        self._received_at_s = received_at_s
        self._on_over: Callable[[int], None] = lambda status: None
        self._task: asyncio.Task[None] | None = None

    def begin(self, on_over: Callable[[int], None]) -> None:
        self._on_over = on_over
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        self._cut(RouterError.unavailable(SHUTTING_DOWN), 503)

    def client_gone(self) -> None:
        self._cut(None, CLIENT_CLOSED_REQUEST)

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def _cut(self, error: ApiError | None, status: int) -> None:
        assert self._task is not None
        if not self._task.done():
            self._task.cancel()
            self._answer(error, status)

    def _answer(self, error: ApiError | None, status: int) -> None:
        on_over, self._on_over = self._on_over, lambda status: None
        if error is not None:
            self._reply.refuse(error)
            self._reply.flush()
        on_over(status)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            answer = await forward(self._requests, self._ask, self._body)
        except RouterError as error:
            return self._answer(error, error.status)
        except Exception:
            logger.exception("%s: a request has failed", self._ask.path)
            return self._answer(ApiError(500, DEFECT), 500)
        waited_s = loop.time() - self._received_at_s
        self._requests.metrics.count(Count("first_byte_seconds", value=waited_s))
        headers = {**end_to_end(answer.headers), **self._reply.extra}
        self._reply.whole(answer.status, headers, answer.body)
        self._reply.flush()
        return self._answer(None, answer.status)


COMPLETIONS = {"/v1/completions": "POST", CHAT_PATH: "POST"}
FORWARDED = {"/v1/models": "GET", "/tokenize": "POST", "/detokenize": "POST"}


def _show(pages: Mapping[str, Page], incoming: Incoming, reply: Reply) -> None:
    page = pages.get(incoming.path)
    if page is None:
        reply.refuse(ApiError(404, f"{incoming.method} {incoming.path}: Not Found"))
    elif incoming.method not in ("GET", "HEAD"):
        _refuse_method(incoming, reply, "GET, HEAD")
    else:
        status, headers, body = page()
        reply.whole(status, headers, body)


def _refuse_method(incoming: Incoming, reply: Reply, allowed: str) -> None:
    reply.extra = {"allow": allowed}
    reply.refuse(ApiError(405, f"{incoming.method} {incoming.path}: Method Not Allowed"))


def _json(value: Any, status: int = 200) -> tuple[int, Mapping[str, str], bytes]:
    return status, JSON, msgspec.json.encode(value)


def _version() -> tuple[int, Mapping[str, str], bytes]:
    return _json({"version": baton.__version__})


def _dashboard() -> tuple[int, Mapping[str, str], bytes]:
    # The page is one file with its style and script in it, and asks this router only.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
    headers = {"content-type": "text/html; charset=utf-8", "content-security-policy": policy}
    return 200, headers, PAGE.encode()
