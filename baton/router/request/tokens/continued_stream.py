"""D's stream for a client that has the first token already, from P (see `kept_token`).

ContinuedSieve   D continued after P's token: its stream becomes the rest of the answer
OverlapReader    D gives the token too, because it began before P had answered: the client does not get D's
"""

from collections.abc import Mapping
from typing import Any

from baton.router.fleet.turns import TurnSieve
from baton.router.request.tokens.kept_token import KeptToken
from baton.router.values.sse import choice_of, chunk_of, data_of, sse_event

_USAGE = b'"usage"'


class ContinuedSieve(TurnSieve):
    """Turns D's stream into the rest of an answer that has begun."""

    def __init__(self, num_given: int) -> None:
        """`num_given`: tokens of the answer that D counts as prompt."""
        super().__init__()
        self._num_given = num_given
        self._is_at_start = True

    def event(self, event: bytes) -> bytes:
        event = super().event(event)
        if not self._is_at_start and _USAGE not in event:
            return event
        chunk = chunk_of(event)
        if chunk is None:
            return event
        if self._is_at_start:
            if _is_opening(chunk):
                return b""
            self._is_at_start = False
            if (choice := choice_of(chunk)) is not None:
                choice.pop("prompt_token_ids", None)  # The client has the ids, without the first token.
        if isinstance(usage := chunk.get("usage"), dict):
            chunk["usage"] = _of_one_answer(usage, self._num_given)
        return sse_event(chunk)


class OverlapReader:
    """Reads D's stream until D has given the first token, which the client has already.

    It compares the texts: D's has to begin with P's. If the last event has more than the token, `left_over`
    is the rest of that event for the client.
    """

    def __init__(self, kept: KeptToken) -> None:
        assert not kept.is_last
        self._kept = kept
        self._left = kept.text
        self.left_over = b""

    def look_at(self, event: bytes) -> bool | None:
        """Whether D gives the same token; None: not known yet."""
        return self._compare(chunk_of(event)) if data_of(event) else None  # A comment.

    def _compare(self, chunk: dict[str, Any] | None) -> bool | None:
        choice = choice_of(chunk)
        if chunk is None or choice is None:
            return False  # The stream has ended, or has an error.
        part = choice.get("delta") if self._kept.is_chat else choice
        if not isinstance(part, dict):
            return False
        name = "content" if self._kept.is_chat else "text"
        text, ids, ends = (
            part.get(name) or "",
            choice.get("token_ids"),
            choice.get("finish_reason") is not None,
        )
        if not isinstance(text, str) or (ids and ids[0] != self._kept.token_id):
            return False
        if len(text) < len(self._left):
            self._left = self._left[len(text) :] if self._left.startswith(text) else ""
            return False if ends or not self._left else None
        if not text.startswith(self._left) or (ends and text == self._left):
            return False  # Another token, or an end where P's answer continues.
        if text != self._left:  # D was so quick that a second token is in the same event.
            part[name] = text[len(self._left) :]
            choice.pop("prompt_token_ids", None)
            if ids:
                choice["token_ids"] = ids[1:]
            self.left_over = sse_event(chunk)
        return True


def _is_opening(chunk: Mapping[str, Any]) -> bool:
    delta = (choice_of(chunk) or {}).get("delta")
    return isinstance(delta, dict) and "role" in delta and not delta.get("content")


def _of_one_answer(usage: Mapping[str, Any], num_given: int) -> dict[str, Any]:
    """Usage that counts the given tokens as answer, where D counted them as prompt."""
    counts = dict(usage)
    if isinstance(counts.get("prompt_tokens"), int):
        counts["prompt_tokens"] -= num_given
    if isinstance(counts.get("completion_tokens"), int):
        counts["completion_tokens"] += num_given
    return counts
