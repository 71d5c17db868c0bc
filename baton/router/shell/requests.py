"""Drives the machine of one request: events of legs, timers and the client in, effects out.

Each leg has a task that reports events to the request's queue. One task takes the events in order and carries
out the effects. So a client that reads slowly delays its own legs only: a leg waits while PIECES_MAX of its
pieces are in the queue. Pieces that follow each other in the queue become one.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec
from starlette.types import Send as SendMessage

from baton.router.answers import LegAnswer, end_to_end, is_engines_fault
from baton.router.errors import ClientGone, LegFailure, RouterError
from baton.router.events import ClientGone as ClientHasGone
from baton.router.events import (
    Close,
    Closed,
    Count,
    Effect,
    Event,
    Failed,
    GiveBack,
    Head,
    Hold,
    HoldOver,
    Leg,
    Meet,
    Met,
    Opened,
    Over,
    Piece,
    Send,
    Stopped,
    StreamEnded,
)
from baton.router.fleet import Engine
from baton.router.fleet_view import FleetView
from baton.router.machine import Machine
from baton.router.shell.incoming import Incoming
from baton.router.shell.introductions import Introducer
from baton.router.shell.loans import LoanReturns
from baton.router.shell.metrics import RouterMetrics
from baton.router.shell.upstream import LegRequest, Upstream

logger = logging.getLogger(__name__)

PIECES_MAX = 16  # Of one leg, that wait for the client.
DOES_NOT_READ = "does not read its answer"


class Requests:
    """What requests share."""

    def __init__(
        self,
        view: FleetView,
        upstream: Upstream,
        metrics: RouterMetrics,
        introducer: Introducer,
        loans: LoanReturns,
    ) -> None:
        self.view = view
        self.upstream = upstream
        self.metrics = metrics
        self.introducer = introducer
        self.loans = loans

    def leg(self, incoming: Incoming, body: bytes, wait_s: float) -> LegRequest:
        deadline_s = incoming.received_at_s + self.view.settings.timeouts.total_s
        return LegRequest(incoming.method, incoming.path, incoming.headers, body, wait_s, deadline_s)

    async def forward(self, incoming: Incoming, send: SendMessage) -> int:
        """To a decode engine as it is: what has no KV to hand over (`/v1/models`, `/tokenize`).

        Returns the status that the client got. Raises RouterError if nothing was sent.
        """
        view, now_s = self.view, asyncio.get_running_loop().time
        routed = view.route(b"")
        tried: list[Engine] = []
        failure: LegFailure | None = None
        while (engine := view.choose("decode", routed, tried, now_s())) is not None:
            tried.append(engine)
            try:
                answer = await self._ask(engine, incoming)
            except LegFailure as caught:
                logger.warning("%s: %s: %s", incoming.request_id, incoming.path, caught)
                failure = caught
                continue
            if not (is_engines_fault(answer) and view.choose("decode", routed, tried, now_s())):
                duration_s = time.monotonic() - incoming.received_at_s
                self.metrics.count(Count("first_byte_seconds", value=duration_s))
                headers = {
                    **end_to_end(answer.headers),
                    "x-request-id": incoming.request_id,
                    "content-length": str(len(answer.body)),
                }
                await send(start_message(answer.status, headers))
                await send(body_message(answer.body, is_last=True))
                return answer.status
        raise view.no_engine("decode", failure)

    async def _ask(self, engine: Engine, incoming: Incoming) -> LegAnswer:
        fleet, outcome = self.view.fleet, "cancelled"
        fleet.note_start(engine)
        leg = self.leg(incoming, incoming.body, self.view.settings.timeouts.first_byte_s)
        try:
            async with self.upstream.open(engine, leg) as answer:
                outcome = str(answer.head.status)
                fleet.note_answer(engine, answer.head.status, asyncio.get_running_loop().time())
                if answer.rest is not None:
                    raise RouterError.gateway("the engine streamed an answer that was not asked to be one")
                return answer.head
        except LegFailure as failure:
            outcome = failure.kind
            fleet.note_failure(engine, failure, asyncio.get_running_loop().time())
            raise
        finally:
            fleet.note_end(engine)
            self.metrics.count(Count("legs", (engine.role, engine.url, outcome)))


class RequestDriver:
    """One request on its way. `run` it; `client_gone` and `stop` end it early."""

    def __init__(self, requests: Requests, machine: Machine, incoming: Incoming, send: SendMessage) -> None:
        self._requests, self._machine, self._incoming, self._send = requests, machine, incoming, send
        self._loop = asyncio.get_running_loop()
        self._idle_s = requests.view.settings.timeouts.idle_s
        self._events: deque[Event] = deque()  # Bounded by `_room`.
        self._has_events = asyncio.Event()
        self._room: dict[Leg, asyncio.Semaphore] = {}
        self._legs: dict[Leg, asyncio.Task[None]] = {}  # Until the machine has been told of their end.
        self._others: set[asyncio.Task[None]] = set()  # Questions to engines, and timers.
        self._is_client_gone = False
        self._does_not_read = False

    def client_gone(self) -> None:
        self._is_client_gone = True
        self._put(ClientHasGone())

    def stop(self) -> None:
        """The router's time is up: the client gets an error, or an error event."""
        self._put(Stopped())

    async def run(self) -> int:
        """Return the status that the client got. Raises RouterError if nothing was sent, ClientGone."""
        over: Over | None = None
        try:
            effects = self._machine.begin(self._loop.time())
            while True:
                for effect in effects:
                    over = await self._carry_out(effect) or over
                if over is not None:
                    break
                effects = self._machine.on(await self._take(), self._loop.time())
        finally:
            await self._clear()
        if self._does_not_read:
            raise ClientGone(DOES_NOT_READ)
        if over.error is not None:
            raise over.error
        assert over.status is not None
        return over.status

    def _put(self, event: Event) -> None:
        self._events.append(event)
        self._has_events.set()

    async def _take(self) -> Event:
        while not self._events:
            self._has_events.clear()
            await self._has_events.wait()
        event = self._events.popleft()
        if isinstance(event, Closed):
            del self._legs[event.leg]
        if not isinstance(event, Piece):
            return event
        leg, pieces = event.leg, [event.data]
        while self._events and isinstance(event := self._events[0], Piece) and event.leg is leg:
            self._events.popleft()
            pieces.append(event.data)
        for _ in pieces:
            self._room[leg].release()
        return Piece(leg, b"".join(pieces))

    async def _clear(self) -> None:
        """Leave nothing behind, also if this task is cancelled or has failed."""
        tasks = [*self._legs.values(), *self._others]
        for task in tasks:
            task.cancel()
        effects = list(self._machine.on(ClientHasGone(), self._loop.time())) if self._legs else []
        for leg in list(self._legs):
            effects += self._machine.on(Closed(leg), self._loop.time())
        for effect in effects:
            if isinstance(effect, GiveBack | Count):
                self._note(effect)
        if tasks:
            await asyncio.wait(tasks)

    async def _carry_out(self, effect: Effect) -> Over | None:
        match effect:
            case Leg():
                self._room[effect] = asyncio.Semaphore(PIECES_MAX)
                task = asyncio.create_task(
                    self._run_leg(effect), name=f"{effect.role} leg at {effect.engine.url}"
                )
                self._legs[effect] = task
                task.add_done_callback(lambda _: self._put(Closed(effect)))
            case Close(leg):
                self._legs[leg].cancel()
            case Meet(engine):
                self._start(self._meet(engine))
            case Hold():
                self._start(self._hold(effect))
            case Head(status, headers):
                await self._tell(start_message(status, headers))
            case Send(data, is_last):
                await self._tell(body_message(data, is_last=is_last))
            case GiveBack() | Count():
                self._note(effect)
            case Over():
                return effect
        return None

    def _note(self, effect: GiveBack | Count) -> None:
        match effect:
            case GiveBack(engine, params):
                self._requests.loans.give_back(engine, params)
            case Count():
                self._requests.metrics.count(effect)

    async def _tell(self, message: dict[str, Any]) -> None:
        """A client that does not read holds D's blocks, so it has a deadline too."""
        if self._is_client_gone:
            return
        try:
            async with asyncio.timeout(self._idle_s):
                await self._send(message)
        except TimeoutError:
            self._does_not_read = True
            self.client_gone()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)

    async def _meet(self, engine: Engine) -> None:
        await self._requests.introducer.refresh(engine)
        self._put(Met())

    async def _hold(self, hold: Hold) -> None:
        await asyncio.sleep(hold.seconds)
        self._put(HoldOver(hold.transfer_id))

    async def _run_leg(self, leg: Leg) -> None:
        put = self._put
        request = self._requests.leg(self._incoming, msgspec.json.encode(leg.body), leg.wait_s)
        try:
            async with self._requests.upstream.open(leg.engine, request) as answer:
                put(Opened(leg, answer.head))
                if answer.rest is not None:
                    async for piece in answer.rest:
                        await self._room[leg].acquire()
                        put(Piece(leg, piece))
                    put(StreamEnded(leg))
        except LegFailure as failure:
            put(Failed(leg, failure))
        except Exception as error:
            logger.exception("the %s leg at %s failed", leg.role, leg.engine.url)
            put(
                Failed(
                    leg, LegFailure("broken", leg.engine.url, f"the leg was ended: {error!r}", was_sent=True)
                )
            )


def start_message(status: int, headers: Mapping[str, str]) -> dict[str, Any]:
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [
            (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
        ],
    }


def body_message(data: bytes, *, is_last: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": not is_last}
