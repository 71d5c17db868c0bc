"""Legs in tasks of their own, so that two can run side by side and the loser be cancelled.

    DecodeLeg    opened: D's answer whole, or the first piece of its stream, whose rest the caller reads
    PrefillLeg   outcome: what P's answer means, in a stream as soon as its first token is there
                 rest: what P's stream said behind it, which is little, and wanted only if P said it all

`cancel` ends a leg in whatever state, towards the engine too. Futures never hold exceptions: a failure is a
result like any other, and a leg that nobody waits for any more leaves no complaint behind.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol, TypeVar

from baton.core.errors import PeerError
from baton.router.errors import LegFailure
from baton.router.first_token import FirstToken, FirstTokenReader
from baton.router.fleet import Engine
from baton.router.judge import FirstSaid, Prefilled, PrefillOutcome, read_prefill
from baton.router.sse import EventSplitter
from baton.router.upstream import LegAnswer, LegRequest, Upstream

logger = logging.getLogger(__name__)

Read = TypeVar("Read", covariant=True)

MAX_REST_BYTES = 1 << 20  # Token counts and [DONE].


class _Leg:
    def __init__(self, upstream: Upstream, engine: Engine, request: LegRequest) -> None:
        self.engine = engine
        self.started_at_s = time.monotonic()
        self.was_alone = not engine.in_flight  # At its start.
        self._upstream = upstream
        self._request = request
        self._task: asyncio.Task[Any] | None = None

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def wait_closed(self) -> None:
        """After `cancel`: until the engine has been left, too."""
        if self._task is not None:
            await asyncio.wait({self._task})


class DecodeLeg(_Leg):
    def __init__(self, upstream: Upstream, engine: Engine, request: LegRequest) -> None:
        super().__init__(upstream, engine, request)
        self.opened: asyncio.Future[LegAnswer | LegFailure] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name=f"decode leg at {engine.url}")
        self._task.add_done_callback(self._hear)

    async def _run(self) -> None:
        try:
            async with self._upstream.open(self.engine, self._request) as answer:
                _settle(self.opened, answer)
                await asyncio.Event().wait()  # Until it is closed; it is read from outside.
        except LegFailure as failure:
            _settle(self.opened, failure)

    def _hear(self, task: asyncio.Task[Any]) -> None:
        _settle(self.opened, _end_of(task, self.engine))


class PrefillLeg(_Leg):
    def __init__(
        self,
        upstream: Upstream,
        engine: Engine,
        request: LegRequest,
        *,
        says_first_token: bool = False,
        shows_token_ids: bool = False,
        keeps_answer: bool = False,
        on_lent: Callable[[Engine, Mapping[str, Any]], None],
    ) -> None:
        """`on_lent` is called as soon as P has lent, also if the request has ended meanwhile."""
        super().__init__(upstream, engine, request)
        self._on_lent = on_lent
        self._keeps_answer = keeps_answer
        self._says_first_token = says_first_token
        self._shows_token_ids = shows_token_ids
        loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[PrefillOutcome | LegFailure] = loop.create_future()
        self.rest: asyncio.Future[bytes | LegFailure] = loop.create_future()
        self.lent: Mapping[str, Any] | None = None  # `kv_transfer_params` of P's answer, once it is there.
        self._task = asyncio.create_task(self._run(), name=f"prefill leg at {engine.url}")
        self._task.add_done_callback(self._hear)

    async def _run(self) -> None:
        try:
            async with self._upstream.open(self.engine, self._request) as answer:
                await self._read(answer)
        except LegFailure as failure:
            _settle(self.outcome, failure)
            _settle(self.rest, failure)

    async def _read(self, answer: LegAnswer) -> None:
        if answer.chunks is None:
            try:
                outcome = read_prefill(
                    answer, may_be_complete=self._says_first_token, is_kept=self._keeps_answer
                )
            except PeerError as error:
                raise LegFailure("broken", self.engine.url, str(error), was_sent=True) from error
            self._settle_outcome(outcome)
        elif not self._says_first_token:
            raise LegFailure(
                "broken", self.engine.url, "streamed an answer that was not asked to be one", was_sent=True
            )
        else:
            reader = FirstTokenReader(shows_token_ids=self._shows_token_ids)
            first, events = await read_beginning(self.engine, answer, reader)
            self._settle_outcome(FirstSaid(answer, first))
            _settle(self.rest, await self._read_rest(events, answer.chunks))

    def _settle_outcome(self, outcome: PrefillOutcome) -> None:
        match outcome:
            case Prefilled(ticket=params) | FirstSaid(first=FirstToken(params=params)) if params:
                self.lent = params
                self._on_lent(self.engine, params)
        _settle(self.outcome, outcome)

    async def _read_rest(self, events: EventSplitter, chunks: AsyncIterator[bytes]) -> bytes:
        rest = bytearray()

        def take() -> None:
            while (event := events.next()) is not None:
                rest.extend(event)
                if len(rest) > MAX_REST_BYTES:
                    raise PeerError("does not stop after one token")

        try:
            take()
            async for chunk in chunks:
                events.push(chunk)
                take()
            events.finish()
            take()
        except PeerError as error:
            raise LegFailure("broken", self.engine.url, str(error), was_sent=True) from error
        return bytes(rest)

    def _hear(self, task: asyncio.Task[Any]) -> None:
        end = _end_of(task, self.engine)
        _settle(self.outcome, end)
        _settle(self.rest, end)


class _Reader(Protocol[Read]):
    def look_at(self, event: bytes, /) -> Read | None: ...


async def read_beginning(
    engine: Engine, answer: LegAnswer, reader: _Reader[Read]
) -> tuple[Read, EventSplitter]:
    """Reads a stream until the reader has found what it looks for; the splitter has what follows.

    Raises LegFailure.
    """
    assert answer.chunks is not None
    events = EventSplitter()
    events.push(answer.body)
    try:
        while True:
            while (event := events.next()) is not None:
                if (found := reader.look_at(event)) is not None:
                    return found, events
            chunk = await anext(answer.chunks, None)
            if chunk is None:
                raise PeerError("the stream ended without a first token")
            events.push(chunk)
    except PeerError as error:
        raise LegFailure("broken", engine.url, str(error), was_sent=True) from error


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _end_of(task: asyncio.Task[Any], engine: Engine) -> LegFailure:
    """For whoever still waits when the task is over: our own fault, or our own wish."""
    fault = None if task.cancelled() else task.exception()
    if fault is not None:
        logger.error("%s failed", task.get_name(), exc_info=fault)
    return LegFailure("broken", engine.url, f"the leg was ended: {fault!r}", was_sent=True)
