"""The router as an ASGI application.

A client that goes away, in whatever phase, ends its request at once: `_attend` runs the work beside a
listener on the connection and cancels whichever is left over. Cancelled work closes its leg; the engine
aborts.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

import baton
from baton.core.errors import UserError
from baton.http.bodies import Bodies
from baton.http.errors import ApiError
from baton.http.gate import Gate, send_error
from baton.http.workers import WorkerPool
from baton.router import machine
from baton.router.answers import end_to_end
from baton.router.errors import ClientGone, RouterError, error_event
from baton.router.fleet import Fleet
from baton.router.fleet_view import FleetView
from baton.router.legs import parse_body
from baton.router.machine import CLIENT_CLOSED_REQUEST, Machine
from baton.router.pairs import Pairs
from baton.router.settings import RouterSettings
from baton.router.shell.dashboard import PAGE
from baton.router.shell.incoming import Incoming
from baton.router.shell.introductions import Introducer
from baton.router.shell.loans import LoanReturns
from baton.router.shell.metrics import RouterMetrics
from baton.router.shell.probes import Prober, ProberDied
from baton.router.shell.requests import RequestDriver, Requests
from baton.router.shell.upstream import KEEPALIVE_S, Upstream
from baton.router.turns import SESSION_HEADER, TurnTable

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
_GOOD_REQUEST_ID = re.compile(r"[!-~]{1,256}")
LAST_PROBES_S = 0.5  # For probes in flight when the router is told to stop.
CLOSING_S = 5.0  # For legs to be closed, once the client has its answer.
CHAT_PATH = "/v1/chat/completions"


def create_app(settings: RouterSettings) -> Starlette:
    return Router(settings).app()


class Router:
    """Owns what one router consists of, and its life."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._client = httpx.AsyncClient(
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEPALIVE_S
            ),
            headers=_engine_key(settings),
            trust_env=False,  # A proxy of the environment must not get between us and our engines.
            follow_redirects=False,
        )
        self.fleet = Fleet(settings)
        self._pairs = Pairs()
        self._metrics = RouterMetrics(self.fleet, self._pairs)
        upstream = Upstream(self._client, settings)
        timeout_s = settings.probe.timeout_s
        self._introducer = Introducer(self._client, self.fleet, timeout_s, pushes=settings.mode == "push")
        self._loans = LoanReturns(self._client, self._metrics, timeout_s)
        self._view = FleetView(settings, self.fleet, self._pairs, TurnTable(self._loans.give_back))
        self._requests = Requests(self._view, upstream, self._metrics, self._introducer, self._loans)
        self._prober = Prober(self.fleet, self._client, settings.probe, self._introducer.hear_healthy)
        self._workers = WorkerPool()
        self._bodies = Bodies(settings.doors, self._workers)
        self._fault: ProberDied | None = None
        self._num_requests = 0
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._has_to_end = asyncio.Event()  # Requests that run are ended now.

    def app(self, *, has_admin_port: bool = False) -> Starlette:
        """The application of the main port; its lifespan is the router's. See `admin_app`."""
        return Starlette(
            middleware=self._gate,
            routes=[
                Route("/v1/completions", _Endpoint(self, is_handoff=True), methods=["POST"]),
                Route("/v1/chat/completions", _Endpoint(self, is_handoff=True), methods=["POST"]),
                Route("/v1/models", _Endpoint(self), methods=["GET"]),
                Route("/tokenize", _Endpoint(self), methods=["POST"]),
                Route("/detokenize", _Endpoint(self), methods=["POST"]),
                Route("/health", self._health),
                Route("/version", _version),
                *(() if has_admin_port else self._admin_routes),
            ],
            lifespan=self._life,
            exception_handlers={HTTPException: _refuse_http},
        )

    def admin_app(self) -> Starlette:
        """Metrics, the fleet's state and the dashboard, for a port of their own."""
        return Starlette(
            middleware=self._gate,
            routes=self._admin_routes,
            exception_handlers={HTTPException: _refuse_http},
        )

    @property
    def _gate(self) -> list[Middleware]:
        return [
            Middleware(
                Gate,
                api_keys=self._settings.doors.api_keys,
                allowed_hosts=self._settings.checked_hosts,
            )
        ]

    @property
    def _admin_routes(self) -> list[Route]:
        return [
            Route("/metrics", self._exposition),
            Route("/fleet", self._fleet_state),
            Route("/", self._dashboard),
        ]

    @asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        watch = asyncio.create_task(self._prober.run(), name="baton-router-prober")
        watch.add_done_callback(self._hear_prober)
        try:
            yield
        finally:
            self._prober.stop()
            await asyncio.wait({watch}, timeout=LAST_PROBES_S)
            watch.cancel()
            with suppress(asyncio.CancelledError, ExceptionGroup):  # Heard of already, see `_hear_prober`.
                await watch
            await self._introducer.close()
            await self._loans.close()
            await self._client.aclose()
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
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_S):
                await self._is_idle.wait()

    def end_requests(self) -> None:
        self._is_draining = True
        self._has_to_end.set()

    async def _health(self, request: Request) -> Response:
        if self._is_draining:
            return JSONResponse(
                {"status": "draining", "reason": "the router is shutting down"}, status_code=503
            )
        if self._fault is not None:
            return JSONResponse({"status": "broken", "reason": str(self._fault)}, status_code=500)
        if not self.fleet.can_serve:
            return JSONResponse(
                {"status": "unavailable", "reason": "no decode engine has answered"}, status_code=503
            )
        return JSONResponse({"status": "ok"})

    async def _exposition(self, request: Request) -> Response:
        return Response(self._metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _fleet_state(self, request: Request) -> Response:
        state = {
            "mode": self._settings.mode,
            "decode_leg": self._settings.decode_leg,
            "first_token": self._settings.first_token,
            "policy": self._settings.policy,
            "on_prefill_failure": self._settings.on_prefill_failure,
            "in_flight": self._num_requests,
            "engines": self.fleet.snapshot(),
            "pairs": self._pairs.snapshot(self.fleet.engines, asyncio.get_running_loop().time()),
        }
        return Response(msgspec.json.encode(state), media_type="application/json")

    async def _dashboard(self, request: Request) -> Response:
        # The page is one file with its style and script in it, and talks to nobody but this router.
        policy = (
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        )
        return HTMLResponse(PAGE, headers={"content-security-policy": policy})

    async def serve(self, scope: Scope, receive: Receive, send: Send, *, is_handoff: bool) -> None:
        headers = Headers(scope=scope)
        request_id = headers.get(REQUEST_ID, "")
        if not _GOOD_REQUEST_ID.fullmatch(request_id):
            request_id = str(uuid.uuid4())
        wire = _Wire(send)
        self._num_requests += 1
        self._is_idle.clear()
        self._metrics.in_flight.set(self._num_requests)
        status = CLIENT_CLOSED_REQUEST
        try:
            status = await self._answer(scope, headers, request_id, receive, wire, is_handoff=is_handoff)
        except UserError as error:
            status = await _refuse(wire, ApiError.of_user(error), request_id)
        except ApiError as error:
            status = await _refuse(wire, error, request_id)
        except ClientGone as error:
            logger.info("%s: client: %s", request_id, error)
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._is_idle.set()
            self._metrics.in_flight.set(self._num_requests)
            self._metrics.requests.labels(str(status)).inc()

    async def _answer(
        self,
        scope: Scope,
        headers: Headers,
        request_id: str,
        receive: Receive,
        wire: "_Wire",
        *,
        is_handoff: bool,
    ) -> int:
        if self._is_draining:
            raise RouterError.unavailable("the router is shutting down")
        if self._num_requests > self._settings.max_requests:
            raise RouterError.unavailable(f"{self._settings.max_requests} requests are in flight; try again")
        async with self._bodies.read(headers, receive) as raw:
            body = parse_body(raw) if is_handoff else {}
        query = scope["query_string"].decode("latin-1")
        incoming = Incoming(
            method=scope["method"],
            path=scope["path"] + (f"?{query}" if query else ""),
            headers={**self._passed_on(headers), REQUEST_ID: request_id},
            request_id=request_id,
            body=raw,
            received_at_s=time.monotonic(),
        )
        if not is_handoff:
            return await self._attend(self._requests.forward(incoming, wire), receive, wire)
        request = machine.Request(
            id=request_id,
            body=body,
            is_chat=scope["path"] == CHAT_PATH,
            session=headers.get(SESSION_HEADER),
            received_at_s=asyncio.get_running_loop().time(),
        )
        driver = RequestDriver(self._requests, Machine(self._view, request), incoming, wire)
        return await self._attend(driver.run(), receive, wire, driver)

    async def _attend(
        self,
        work: Coroutine[Any, Any, int],
        receive: Receive,
        wire: "_Wire",
        driver: RequestDriver | None = None,
    ) -> int:
        """Return the work's result. It ends early if the client goes away, or the router has to end."""
        working = asyncio.create_task(work)
        listening = asyncio.create_task(_wait_disconnect(receive))
        ending = asyncio.create_task(self._has_to_end.wait())
        try:
            await asyncio.wait({working, listening, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and wire.has_ended:
                # A server calls that a disconnect too. What is left of the work is to close its legs.
                await asyncio.wait({working}, timeout=CLOSING_S)
            if not working.done() and driver is not None:
                driver.client_gone() if listening.done() else driver.stop()
                await asyncio.wait({working}, timeout=CLOSING_S)
            if listening.done() and not wire.has_ended:
                raise ClientGone("closed its connection")
            if not working.done():
                working.cancel()
                await asyncio.wait({working})
                return await _cut_short(wire)
            return working.result()
        finally:
            for task in (working, listening, ending):
                task.cancel()
            await asyncio.gather(working, listening, ending, return_exceptions=True)

    def _passed_on(self, headers: Headers) -> dict[str, str]:
        """A key for this router, or one that the engines' replaces, is not for engines."""
        passed = end_to_end(headers)
        if self._settings.doors.api_keys or self._settings.engine_api_key is not None:
            passed.pop("authorization", None)
        return passed


def _engine_key(settings: RouterSettings) -> dict[str, str]:
    key = settings.engine_api_key
    return {} if key is None else {"authorization": f"Bearer {key}"}


class _Endpoint:
    """An ASGI application, so that starlette leaves the connection to us."""

    def __init__(self, router: Router, *, is_handoff: bool = False) -> None:
        self._router = router
        self._is_handoff = is_handoff

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._router.serve(scope, receive, send, is_handoff=self._is_handoff)


class _Wire:
    """`send`, remembering whether the answer has begun, and whether all of it has been sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_started = False
        self.has_ended = False

    async def __call__(self, message: Message) -> None:
        self.has_started = True
        await self._send(message)
        self.has_ended = message["type"] == "http.response.body" and not message.get("more_body", False)


async def _refuse(wire: _Wire, error: ApiError, request_id: str) -> int:
    assert not wire.has_started, "an answer that has begun can only be ended by its stream"
    await send_error(wire, error, {REQUEST_ID: request_id})
    return error.status


async def _cut_short(wire: _Wire) -> int:
    """Raises RouterError if nothing has been sent."""
    message = "the router is shutting down"
    if not wire.has_started:
        raise RouterError.unavailable(message)
    if not wire.has_ended:
        await wire(
            {"type": "http.response.body", "body": error_event(message, status=503), "more_body": False}
        )
    return 200  # Only a stream can be here: what is whole is sent at once.


async def _refuse_http(request: Request, error: Exception) -> Response:
    """A path or a method that the router does not have."""
    assert isinstance(error, HTTPException)
    known = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return JSONResponse(msgspec.to_builtins(known.body()), status_code=known.status, headers=error.headers)


async def _version(request: Request) -> Response:
    return JSONResponse({"version": baton.__version__})


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
