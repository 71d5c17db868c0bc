"""One request's way through the router (pull mode).

    client --> prefill leg on P --ticket--> decode leg on D --> client

    P unreachable, broken, late, 5xx: once more on another P, else D prefills by itself (or the request fails)
    P answers 4xx:                    the client's error, passed on as it is
    D never saw the request:          the same ticket on another D
    D refuses the ticket:             once more without it; the client had no part in it
    D failed before its first byte:   both legs again, with a new transfer id
    D failed in a stream:             an error event and [DONE]

Nothing is said to the client before D's first byte; after it nothing is retried.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from starlette.types import Send

from baton.core.errors import PeerError
from baton.router.errors import ClientGone, LegFailure, RouterError, error_event
from baton.router.fleet import Engine, Fleet
from baton.router.legs import PARAMS, Shape, decode_body, new_transfer_id, prefill_body, shape_of, ticket_of
from baton.router.metrics import RouterMetrics
from baton.router.policies import RoutedRequest
from baton.router.settings import Role, RouterSettings
from baton.router.sse import EventCutter
from baton.router.upstream import LegAnswer, LegRequest, Upstream, end_to_end

logger = logging.getLogger(__name__)

# Not the client's fault, though in the 4xx range: another engine may have room.
_RETRYABLE_4XX = frozenset({408, 425, 429})


@dataclass(frozen=True, slots=True)
class Incoming:
    """A client's request, read whole."""

    method: str
    path: str
    headers: Mapping[str, str]  # End to end, `x-request-id` included.
    request_id: str
    body: bytes = b""
    received_at_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Prefilled:
    where: Literal["remote", "local"]
    reason: str = ""  # Why local.
    ticket: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """P's 4xx: what the client asked for cannot be done by any engine."""

    answer: LegAnswer


class _ErrorBody(msgspec.Struct):
    param: str | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorBody


class Proxy:
    def __init__(
        self, settings: RouterSettings, fleet: Fleet, upstream: Upstream, metrics: RouterMetrics
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._upstream = upstream
        self._metrics = metrics
        self._turn = 0

    async def complete(self, incoming: Incoming, body: Mapping[str, Any], send: Send) -> int:
        """Both legs. Returns the status that the client got; raises RouterError if nothing was sent yet."""
        shape = shape_of(body)
        routed = self._route(shape.prefix_key)
        is_stream = body.get("stream") is True
        tried: list[Engine] = []
        prefilled: Prefilled | None = None
        failure: LegFailure | None = None
        # Asked before the prefill too: without a decode engine there is nothing to prefill for.
        while self._may_try("decode", routed, tried):
            if prefilled is None:
                outcome = await self._prefill(incoming, body, shape, routed)
                if isinstance(outcome, Refused):
                    return await self._send_whole(incoming, outcome.answer, send)
                prefilled = outcome
            engine = self._fleet.choose("decode", routed, tried=tried)
            if engine is None:
                break  # Went down during the prefill.
            if tried:
                self._metrics.retries.labels("decode").inc()
            tried.append(engine)
            leg = self._leg(incoming, decode_body(body, prefilled.ticket), is_stream=is_stream)
            try:
                async with self._upstream.open(engine, leg) as answer:
                    if prefilled.ticket is not None and _blames_params(answer):
                        logger.error(
                            "%s: %s refused the ticket: %r", incoming.request_id, engine.url, answer.body
                        )
                        self._metrics.prefills.labels("local", "ticket_refused").inc()
                        prefilled = Prefilled("local", "ticket_refused")
                        tried.remove(engine)  # Happens once: there is no ticket to refuse any more.
                    elif _is_engines_fault(answer) and self._may_try("decode", routed, tried):
                        logger.warning("%s: %s said %d", incoming.request_id, engine.url, answer.status)
                        prefilled = None
                    else:
                        return await self._relay(incoming, answer, prefilled, send)
            except LegFailure as caught:
                logger.warning("%s: decode leg: %s", incoming.request_id, caught)
                failure = caught
                if failure.was_sent:
                    prefilled = None  # The ticket may be in use; a new dispatch gets a new one.
        raise self._no_engine("decode", failure)

    async def forward(self, incoming: Incoming, send: Send) -> int:
        """To a decode engine as it is: what has no KV to hand over (`/v1/models`, `/tokenize`)."""
        routed = self._route(b"")
        wait_s = self._settings.timeouts.first_byte_s
        leg = LegRequest(
            incoming.method,
            incoming.path,
            incoming.headers,
            incoming.body,
            wait_s,
            self._deadline_s(incoming),
        )
        tried: list[Engine] = []
        failure: LegFailure | None = None
        while self._may_try("decode", routed, tried):
            engine = self._fleet.choose("decode", routed, tried=tried)
            assert engine is not None
            tried.append(engine)
            try:
                async with self._upstream.open(engine, leg) as answer:
                    if answer.chunks is not None:
                        raise RouterError.gateway(
                            "the engine streamed an answer that was not asked to be one"
                        )
                    if not (_is_engines_fault(answer) and self._may_try("decode", routed, tried)):
                        return await self._send_whole(incoming, answer, send)
            except LegFailure as caught:
                logger.warning("%s: %s: %s", incoming.request_id, incoming.path, caught)
                failure = caught
        raise self._no_engine("decode", failure)

    async def _prefill(
        self, incoming: Incoming, body: Mapping[str, Any], shape: Shape, routed: RoutedRequest
    ) -> Prefilled | Refused:
        outcome = await self._try_prefill(incoming, body, shape, routed)
        if isinstance(outcome, Prefilled):
            self._metrics.prefills.labels(outcome.where, outcome.reason).inc()
        return outcome

    async def _try_prefill(
        self, incoming: Incoming, body: Mapping[str, Any], shape: Shape, routed: RoutedRequest
    ) -> Prefilled | Refused:
        if shape.direct_reason is not None:
            return Prefilled("local", shape.direct_reason)
        if shape.num_prompt_tokens < self._settings.min_prefill_tokens:
            return Prefilled("local", "short_prompt")
        tried: list[Engine] = []
        failure: LegFailure | None = None
        while self._may_try("prefill", routed, tried):
            engine = self._fleet.choose("prefill", routed, tried=tried)
            assert engine is not None
            if tried:
                self._metrics.retries.labels("prefill").inc()
            tried.append(engine)
            leg = LegRequest(
                incoming.method,
                incoming.path,
                incoming.headers,
                msgspec.json.encode(prefill_body(body, new_transfer_id())),
                self._settings.timeouts.prefill_s,
                self._deadline_s(incoming),
            )
            try:
                with self._metrics.prefill_seconds.time():
                    async with self._upstream.open(engine, leg) as answer:
                        outcome = _read_prefill(engine, answer)
            except LegFailure as caught:
                logger.warning("%s: prefill leg: %s", incoming.request_id, caught)
                failure = caught
                continue
            if outcome is not None:
                return outcome
            logger.warning(
                "%s: %s said %d to the prefill leg", incoming.request_id, engine.url, answer.status
            )
        if self._settings.on_prefill_failure == "fail":
            raise self._no_engine("prefill", failure, is_tried=bool(tried))
        return Prefilled("local", "prefill_failed")

    def _leg(self, incoming: Incoming, body: Mapping[str, Any], *, is_stream: bool) -> LegRequest:
        timeouts = self._settings.timeouts
        return LegRequest(
            incoming.method,
            incoming.path,
            incoming.headers,
            msgspec.json.encode(body),
            timeouts.first_byte_s if is_stream else timeouts.answer_s,
            self._deadline_s(incoming),
        )

    def _deadline_s(self, incoming: Incoming) -> float:
        return incoming.received_at_s + self._settings.timeouts.total_s

    def _route(self, prefix_key: bytes) -> RoutedRequest:
        self._turn += 1
        return RoutedRequest(self._turn, prefix_key)

    def _may_try(self, role: Role, routed: RoutedRequest, tried: list[Engine]) -> bool:
        attempts = self._settings.prefill_attempts if role == "prefill" else self._settings.decode_attempts
        return len(tried) < attempts and self._fleet.choose(role, routed, tried=tried) is not None

    def _no_engine(self, role: Role, failure: LegFailure | None, *, is_tried: bool = False) -> RouterError:
        if failure is None and not is_tried:
            return RouterError.unavailable(self._fleet.why_none(role))
        if failure is not None and failure.kind == "timeout":
            return RouterError.too_late(f"no {role} engine answered in time")
        return RouterError.gateway(f"the {role} engine failed before the first byte of an answer")

    async def _relay(self, incoming: Incoming, answer: LegAnswer, prefilled: Prefilled, send: Send) -> int:
        self._metrics.first_byte_seconds.observe(time.monotonic() - incoming.received_at_s)
        extra = {"x-baton-prefill": prefilled.where}
        if answer.chunks is None:
            return await self._send_whole(incoming, answer, send, extra)
        await send(_start(incoming, answer, extra))
        async with aclosing(self._events(incoming, answer)) as events:
            async for piece in events:
                await self._send_piece(piece, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return answer.status

    async def _events(self, incoming: Incoming, answer: LegAnswer) -> AsyncGenerator[bytes, None]:
        """D's events as they come; if it fails, an error event instead of the rest."""
        assert answer.chunks is not None
        cutter = EventCutter()
        yield cutter.push(answer.body)
        broken: str | None = None
        try:
            async for chunk in answer.chunks:
                yield cutter.push(chunk)
            yield cutter.finish()
            if not cutter.is_done:
                broken = "the decode engine ended the stream without [DONE]"
        except LegFailure as failure:
            broken = f"the decode engine failed in the middle of the answer ({failure.kind})"
            if cutter.is_done:
                return  # All that matters had arrived.
            logger.warning("%s: decode leg, in the stream: %s", incoming.request_id, failure)
        if broken is not None:
            self._metrics.broken_streams.inc()
            yield cutter.separator() + error_event(broken)

    async def _send_piece(self, piece: bytes, send: Send) -> None:
        if not piece:
            return
        # A client that keeps the connection but does not read holds D's blocks: it has its deadline too.
        try:
            async with asyncio.timeout(self._settings.timeouts.idle_s):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except TimeoutError as error:
            raise ClientGone("does not read its answer") from error

    async def _send_whole(
        self, incoming: Incoming, answer: LegAnswer, send: Send, extra: Mapping[str, str] | None = None
    ) -> int:
        assert answer.chunks is None
        length = {"content-length": str(len(answer.body))}
        await send(_start(incoming, answer, {**(extra or {}), **length}))
        await send({"type": "http.response.body", "body": answer.body, "more_body": False})
        return answer.status


def _is_engines_fault(answer: LegAnswer) -> bool:
    """Another engine may do better."""
    return answer.status >= 500 or answer.status in _RETRYABLE_4XX


def _blames_params(answer: LegAnswer) -> bool:
    """A 400 that names what we put in: engines disagree (role, model, secret), the client cannot mend it."""
    if answer.status != 400:
        return False
    try:
        error = msgspec.json.decode(answer.body, type=_ErrorAnswer).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return (error.param or "").startswith(PARAMS)


def _read_prefill(engine: Engine, answer: LegAnswer) -> Prefilled | Refused | None:
    """None: this engine could not, another may."""
    if answer.chunks is not None:
        raise LegFailure(
            "broken", engine.url, "streamed an answer that was not asked to be one", was_sent=True
        )
    if _is_engines_fault(answer) or _blames_params(answer):
        return None
    if answer.status != 200:
        return Refused(answer)
    try:
        ticket = ticket_of(answer.body)
    except PeerError as error:
        raise LegFailure("broken", engine.url, str(error), was_sent=True) from error
    return Prefilled("remote", ticket=ticket) if ticket else Prefilled("local", "nothing_lent")


def _start(incoming: Incoming, answer: LegAnswer, extra: Mapping[str, str]) -> dict[str, Any]:
    headers = {**end_to_end(answer.headers), "x-request-id": incoming.request_id, **extra}
    return {
        "type": "http.response.start",
        "status": answer.status,
        "headers": [
            (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
        ],
    }
