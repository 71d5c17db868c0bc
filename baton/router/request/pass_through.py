"""A request that goes to one engine as it is: a state machine without I/O.

    client --> leg on an engine of its model --> client     streamed, if the engine streams

    the engine never received it                    another engine
    it failed before its answer, or answered 5xx    another engine, if `Path.repeats`
    it has no such path                             another engine; this one is not asked again for LACKS_S
    it failed in a stream                           an error event of the path's dialect

Only the paths of `PATHS` are passed through: other paths of an engine are for its operator (`/metrics`,
`/sleep`, `/v1/load_lora_adapter`, `/baton/*`). The router does not ask an engine which paths it has: the
first 404 shows that it lacks one.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from baton.core.errors import UserError
from baton.http.forms import fields_of
from baton.http.json_body import decode_as
from baton.router.fleet.engine import Engine
from baton.router.fleet.view import FleetView
from baton.router.request.answers import (
    LACKS_S,
    LegAnswer,
    end_to_end,
    is_engines_fault,
    lacks_path,
    outcome_of,
    retry_after_s,
)
from baton.router.request.events import (
    ClientGone,
    Close,
    Closed,
    Count,
    Effect,
    Event,
    Failed,
    Head,
    Leg,
    Opened,
    Over,
    Piece,
    Send,
    Stopped,
    StreamEnded,
)
from baton.router.request.reply import CLIENT_CLOSED_REQUEST, SHUTTING_DOWN
from baton.router.values.dialects import dialect_at
from baton.router.values.errors import LegFailure, RouterError
from baton.router.values.legs import PARAMS, refuse_hidden_params

logger = logging.getLogger(__name__)


class Path(NamedTuple):
    method: str = "POST"
    repeats: bool = True  # The request may reach two engines, because it changes nothing there.
    takes_forms: bool = False


PATHS = {
    "/v1/models": Path("GET"),
    "/tokenize": Path(),
    "/detokenize": Path(),
    "/v1/embeddings": Path(),
    "/v1/responses": Path(repeats=False),  # The engine may store the response. See `Dialect.is_whole`.
    "/v1/messages": Path(repeats=False),
    "/v1/messages/count_tokens": Path(),
    "/v1/score": Path(),
    "/score": Path(),
    "/v1/rerank": Path(),
    "/v2/rerank": Path(),
    "/rerank": Path(),
    "/pooling": Path(),
    "/classify": Path(),
    "/v1/audio/transcriptions": Path(takes_forms=True),
    "/v1/audio/translations": Path(takes_forms=True),
    "/v1/audio/speech": Path(),
}
FORM_PATHS = frozenset(path for path, passed in PATHS.items() if passed.takes_forms)


class Passed(NamedTuple):
    """A request to pass through. `body`: JSON, a form, or empty."""

    id: str
    path: str
    body: bytes
    received_at_s: float
    looked: "Looked"


class Looked(msgspec.Struct):
    """Fields of the body that the router reads."""

    model: Any = None
    stream: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None

    @classmethod
    def of_json(cls, body: bytes) -> "Looked":
        """Read a body of JSON. Raises UserError.

        A body with transfer params is refused, because some of these paths take addresses and tickets. A body
        that is no valid JSON (such as NaN) is refused, because an engine's decoder may accept it.
        """
        looked = decode_as(body, cls) if body else cls()
        if looked.kv_transfer_params is not None:
            raise UserError("is not for clients on this path; leave it out", field=PARAMS)
        refuse_hidden_params(looked.vllm_xargs)
        return looked


def read_form(body: bytes, content_type: str, aliases: Mapping[str, str]) -> tuple[bytes, Looked]:
    """Return the form with the engines' name of its model. Raises UserError if the body is no form."""
    fields = fields_of(body, content_type)
    model = fields.get("model")
    stream = fields["stream"].text.strip().lower() in ("true", "1") if "stream" in fields else None
    if model is None:
        return body, Looked(stream=stream)
    name = aliases.get(model.text, model.text)
    if name != model.text:
        body = body[: model.start] + name.encode() + body[model.end :]
    return body, Looked(name, stream)


class PassThrough:
    """Machine of one request. Call `begin`, then `on` for each event; both return effects, `Over` last."""

    num_output_tokens: int | None = None  # None: not known.

    def __init__(self, view: FleetView, request: Passed) -> None:
        self._view, self._request, self.request_id = view, request, request.id
        self.dialect = dialect_at(request.path)
        looked, timeouts = request.looked, view.settings.timeouts
        self._wait_s = timeouts.first_byte_s if looked.stream is True else timeouts.answer_s
        self._routed = view.route(b"", looked.model)
        self._tried: list[Engine] = []
        self._leg: Leg | None = None  # The open leg.
        self._error: RouterError | None = None
        self._lacking: LegAnswer | None = None  # Answer of an engine without the path.
        self._failure: LegFailure | None = None
        self._status: int | None = None  # Status of the client's answer; None: it has not begun.
        self._is_ending = False

    def begin(self, now_s: float) -> Sequence[Effect]:
        return self._attempt(now_s)

    def on(self, event: Event, now_s: float) -> Sequence[Effect]:
        match event:
            case Closed(leg):
                return self._on_closed(leg, now_s)
            case _ if self._is_ending or self._leg is None:
                return ()
            case Opened(_, answer):
                return self._on_opened(self._leg, answer, now_s)
            case Piece(_, data):
                return (Send(data),)
            case StreamEnded():
                return self._end(Send(b"", is_last=True))
            case Failed(_, failure):
                return self._on_failed(self._leg, failure, now_s)
            case ClientGone():
                self._status = CLIENT_CLOSED_REQUEST
                return self._end(Close(self._leg))
            case Stopped():
                if self._status is not None:
                    return self._end(
                        Send(self.dialect.error_event(SHUTTING_DOWN, status=503), is_last=True),
                        Close(self._leg),
                    )
                self._error = RouterError.unavailable(SHUTTING_DOWN)
                return self._end(Close(self._leg))
            case _:
                return ()

    def _attempt(self, now_s: float) -> Sequence[Effect]:
        try:
            engine = self._choose(now_s)
            if engine is None:
                self._error = self._why_none()
        except RouterError as error:  # No engine has the model.
            engine, self._error = None, error
        if engine is None:
            return self._over()
        self._tried.append(engine)
        leg = self._leg = Leg(
            "decode", engine, {}, self._wait_s, now_s, was_alone=not engine.load, raw=self._request.body
        )
        self._view.fleet.note_start(engine)
        return (leg,)

    def _choose(self, now_s: float) -> Engine | None:
        """Raises RouterError."""

        def has_path(engine: Engine) -> bool:
            return engine.lacks.get(self._request.path, 0.0) <= now_s

        # Engines without the path do not count as attempts.
        tried = [engine for engine in self._tried if has_path(engine)]
        return self._view.choose("decode", self._routed, tried, now_s, has_path)

    def _why_none(self) -> RouterError:
        if self._lacking is None and any(self._request.path in one.lacks for one in self._view.fleet.engines):
            return RouterError(
                404, f"no engine has {self._request.path} ({PATHS[self._request.path].method})"
            )
        return self._view.no_engine("decode", self._failure, is_tried=bool(self._tried))

    def _on_opened(self, leg: Leg, answer: LegAnswer, now_s: float) -> Sequence[Effect]:
        leg.outcome = outcome_of(answer)
        self._view.fleet.health.note_answer(leg.engine, answer.status, now_s, retry_after_s(answer))
        if lacks_path(answer):
            leg.engine.lacks[self._request.path] = now_s + LACKS_S
            self._lacking = answer
            if self._choose(now_s) is not None:
                return (Close(leg),)
        elif is_engines_fault(answer) and self._may_repeat and self._choose(now_s) is not None:
            logger.warning("%s: %s: status %d", self._request.path, leg.engine.url, answer.status)
            return (Close(leg),)
        self._status = answer.status
        counted = Count("first_byte_seconds", value=now_s - self._request.received_at_s)
        headers = {**end_to_end(answer.headers), "x-request-id": self._request.id}
        if answer.is_stream:
            return (counted, Head(answer.status, headers), Send(answer.body))
        headers["content-length"] = str(len(answer.body))
        return self._end(counted, Head(answer.status, headers), Send(answer.body, is_last=True))

    def _on_failed(self, leg: Leg, failure: LegFailure, now_s: float) -> Sequence[Effect]:
        logger.warning("%s: %s", self._request.path, failure)
        leg.outcome, self._failure = failure.kind, failure
        self._view.fleet.health.note_failure(leg.engine, failure, now_s)
        if self._status is not None:
            broken = Send(self.dialect.error_event("the engine failed in its answer"), is_last=True)
            return self._end(Count("broken_streams"), broken)
        is_final = failure.kind == "too_large" or (failure.was_sent and not self._may_repeat)
        if is_final:
            self._error = self._view.no_engine("decode", failure)
            return self._end()
        return ()  # `Closed` follows, and with it the next attempt.

    @property
    def _may_repeat(self) -> bool:
        return PATHS[self._request.path].repeats

    def _on_closed(self, leg: Leg, now_s: float) -> Sequence[Effect]:
        self._view.fleet.health.note_outcome(leg.engine, leg.outcome, now_s, self._routed.model)
        self._view.fleet.note_end(leg.engine)
        self._leg = None
        counted = Count("legs", (leg.engine.role, leg.engine.url, leg.outcome))
        return (counted, *(self._over() if self._is_ending else self._attempt(now_s)))

    def _end(self, *effects: Effect) -> Sequence[Effect]:
        """End the request with these effects. The leg closes after them, if it is still open."""
        self._is_ending = True
        return effects

    def _over(self) -> Sequence[Effect]:
        return (Over(self._status, self._error),)
