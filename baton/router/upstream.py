"""One leg: a request to one engine, from the connection to the first piece of its answer, within deadlines.

What is not streamed is read whole before the caller sees it; of a stream the first piece has arrived. Either
way a failure before that is a `LegFailure` raised on entry, while nothing has been said to the client and
another engine may still be tried. Leaving the context ends the leg: a leg left early is closed towards the
engine, which aborts it.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from baton.router.errors import LegFailure
from baton.router.fleet import Engine, EngineWait, Fleet
from baton.router.metrics import RouterMetrics
from baton.router.sending import send
from baton.router.settings import RouterSettings

# Below the 5 s after which uvicorn closes an idle connection, so that we never send into a closing one.
KEEPALIVE_S = 2.0

# RFC 9110, 7.6.1, and what belongs to one connection or is set anew on each hop.
_PER_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "accept-encoding",
        "expect",
        "date",
        "server",
        "x-request-id",
        "x-baton-prompt",
    }
)


def end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers that pass through: not those of one hop, nor those that `Connection` declares to be."""
    named = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    return {name: value for name, value in headers.items() if name.lower() not in _PER_HOP | named}


@dataclass(frozen=True, slots=True)
class LegRequest:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    wait_s: float  # For a whole answer, or for the first piece of a stream.
    deadline_s: float  # Of all of it, on `time.monotonic`.


@dataclass(frozen=True, slots=True)
class LegAnswer:
    """`chunks` is None for an answer that is whole in `body`; else `body` is the stream's first piece."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    chunks: AsyncGenerator[bytes, None] | None


class Upstream:
    def __init__(
        self, client: httpx.AsyncClient, fleet: Fleet, metrics: RouterMetrics, settings: RouterSettings
    ) -> None:
        self._client = client
        self._fleet = fleet
        self._metrics = metrics
        self._settings = settings
        self._httpx_timeouts = httpx.Timeout(
            connect=settings.timeouts.connect_s,
            pool=settings.timeouts.connect_s,
            read=None,  # Ours: one deadline over the whole wait, not one per read.
            write=None,
        )

    @asynccontextmanager
    async def open(self, engine: Engine, leg: LegRequest) -> AsyncIterator[LegAnswer]:
        request = self._client.build_request(
            leg.method,
            engine.address + leg.path,
            # Errors have to be inserted into streams, and whole events cut: no compression on this hop.
            headers={**leg.headers, "accept-encoding": "identity"},
            content=leg.body,
            timeout=self._httpx_timeouts,
        )
        response: httpx.Response | None = None
        answer: LegAnswer | None = None
        outcome = "cancelled"
        wait_s = _until(leg.deadline_s, leg.wait_s)
        waiting = EngineWait(engine, wait_s)
        with self._fleet.using(engine):
            try:
                try:
                    async with waiting:
                        response = await send(self._client, request)
                        answer = await self._first_piece(engine, response, leg.deadline_s)
                except (TimeoutError, httpx.HTTPError) as error:
                    raise _failure(engine, error, f"in {wait_s:.3g} s", waiting) from error
                outcome = str(answer.status)
                self._fleet.note_answer(engine, answer.status)
                yield answer
            except LegFailure as failure:
                outcome = failure.kind
                self._fleet.note_failure(engine, failure)
                raise
            finally:
                self._metrics.legs.labels(engine.role, engine.url, outcome).inc()
                if answer is not None and answer.chunks is not None:
                    await answer.chunks.aclose()
                if response is not None:
                    await response.aclose()

    async def _first_piece(self, engine: Engine, response: httpx.Response, deadline_s: float) -> LegAnswer:
        chunks = response.aiter_raw()
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        if not is_stream or response.status_code >= 400:
            body = await self._read_whole(engine, chunks)
            return LegAnswer(response.status_code, response.headers, body, None)
        first = await anext(chunks, None)
        if first is None:
            raise LegFailure("broken", engine.url, "ended the stream before its first event", was_sent=True)
        return LegAnswer(
            response.status_code, response.headers, first, self._rest(engine, chunks, deadline_s)
        )

    async def _read_whole(self, engine: Engine, chunks: AsyncIterator[bytes]) -> bytes:
        whole = bytearray()
        async for chunk in chunks:
            engine.num_heard += 1
            whole += chunk
            if len(whole) > self._settings.max_answer_bytes:
                limit = f"over {self._settings.max_answer_bytes} bytes"
                failure = LegFailure("too_large", engine.url, f"answered with {limit}", was_sent=True)
                failure.is_noted = True  # The client has asked for it.
                raise failure
        return bytes(whole)

    async def _rest(
        self, engine: Engine, chunks: AsyncIterator[bytes], deadline_s: float
    ) -> AsyncGenerator[bytes, None]:
        """Notes its own failure: whoever reads it turns the failure into an event and goes on."""
        while True:
            wait_s = _until(deadline_s, self._settings.timeouts.idle_s)
            waiting = EngineWait(engine, wait_s)
            try:
                async with waiting:
                    chunk = await anext(chunks, None)
            except (TimeoutError, httpx.HTTPError) as error:
                failure = _failure(engine, error, f"for {wait_s:.3g} s in a stream", waiting)
                self._fleet.note_failure(engine, failure)
                raise failure from error
            if chunk is None:
                return
            yield chunk


def _until(deadline_s: float, wait_s: float) -> float:
    return max(0.0, min(wait_s, deadline_s - time.monotonic()))


def _failure(engine: Engine, error: Exception, waited: str, waiting: EngineWait) -> LegFailure:
    match error:
        case TimeoutError() if waiting.is_given_up:
            failure = LegFailure(
                "ejected", engine.url, "given up, because the engine is silent", was_sent=True
            )
            failure.is_noted = True  # Its probes have counted this.
            return failure
        case httpx.ConnectError() | httpx.ConnectTimeout() | httpx.PoolTimeout():
            why = str(error) or type(error).__name__
            return LegFailure("unreachable", engine.url, f"cannot connect: {why}", was_sent=False)
        case TimeoutError():
            return LegFailure("timeout", engine.url, f"no answer {waited}", was_sent=True)
        case _:
            why = str(error) or type(error).__name__
            return LegFailure("broken", engine.url, f"connection broke: {why}", was_sent=True)
