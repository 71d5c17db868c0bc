"""The first token in a stream of events, found, and made fit for the client. Bytes in, values out.

    data: {opening}                                 chat only: who speaks
    data: {..., "token_ids": [5], ...}              the event that is looked for
    data: {...} ... data: [DONE]                    the rest, which is left as it is

An engine that is asked for its first token (`baton_first_token`) names the token's id in its event, so that
two engines' can be compared. What the client did not ask for is taken out again here.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from baton.core.errors import PeerError
from baton.router.legs import PARAMS
from baton.router.sse import sse_event

# Before and with the first token: an echoed prompt, and its token ids.
MAX_OPENING_BYTES = 32 << 20
_END = b"\n\n"


@dataclass(frozen=True, slots=True)
class FirstToken:
    token_ids: tuple[int, ...]
    events: bytes  # For the client: all up to the token's. May be empty, if there is nothing to show yet.
    is_last: bool  # The answer ends with it.
    params: dict[str, Any] | None  # `kv_transfer_params`.


class FirstTokenReader:
    """Push what arrives until it says the first token; `rest` is what has arrived behind it."""

    def __init__(self, *, shows_token_ids: bool) -> None:
        self._shows_token_ids = shows_token_ids
        self._pending = bytearray()
        self._opening = bytearray()

    @property
    def rest(self) -> bytes:
        return bytes(self._pending)

    def push(self, chunk: bytes) -> FirstToken | None:
        """Raises PeerError for a stream that has no first token."""
        self._pending += chunk
        while (end := self._pending.find(_END)) >= 0:
            event = bytes(self._pending[: end + len(_END)])
            del self._pending[: len(event)]
            if (first := self._look_at(event)) is not None:
                return first
            self._opening += event
        if len(self._pending) + len(self._opening) > MAX_OPENING_BYTES:
            raise PeerError(f"over {MAX_OPENING_BYTES} bytes without a first token")
        return None

    def _look_at(self, event: bytes) -> FirstToken | None:
        content = b"".join(
            line.removeprefix(b"data:").strip() for line in event.splitlines() if line.startswith(b"data:")
        )
        if not content:
            return None  # A comment.
        if content == b"[DONE]":
            raise PeerError("the stream ended without a first token")
        try:
            chunk = msgspec.json.decode(content)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise PeerError(f"an event that is not JSON: {error}") from error
        if not isinstance(chunk, dict):
            raise PeerError(f"an event that is a {type(chunk).__name__}, not an object")
        if "error" in chunk:
            raise PeerError(f"an error in place of the first token: {_message(chunk['error'])}")
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        if not isinstance(choice, dict) or not choice.get("token_ids"):
            return None
        return self._first(chunk, choice)

    def _first(self, chunk: dict[str, Any], choice: dict[str, Any]) -> FirstToken:
        params = chunk.pop(PARAMS, None)
        token_ids = choice["token_ids"] if self._shows_token_ids else choice.pop("token_ids")
        if not (isinstance(token_ids, list) and all(isinstance(token_id, int) for token_id in token_ids)):
            raise PeerError("token_ids that are no list of integers")
        is_shown = self._shows_token_ids or _has_something_to_show(choice)
        return FirstToken(
            token_ids=tuple(token_ids),
            events=bytes(self._opening) + (sse_event(chunk) if is_shown else b""),
            is_last=choice.get("finish_reason") is not None,
            params=params if isinstance(params, dict) else None,
        )


def _has_something_to_show(choice: dict[str, Any]) -> bool:
    """As an engine decides it that nobody asked for the ids: text may be held back with the first token."""
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    return bool(text or choice.get("finish_reason") or choice.get("logprobs"))


def _message(error: Any) -> str:
    return str(error.get("message") if isinstance(error, dict) else error)[:200]
