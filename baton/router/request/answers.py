"""Meaning of an engine's answer for the request. Bytes and values in, values out.

read_prefill    P's whole answer -> what to do next
PrefillReader   P's answer, whole or as a stream of which only the beginning is wanted
DecodeAnswer    D's answer on its way to the client
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from baton.core.errors import PeerError
from baton.core.json_text import NotJson, decode_json
from baton.router.fleet.engine import Engine
from baton.router.fleet.outlier_detection import is_error
from baton.router.request.tokens.continuation import OverlapReader
from baton.router.request.tokens.first_tokens import FirstTokens
from baton.router.request.tokens.stream import (
    FirstToken,
    FirstTokenReader,
    event_with_prefill_hits,
    is_engines_error,
    with_prefill_hits,
)
from baton.router.values.legs import PARAMS, LocalReason
from baton.router.values.sse import EventSplitter, RawObject, is_done

# Bytes of P's answer that are decoded whole, which stops the loop for about 15 ms a MiB. From a longer answer
# only the ticket is read, and D gives all tokens.
MAX_KEPT = 2 << 20
MAX_REST_BYTES = 1 << 20  # Bytes of P's stream after the first token: token counts and [DONE].
RETRY_AFTER_MAX_S = 60.0
_NULL = msgspec.Raw(b"null")
LACKS_S = 300.0  # Time for which an engine is not asked for a path that it lacks.
_NOT_FOUND = (404, 405)
VLLM_PAUSED = "Generation is paused."
WEIGHTS_HEADER = "x-baton-weights"  # Names the weights with which the answer begins.
GIVEN_HEADER = "x-baton-given"  # Tokens of the answer after which the engine continues.
PROMPT_HEADER = "x-baton-prompt"  # Tokens of the prompt: all, cached in this engine, loaded from another.
_PROMPT_COUNTS = re.compile(r"total=(\d{1,9}); local=(\d{1,9}); transferred=(\d{1,9})")


# Headers of RFC 9110, 7.6.1, and others that belong to one connection or are set anew on each hop.
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
        "x-baton-given",
        WEIGHTS_HEADER,
    }
)


def end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers that pass through: not those of one hop, nor those that `Connection` declares to be."""
    named = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    return {name: value for name, value in headers.items() if name.lower() not in _PER_HOP | named}


@dataclass(frozen=True, slots=True)
class LegAnswer:
    """An engine's answer to a leg. `body`: the whole answer, or the first piece of a stream."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    is_stream: bool = False
    _parts: RawObject | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def parts(self) -> RawObject:
        """The members of the body, which is searched once. Raises NotJson."""
        if self._parts is None:
            object.__setattr__(self, "_parts", decode_json(self.body, RawObject))
        assert self._parts is not None
        return self._parts

    @property
    def error(self) -> "ErrorBody | None":
        """The error in the body. None: there is none in OpenAI's form."""
        try:
            return decode_json(self.parts.get("error", _NULL), ErrorBody)
        except NotJson:
            return None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt has been computed (remote), or is left to the decode engine (local)."""

    where: Literal["remote", "local"]
    reason: LocalReason | Literal[""] = ""  # Why local.
    ticket: dict[str, Any] | None = None
    answer: Mapping[str, Any] | None = None  # P's answer of one token, if its token is wanted.


@dataclass(frozen=True, slots=True)
class Refused:
    """P's 4xx: no engine can do what the client asks for."""

    answer: LegAnswer


@dataclass(frozen=True, slots=True)
class Complete:
    """P's first token is the whole answer, which was not to be streamed."""

    answer: LegAnswer
    ticket: dict[str, Any] | None = None  # What P has lent although no engine needs it.


@dataclass(frozen=True, slots=True)
class Unable:
    """This engine could not compute the prompt; another may."""

    reason: str
    is_free: bool = False  # The engine is not overloaded: it drains, or engines disagree.


@dataclass(frozen=True, slots=True)
class FirstTokenRead:
    """P's stream has its first token. `head` has its status and headers."""

    head: LegAnswer
    first: FirstToken


PrefillOutcome = Prefilled | Refused | Complete | Unable | FirstTokenRead


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Cached | None = None
    input_tokens: int = 0  # A message's usage leaves cached tokens out.
    input_tokens_details: _Cached | None = None
    cache_read_input_tokens: int | None = None


class ErrorBody(msgspec.Struct):
    message: str | None = None
    param: str | None = None
    code: str | int | None = None


def is_engines_fault(answer: LegAnswer) -> bool:
    """Whether another engine may do better."""
    return is_error(answer.status)


def retry_after_s(answer: LegAnswer) -> float:
    """How long the engine asks to be left alone (RFC 9110, 10.2.3). 0: it does not ask, or names a date."""
    text = answer.headers.get("retry-after", "")
    asks = is_error(answer.status) and text.isdigit() and len(text) < 6
    return min(float(text), RETRY_AFTER_MAX_S) if asks else 0.0


def is_closed(answer: LegAnswer) -> bool:
    """Whether the engine takes no new requests for now, on purpose: it is neither broken nor overloaded.

    A Baton engine drains. A vLLM (since 0.33) pauses for an update of its weights, and only its message
    tells (`_reject_add_while_paused` of vllm/v1/engine/core.py).
    """
    error = answer.error if answer.status == 503 else None
    return error is not None and (error.code == "draining" or (error.message or "").startswith(VLLM_PAUSED))


def outcome_of(answer: LegAnswer) -> str:
    """A leg's outcome (`baton:router_legs`). Outlier detection does not count `closed`."""
    return "closed" if is_closed(answer) else str(answer.status)


def blames_params(answer: LegAnswer) -> bool:
    """Whether a 400 names what the router put in: engines disagree (role, model, secret), which is no fault
    of the client.
    """
    error = answer.error if answer.status == 400 else None
    return error is not None and (error.param or "").startswith(PARAMS)


def is_handed_over(answer: LegAnswer) -> bool | None:
    """Whether D has loaded what P lent. None: D does not report it, or needed little of the loan.

    Baton's engines report in a header what they did with the prompt, because a stream's usage comes last, if
    at all.
    """
    if (counts := prompt_counts(answer)) is None:
        return None
    total, local, transferred = counts
    if transferred:
        return True
    return None if 2 * local >= total else False


def num_transferred(answer: LegAnswer) -> int:
    """Tokens of the prompt that the engine has loaded; 0: none, or it does not report it."""
    counts = prompt_counts(answer)
    return 0 if counts is None else counts[2]


def num_computed(answer: LegAnswer) -> int | None:
    """Tokens of the prompt that the engine has computed. None: it does not report it."""
    if (counts := prompt_counts(answer)) is not None:
        total, local, transferred = counts
        return max(0, total - local - transferred)
    if answer.is_stream or len(answer.body) > MAX_KEPT:
        return None  # A stream's usage comes last.
    try:
        usage = decode_json(answer.parts.get("usage", _NULL), _Usage)
    except NotJson:
        return None
    if usage.cache_read_input_tokens is not None:
        return max(0, usage.input_tokens)
    details = usage.prompt_tokens_details or usage.input_tokens_details
    return (
        None if details is None else max(0, usage.prompt_tokens + usage.input_tokens - details.cached_tokens)
    )


def prompt_counts(answer: LegAnswer) -> tuple[int, int, int] | None:
    """All tokens of the prompt, those that the engine had, and those that it has loaded."""
    found = _PROMPT_COUNTS.fullmatch(answer.headers.get(PROMPT_HEADER, ""))
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))


class _Detail(msgspec.Struct):
    message: Any = None


class _NotFound(msgspec.Struct):
    detail: Any = None
    error: _Detail | None = None


def lacks_path(answer: LegAnswer) -> bool:
    """Whether a 404 or 405 is about the path, not the model, by the texts of FastAPI (vLLM) and Baton."""
    if answer.status not in _NOT_FOUND:
        return False
    try:
        found = decode_json(answer.body, _NotFound)
    except NotJson:
        return True
    texts = [found.detail, found.error.message if found.error is not None else None]
    return any(isinstance(text, str) and text.endswith(("Not Found", "Method Not Allowed")) for text in texts)


def read_prefill(answer: LegAnswer, *, may_be_complete: bool, is_kept: bool = False) -> PrefillOutcome:
    """The meaning of an answer that was not streamed. Raises PeerError.

    `may_be_complete`: P was asked for the client's own answer, as far as its first token.
    `is_kept`: the answer goes into the outcome.
    """
    if is_engines_fault(answer) or blames_params(answer):
        is_free = is_closed(answer) or blames_params(answer)
        return Unable(f"answered with {answer.status}", is_free)
    if answer.status != 200:
        return Refused(answer)
    try:
        parts = answer.parts
        ticket = decode_json(parts.get(PARAMS, _NULL))
        if not isinstance(ticket, dict | None):
            raise PeerError(
                f"{PARAMS} in the prefill engine's answer is a {type(ticket).__name__}, not an object"
            )
        if may_be_complete and decode_json(parts.get("choices", _NULL), list[_Choice])[0].finish_reason:
            rest = {name: part for name, part in parts.items() if name != PARAMS}
            body = answer.body if ticket is None else msgspec.json.encode(rest)
            return Complete(LegAnswer(answer.status, answer.headers, body), ticket or None)
        is_kept = is_kept and len(answer.body) <= MAX_KEPT
        kept = {name: decode_json(part) for name, part in parts.items()} if is_kept else None
    except (NotJson, IndexError) as error:
        raise PeerError(f"the prefill engine's answer is no completion: {error}") from error
    return prefilled(ticket, kept)


def prefilled(ticket: dict[str, Any] | None, answer: Mapping[str, Any] | None = None) -> Prefilled:
    if ticket:
        return Prefilled("remote", ticket=ticket, answer=answer)
    return Prefilled("local", "nothing_lent", answer=answer)


class PrefillReader:
    """Reads P's answer until its meaning is known, and a stream to its end, into `rest`.

    Each method returns the outcome once, as soon as it is known. Raises PeerError for what is no answer.
    """

    def __init__(self, *, reads_first_token: bool, shows_token_ids: bool, keeps_answer: bool) -> None:
        self._reads_first_token = reads_first_token
        self._keeps_answer = keeps_answer
        self._first = FirstTokenReader(shows_token_ids=shows_token_ids)
        self._events = EventSplitter()
        self._head: LegAnswer | None = None
        self._is_known = False
        self.is_done = False  # [DONE] has come.
        self._rest = bytearray()
        self.rest: bytes | None = None  # The stream after the first token: token counts and [DONE].
        self.lent: Mapping[str, Any] | None = None  # `kv_transfer_params` of P's answer.

    def open(self, answer: LegAnswer) -> PrefillOutcome | None:
        if not answer.is_stream:
            outcome = read_prefill(
                answer, may_be_complete=self._reads_first_token, is_kept=self._keeps_answer
            )
            if isinstance(outcome, Prefilled):
                self.lent = outcome.ticket
            return outcome
        if not self._reads_first_token:
            raise PeerError("streamed an answer that was not asked to be one")
        self._head = answer
        return self.feed(answer.body)

    def feed(self, data: bytes) -> PrefillOutcome | None:
        self._events.push(data)
        return self._read()

    def finish(self) -> PrefillOutcome | None:
        """The stream has ended in order."""
        self._events.finish()
        outcome = self._read()
        if not self._is_known:
            raise PeerError("the stream ended without a first token")
        self.rest = bytes(self._rest)
        return outcome

    def _read(self) -> PrefillOutcome | None:
        outcome: PrefillOutcome | None = None
        while (event := self._events.next()) is not None:
            if self.is_done:
                continue  # No client gets what an engine sends after [DONE].
            if self._is_known:
                self._rest += event
                self.is_done = is_done(event)
                if len(self._rest) > MAX_REST_BYTES:
                    raise PeerError("does not stop after one token")
            elif (first := self._first.look_at(event)) is not None:
                assert self._head is not None
                self._is_known, self.lent = True, first.params
                outcome = FirstTokenRead(self._head, first)
        return outcome


class DecodeAnswer:
    """D's answer, event by event, on its way to the client.

    It takes out the params for the next turn, and adds P's cache hits to the usage. Call `compare` until it
    returns True; then `push` and `ready`.
    """

    def __init__(self, first: FirstTokens, consumer: Engine) -> None:
        self._reader = first.reader_of_decode()
        self._record = first.record
        self._sieve = first.sieve_of_decode(consumer)
        self._is_last = first.dialect.reads_end()
        self._events = EventSplitter()
        self.found: FirstToken | bool | None = None  # D's first token, or whether D gave P's token.
        self.is_done = False  # [DONE] has been returned.
        self._has_erred = False
        self._error: bytes | None = None

    @property
    def kept_params(self) -> dict[str, Any] | None:
        """What D keeps for the next turn of the session."""
        return self._sieve.params

    def whole(self, body: bytes, lent: Mapping[str, Any] | None) -> bytes:
        return with_prefill_hits(self._sieve.whole(body), lent)

    def compare(self, data: bytes) -> bool:
        """True: the first token is in `found`, or nothing is to be compared. Raises PeerError."""
        self._events.push(data)
        if self._reader is None:
            return True
        while (event := self._events.next()) is not None:
            if (found := self._reader.look_at(event)) is not None:
                self.found = found
                return True
        return False

    @property
    def left_over(self) -> bytes:
        """What the event with the first token has for the client after that token."""
        if not isinstance(self._reader, OverlapReader) or not self._reader.left_over:
            return b""
        return self._sieve.event(self._recorded(self._reader.left_over))

    def _recorded(self, event: bytes) -> bytes:
        return event if self._record is None else self._record.event(event)

    def take_error(self) -> bytes | None:
        """The event in which D reports that it cannot go on, once."""
        error, self._error = self._error, None
        return error

    def push(self, data: bytes) -> None:
        self._events.push(data)

    def finish(self) -> None:
        self._events.finish()

    def ready(self, lent: Mapping[str, Any] | None) -> bytes:
        """Whole events for the client, up to [DONE] or an event for `take_error`. Raises PeerError."""
        ready = bytearray()
        while not self.is_done and (event := self._events.next()) is not None:
            if self._record is not None:
                if not self._has_erred and is_engines_error(event):
                    self._has_erred, self._error = True, event
                    break
                event = self._record.event(event)
            self.is_done = self._is_last(event)
            ready += event_with_prefill_hits(self._sieve.event(event), lent)
        return bytes(ready)
