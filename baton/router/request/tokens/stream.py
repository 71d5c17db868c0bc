"""Tokens in the stream of one engine: the first one, all that the client has, the cached ones of the prompt.

`FirstTokenReader` finds the first token. Events in, values out:

    data: {opening}                                 chat only: the role
    data: {..., "token_ids": [5], ...}              the event with the first token
    data: {...} ... data: [DONE]                    the rest, which stays as it is

An engine that is asked for its first token (`baton_first_token`) names the token's id in its event, so that
the router can compare the tokens of two engines. The reader removes the id if the client did not ask for it.

`TokenRecord` keeps what the engine needs that may continue the stream:

    engine's event, with token ids --event--> the client's event, without ids unless the client asked
                                   +--------> `token_ids`, `is_finished`, `is_complete`

Baton's engines name the ids because the leg asks for `baton_token_ids`, vLLM because of `return_token_ids`.

`cached_tokens` of a request are the prompt tokens that D or P had in their caches. D computes the number
from P's params in pull. D's leg leaves before P has answered in push, so D reports the hits of its own cache
only, and the router adds P's. The router does not wait for P: if P has not answered when D sends its usage,
D's number stays.
"""

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.core.errors import BadTransferParams, PeerError
from baton.core.json_text import NotJson, decode_json
from baton.core.transfer_params import cached_tokens, parse_cached_tokens
from baton.router.values.identity import Kind
from baton.router.values.legs import PARAMS
from baton.router.values.sse import RawObject, data_of, is_done, sse_event

# Size of the events up to the first token: they may have an echoed prompt, and its token ids.
MAX_OPENING_BYTES = 32 << 20
_SHOWN = ("delta", "text", "finish_reason", "logprobs")  # Fields that decide whether a choice is shown.
_NULL, _EMPTY = msgspec.Raw(b"null"), msgspec.Raw(b"[]")


@dataclass(frozen=True, slots=True)
class FirstToken:
    token_ids: tuple[int, ...]
    events: bytes  # Events for the client, up to the token's. Empty if there is nothing to show yet.
    is_last: bool  # The answer ends with this token.
    params: dict[str, Any] | None  # `kv_transfer_params`.


class FirstTokenReader:
    """Reads one event after the other until one has the first token."""

    def __init__(self, *, shows_token_ids: bool) -> None:
        self._shows_token_ids = shows_token_ids
        self._opening = bytearray()

    def look_at(self, event: bytes) -> FirstToken | None:
        """Raises PeerError for a stream that has no first token."""
        if (first := self._first_of(event)) is not None:
            return first
        self._opening += event
        if len(self._opening) > MAX_OPENING_BYTES:
            raise PeerError(f"over {MAX_OPENING_BYTES} bytes without a first token")
        return None

    def _first_of(self, event: bytes) -> FirstToken | None:
        """Decode only the fields that it uses: an echoed prompt may have many megabytes."""
        if not (data := data_of(event)):
            return None  # A comment.
        if is_done(event):
            raise PeerError("the stream ended without a first token")
        try:
            chunk = decode_json(data, RawObject)
            if "error" in chunk:
                raise PeerError(
                    f"an error in place of the first token: {_message(decode_json(chunk['error']))}"
                )
            choices = decode_json(chunk.get("choices", _EMPTY), list[RawObject])
            if len(choices) != 1 or not (token_ids := decode_json(choices[0].get("token_ids", _EMPTY))):
                return None
            params = decode_json(chunk.pop(PARAMS, _NULL))
            seen = {name: decode_json(choices[0].get(name, _NULL)) for name in _SHOWN}
        except NotJson as error:
            raise PeerError(f"an event that is no chunk of an answer: {error}") from error
        if not (isinstance(token_ids, list) and all(isinstance(token_id, int) for token_id in token_ids)):
            raise PeerError("token_ids that are no list of integers")
        if not self._shows_token_ids:
            del choices[0]["token_ids"]
        is_shown = self._shows_token_ids or _has_something_to_show(seen)
        return FirstToken(
            token_ids=tuple(token_ids),
            events=bytes(self._opening) + (sse_event({**chunk, "choices": choices}) if is_shown else b""),
            is_last=seen["finish_reason"] is not None,
            params=params if isinstance(params, dict) else None,
        )


def _has_something_to_show(choice: dict[str, Any]) -> bool:
    """Whether an engine sends an event for this choice if no ids are asked for.

    An engine may hold the text of the first token back. Whatever else a delta has is shown: calls of tools,
    for example.
    """
    delta = choice["delta"]
    shown = any(delta.values()) if isinstance(delta, dict) else choice["text"]
    return bool(shown or choice["finish_reason"] or choice["logprobs"])


def _message(error: Any) -> str:
    return str(error.get("message") if isinstance(error, dict) else error)[:200]


_NULL = msgspec.Raw(b"null")
_IDS = re.compile(rb',"token_ids":\[[\d,]*\]')
_PLAIN = b"data: "


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = _NULL
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: msgspec.Raw = _NULL


class _Error(msgspec.Struct):
    code: str | int | None = None


class _Failed(msgspec.Struct):
    error: _Error


class TokenRecord:
    """Tokens of one stream with one choice.

    `num_shown` counts the tokens whose whole text the client has: the tokens after them have no text yet, or
    end inside a character.
    """

    def __init__(self, kind: Kind, *, shows_token_ids: bool) -> None:
        """`kind`: the kind of the engine."""
        self.kind = kind
        self._shows_token_ids = shows_token_ids
        self.token_ids = array("q")
        self.num_shown = 0
        self.num_events = 0
        self.prompt_token_ids: msgspec.Raw | None = None  # A JSON array, if the engine has sent it.
        self.is_complete = True  # Every token of the stream is recorded.
        self.is_finished = False  # The event with the finish reason has come.

    def event(self, event: bytes) -> bytes:
        """Note the tokens of a whole event, and return it for the client."""
        self.num_events += 1
        data = event[len(_PLAIN) : -2] if event.startswith(_PLAIN) else data_of(event)
        if not data or is_done(event):
            return event
        try:
            chunk = decode_json(data, _Chunk)
        except NotJson:
            self.is_complete = False
            return event
        if not chunk.choices:
            return event
        choice = chunk.choices[0]
        self._note(choice, is_alone=len(chunk.choices) == 1)
        prompt = next(
            (ids for ids in (choice.prompt_token_ids, chunk.prompt_token_ids) if ids != _NULL), None
        )
        if prompt is not None:
            self.prompt_token_ids = msgspec.Raw(bytes(prompt))  # A copy does not hold the whole event.
        if self._shows_token_ids or (choice.token_ids is None and prompt is None):
            return event
        stripped, num_found = _IDS.subn(b"", event, 1)
        return stripped if num_found and prompt is None else _without_ids(data, event)

    def _note(self, choice: _Choice, *, is_alone: bool) -> None:
        delta, text = choice.delta, choice.text
        if delta is not None:
            text = delta.content
            if delta.reasoning or delta.reasoning_content or delta.tool_calls:
                is_alone = False  # Another engine cannot continue these from the tokens alone.
        if not is_alone or (choice.token_ids is None and (text or choice.finish_reason)):
            self.is_complete = False
        self.token_ids.extend(choice.token_ids or ())
        if text and not text.endswith("\ufffd"):
            self.num_shown = len(self.token_ids)
        self.is_finished = self.is_finished or choice.finish_reason is not None


def is_engines_error(event: bytes) -> bool:
    """Whether an event reports that the engine cannot go on, by no fault of the client."""
    if b'"error"' not in event:
        return False
    try:
        error = decode_json(data_of(event), _Failed).error
    except NotJson:
        return False  # The word is in the text.
    return not (isinstance(error.code, int) and 400 <= error.code < 500)


def _without_ids(data: bytes, event: bytes) -> bytes:
    """The event without ids, whatever form the engine's JSON has."""
    try:
        chunk = decode_json(data, RawObject)
        choices = decode_json(chunk["choices"], list[RawObject])
    except (NotJson, KeyError):
        return event
    chunk.pop("prompt_token_ids", None)
    for choice in choices:
        choice.pop("prompt_token_ids", None)
        choice.pop("token_ids", None)
    return sse_event({**chunk, "choices": choices})


_DETAILS = "prompt_tokens_details"
_MARK = b'"transferred_tokens"'  # Only final usages of Baton's engines have it.


def with_prefill_hits(body: bytes, lent: Mapping[str, Any] | None) -> bytes:
    """D's whole answer for the client. `lent`: the params of P's answer in a push, if it has come."""
    counted = count_prefill_hits(body, lent) if lent else None
    return body if counted is None else msgspec.json.encode(counted)


def event_with_prefill_hits(event: bytes, lent: Mapping[str, Any] | None) -> bytes:
    """An event of D's stream for the client."""
    counted = count_prefill_hits(data_of(event), lent) if lent and _MARK in event else None
    return event if counted is None else sse_event(counted)


def count_prefill_hits(text: bytes, lent: Mapping[str, Any]) -> RawObject | None:
    """`text`: an answer of D or a chunk of it; `lent`: P's params. None if the text stays as it is."""
    try:
        at_prefill = parse_cached_tokens(lent)
        if not at_prefill or _MARK not in text:
            return None
        answer = decode_json(text, RawObject)
        usage = decode_json(answer["usage"], RawObject)
        details = decode_json(usage[_DETAILS], dict[str, int])
        own, transferred = details["cached_tokens"], details["transferred_tokens"]
    except (BadTransferParams, NotJson, KeyError):
        return None  # The answer is not in the form of Baton's engines.
    details["cached_tokens"] = cached_tokens(own, transferred, at_prefill)
    usage[_DETAILS] = msgspec.Raw(msgspec.json.encode(details))
    return {**answer, "usage": msgspec.Raw(msgspec.json.encode(usage))}
