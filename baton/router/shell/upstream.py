"""One leg: a request to one engine, from the connection to the first piece of its answer, within deadlines.

An answer that is not streamed is read whole before the caller has it; of a stream the first piece has
arrived. A failure before that is a `LegFailure` raised on entry, while nothing has been sent to the client
and another engine can be tried. Leaving the context ends the leg: the connection of a leg that is left early
is closed, and the engine aborts the request.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from baton.router.answers import LegAnswer
from baton.router.errors import LegFailure
from baton.router.fleet import Engine
from baton.router.settings import RouterSettings
from baton.router.shell.probes import EngineWait
from baton.router.shell.sending import send

# Below the 5 s after which uvicorn closes an idle connection, so that we never send into a closing one.
KEEPALIVE_S = 2.0


@dataclass(frozen=True, slots=True)
class LegRequest:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    wait_s: float  # For a whole answer, or for the first piece of a stream.
    deadline_s: float  # Of all of it, on `time.monotonic`.


@dataclass(frozen=True, slots=True)
class Answering:
    """An engine's answer: whole in `head`, or the rest of the stream in `rest`, which raises LegFailure."""

    head: LegAnswer
    rest: AsyncGenerator[bytes, None] | None


class Upstream:
    def __init__(self, client: httpx.AsyncClient, settings: RouterSettings) -> None:
        self._client = client
        self._settings = settings
        self._httpx_timeouts = httpx.Timeout(
            connect=settings.timeouts.connect_s,
            pool=settings.timeouts.connect_s,
            read=None,  # Ours: one deadline over the whole wait, not one per read.
            write=None,
        )

    @asynccontextmanager
    async def open(self, engine: Engine, leg: LegRequest) -> AsyncIterator[Answering]:
        """Raises LegFailure."""
        request = self._client.build_request(
            leg.method,
            engine.address + leg.path,
            # Errors have to be inserted into streams, and whole events cut: no compression on this hop.
            headers={**leg.headers, "accept-encoding": "identity"},
            content=leg.body,
            timeout=self._httpx_timeouts,
        )
        response: httpx.Response | None = None
        answer: Answering | None = None
        wait_s = _until(leg.deadline_s, leg.wait_s)
        waiting = EngineWait(engine, wait_s)
        try:
            try:
                async with waiting:
                    response = await send(self._client, request)
                    answer = await self._begin(engine, response, leg.deadline_s)
            except (TimeoutError, httpx.HTTPError) as error:
                raise _failure(engine, error, f"in {wait_s:.3g} s", waiting) from error
            yield answer
        finally:
            if answer is not None and answer.rest is not None:
                await answer.rest.aclose()
            if response is not None:
                await response.aclose()

    async def _begin(self, engine: Engine, response: httpx.Response, deadline_s: float) -> Answering:
        chunks = response.aiter_raw()
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        if not is_stream or response.status_code >= 400:
            body = await self._read_whole(engine, chunks)
            return Answering(LegAnswer(response.status_code, response.headers, body), None)
        first = await anext(chunks, None)
        if first is None:
            raise LegFailure("broken", engine.url, "ended the stream before its first event", was_sent=True)
        head = LegAnswer(response.status_code, response.headers, first, is_stream=True)
        return Answering(head, self._rest(engine, chunks, deadline_s))

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
        """Raises LegFailure."""
        while True:
            wait_s = _until(deadline_s, self._settings.timeouts.idle_s)
            waiting = EngineWait(engine, wait_s)
            try:
                async with waiting:
                    chunk = await anext(chunks, None)
            except (TimeoutError, httpx.HTTPError) as error:
                raise _failure(engine, error, f"for {wait_s:.3g} s in a stream", waiting) from error
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
