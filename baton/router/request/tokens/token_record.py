"""Record of the tokens that a client has from one engine's stream, for the engine that may continue it.

    engine's event, with token ids --event--> the client's event, without ids unless the client asked
                                   +--------> `token_ids`, `is_finished`, `is_complete`

Baton's engines name the ids because the leg asks for `baton_token_ids`, vLLM because of `return_token_ids`.
"""

import re
from array import array

import msgspec

from baton.core.json_text import NotJson, decode_json
from baton.router.values.identity import Kind
from baton.router.values.sse import RawObject, data_of, is_done, sse_event

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
