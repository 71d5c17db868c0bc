"""Finder of the first token in a stream of events, for the client. Events in, values out.

    data: {opening}                                 chat only: the role
    data: {..., "token_ids": [5], ...}              the event with the first token
    data: {...} ... data: [DONE]                    the rest, which stays as it is

An engine that is asked for its first token (`baton_first_token`) names the token's id in its event, so that
the router can compare the tokens of two engines. This module removes the id if the client did not ask for it.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from baton.core.errors import PeerError
from baton.core.json_text import NotJson, decode_json
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

    An engine may hold the text of the first token back.
    """
    delta = choice["delta"]
    text = delta.get("content") if isinstance(delta, dict) else choice["text"]
    return bool(text or choice["finish_reason"] or choice["logprobs"])


def _message(error: Any) -> str:
    return str(error.get("message") if isinstance(error, dict) else error)[:200]
