"""Drives the machine of one request: events of legs, timers and the client in, effects out.

All of it happens in the calls of the event loop that bring the events; a request has no task. While the
client does not read, no leg is read either. So a client that reads slowly delays its own legs only.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

import msgspec

from baton.http.errors import ApiError
from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.view import FleetView
from baton.router.request.events import (
    ClientGone,
    Close,
    Closed,
    Count,
    Doubt,
    Effect,
    Event,
    Found,
    Head,
    Hold,
    HoldOver,
    Leg,
    Look,
    Meet,
    Met,
    Opened,
    Over,
    Piece,
    Queue,
    Send,
    Stopped,
    TakeBack,
)
from baton.router.request.learning import settle
from baton.router.request.machine import Machine
from baton.router.request.pass_through import PassThrough
from baton.router.request.reply import CLIENT_CLOSED_REQUEST
from baton.router.request.timeline import Recorder
from baton.router.shell.admission_queue import AdmissionQueue
from baton.router.shell.client_http import DEFECT, Reply
from baton.router.shell.index_client import IndexClient
from baton.router.shell.introductions import Introducer
from baton.router.shell.legs import NO_HEADERS, Ask, Upstream, WireLeg
from baton.router.shell.loans import LoanReturns
from baton.router.shell.metrics import RouterMetrics
from baton.router.shell.tasks import Tasks
from baton.router.values.errors import RouterError
from baton.router.values.legs import with_context, with_kept

logger = logging.getLogger(__name__)

# Gaps between pieces that are observed together, while the processor's caches have the metric's code.
GAPS_AT_ONCE = 16


class Requests:
    """Objects that all requests share."""

    def __init__(
        self,
        view: FleetView,
        upstream: Upstream,
        metrics: RouterMetrics,
        introducer: Introducer,
        loans: LoanReturns,
        index: IndexClient | None = None,
    ) -> None:
        """`index`: None if the settings name no KV events."""
        self.view = view
        self.queue = AdmissionQueue(view)
        self.upstream = upstream
        self.metrics = metrics
        self.introducer = introducer
        self.loans = loans
        self.index = index

    def ask(self, doubt: Doubt) -> None:
        """Settle the doubt while the request goes on."""
        loop, engines = asyncio.get_running_loop(), (doubt.lent.engine, doubt.used.engine)

        def settled() -> None:
            outcome = settle(self.view, doubt, loop.time())
            self.metrics.count(Count("handoffs", (engines[0].url, engines[1].url, outcome)))

        self.introducer.refresh_all(engines, settled)


class RequestDriver:
    """One request on its way. Implements `Handler`."""

    def __init__(
        self, requests: Requests, machine: Machine | PassThrough, ask: Ask, reply: Reply, recorder: Recorder
    ) -> None:
        self._requests, self._machine, self._ask, self._reply = requests, machine, ask, reply
        self._recorder = recorder
        self._on_over: Callable[[int], None] = lambda status: None
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event | None] = deque()  # None: the request begins.
        self._is_running = self._is_over = self._is_paused = False
        self._legs: dict[Leg, WireLeg] = {}
        self._tasks = Tasks()  # Questions to engines.
        self._hold: asyncio.TimerHandle | None = None

    def begin(self, on_over: Callable[[int], None]) -> None:
        """`on_over` is called once, with the status that the client got."""
        self._on_over = on_over
        self._put(None)

    def stop(self) -> None:
        """The router's time is up: the client gets an error, or an error event."""
        self._put(Stopped())

    # --- Called by the client's connection

    def client_gone(self) -> None:
        self._put(ClientGone())

    def pause(self) -> None:
        self._is_paused = True
        for leg in self._legs.values():
            leg.pause()

    def resume(self) -> None:
        self._is_paused = False
        for leg in self._legs.values():
            leg.resume()

    # --- Events and effects

    def _put(self, event: Event | None) -> None:
        """Events that come while effects are carried out have their turn after these."""
        if self._is_over:
            return
        self._events.append(event)
        if self._is_running:
            return
        self._is_running = True
        try:
            self._run()
        except Exception:
            logger.exception("a request has failed")
            self._clear()
            self._end(self._machine_has_failed())
        finally:
            self._is_running = False
        self._reply.flush()

    def _run(self) -> None:
        while self._events and not self._is_over:
            event, now_s = self._events.popleft(), self._loop.time()
            if isinstance(event, Piece):
                pass  # Most events are.
            elif isinstance(event, Closed):
                del self._legs[event.leg]
                self._recorder.leg_ended(event.leg, now_s)
            elif isinstance(event, Opened):
                self._recorder.leg_answered(event.leg, event.answer, now_s)
                if self._is_paused:
                    self._legs[event.leg].pause()
            elif isinstance(event, Found):
                self._recorder.mark("looked_up", "", now_s)
            effects = self._machine.begin(now_s) if event is None else self._machine.on(event, now_s)
            for effect in effects:
                self._carry_out(effect, now_s)

    def _carry_out(self, effect: Effect, now_s: float) -> None:
        match effect:
            case Send(data, is_last):
                self._reply.write(data, is_last=is_last)
                self._recorder.sent(now_s)
                if len(self._recorder.gaps_s) >= GAPS_AT_ONCE:
                    self._observe_gaps()
            case Count():
                self._requests.metrics.count(effect)
                self._recorder.counted(effect, now_s)
            case Leg():
                self._open(effect, now_s)
            case Close(leg):
                self._legs[leg].close()
            case Head(status, headers):
                self._reply.start(status, headers)
            case Queue(ticket, displaced):
                ticket.tell = self._put
                self._requests.queue.wait(displaced)
            case Look():
                self._tasks.start(self._look(effect), "a prompt is not looked up")
            case Meet(engine):
                self._tasks.start(self._meet(engine), "an engine is not asked what it is")
            case Hold(seconds, transfer_id):
                if self._hold is not None:
                    self._hold.cancel()  # The timer belongs to an earlier attempt.
                self._hold = self._loop.call_later(seconds, self._put, HoldOver(transfer_id))
            case Doubt():
                self._requests.ask(effect)
            case TakeBack(engine, params):
                self._requests.loans.take_back(engine, params)
            case Over(status, error):
                if error is not None:
                    report_refusal(self._requests.view.fleet, error, self._machine.request_id)
                    self._reply.refuse(error)
                    status = error.status
                assert status is not None
                self._end(status)

    def _open(self, leg: Leg, now_s: float) -> None:
        wire = self._legs[leg] = WireLeg(self._requests.upstream, leg, self._put)
        span = self._recorder.leg_sent(leg, now_s)
        headers = NO_HEADERS if span is None else span.headers
        body = leg.raw
        if body is None:
            asked = with_kept(leg.body, self._ask.kept)
            body = msgspec.json.encode(with_context(asked, headers or self._ask.headers))
        wire.start(self._ask, body, headers)

    async def _look(self, look: Look) -> None:
        assert self._requests.index is not None
        self._put(await self._requests.index.find(look))

    async def _meet(self, engine: Engine) -> None:
        await self._requests.introducer.refresh(engine)
        self._put(Met())

    # --- The end

    def _end(self, status: int) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._hold is not None:
            self._hold.cancel()
        self._tasks.cancel()
        self._observe_gaps()
        self._recorder.streamed(self._machine.num_output_tokens)
        self._on_over(status)

    def _observe_gaps(self) -> None:
        for gap_s in self._recorder.gaps_s:
            self._requests.metrics.between_pieces.observe(gap_s)
        self._recorder.gaps_s.clear()

    def _clear(self) -> None:
        """The machine has failed: leave its engines, and take back what they have lent."""
        legs, self._legs = self._legs, {}
        for wire in legs.values():
            wire.close()
        self._events.clear()
        try:
            effects = list(self._machine.on(ClientGone(), self._loop.time()))
            for leg in legs:
                effects += self._machine.on(Closed(leg), self._loop.time())
            for effect in effects:
                if isinstance(effect, TakeBack | Count):
                    self._carry_out(effect, self._loop.time())
        except Exception:
            logger.exception("a request that has failed cannot be ended in order")

    def _machine_has_failed(self) -> int:
        """Tell the client. Return the status that it got."""
        reply = self._reply
        if reply.is_gone:
            return CLIENT_CLOSED_REQUEST
        if not reply.has_started:
            reply.refuse(RouterError(500, DEFECT))
            return 500
        if not reply.has_ended:
            reply.write(self._machine.dialect.error_event(DEFECT, status=500), is_last=True)
        return reply.status


def report_refusal(fleet: Fleet, error: ApiError, request_id: str) -> None:
    """Report a refusal to operators, unless the client is at fault."""
    if error.status == 429 or error.status >= 500:
        why = str(error).partition("; try again")[0]  # What follows differs each time.
        fleet.roster.report_event("refusal", None, f"{error.status}: {why}", request_id)
