"""D's continuation after a token that P gave: for engines like vLLM. Pure functions of JSON.

    client's body --kept_body--> P             one token, with the ids of prompt and token
    P's answer    --read_kept--> KeptToken --opening--> client
    client's body --continuation_body--> D     its prompt is P's prompt and P's token; one token less is left

D then computes one position, the token's, as if it had given the token itself. The two parts equal the answer
of one engine only if no field of the request depends on earlier *output*, because D counts that output as
prompt. Stop strings, seeds, output penalties and grammars depend on it. `can_split` has the fields that are
known to be harmless; with any other field D gives all tokens.

ContinuedSieve   D continued after P's token: its stream becomes the rest of the answer
OverlapReader    D gives the token too, because it began before P had answered: the client does not get D's
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from baton.router.fleet.turns import TurnSieve
from baton.router.values.dialects import Dialect
from baton.router.values.legs import PARAMS, prefill_body
from baton.router.values.sse import DONE_EVENT, choice_of, chunk_of, data_of, sse_event

# Fields that do not change how a token follows from the tokens before it, and fields that treat prompt and
# output alike.
_HARMLESS = frozenset(
    {
        "model",
        "prompt",
        "messages",
        "stream",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "logit_bias",
        "allowed_token_ids",
        "stop_token_ids",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "add_special_tokens",
        "add_generation_prompt",
        "chat_template",
        "chat_template_kwargs",
        "cache_salt",
        "priority",
        "user",
        "request_id",
        "session_id",
        "metadata",
        "store",
        "return_token_ids",
    }
)
# Fields that have no effect with these values, and are not harmless with others.
_IDLE: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "stop": ("", []),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "bad_words": ([],),
    "suffix": ("",),
}


def can_split(body: Mapping[str, Any], dialect: Dialect) -> bool:
    """Whether two engines that answer one after the other give the answer of one."""
    if body.get("stream") is not True or dialect.limit_of(body) is None:
        return False  # D would apply its own limit from D's first token on.
    if body.get("seed") is not None and body.get("temperature") != 0:
        return False  # D would draw from the beginning of the seed's sequence.
    if not _is_count(body.get("min_tokens", 0) or 0):
        return False
    options = body.get("stream_options")
    if options is not None and not (isinstance(options, Mapping) and set(options) <= {"include_usage"}):
        return False
    return all(
        value is None or name in _HARMLESS or name in ("seed", "stream_options") or _is_idle(name, value)
        for name, value in body.items()
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_idle(name: str, value: Any) -> bool:
    # A number is no flag: `logprobs: 0` asks for something.
    return any(
        value == idle and isinstance(value, bool) == isinstance(idle, bool) for idle in _IDLE.get(name, ())
    )


PromptIds: TypeAlias = Sequence[int] | msgspec.Raw  # Raw: a JSON array that is not empty.


@dataclass(frozen=True, slots=True)
class KeptToken:
    """P's whole answer, and its one token."""

    answer: Mapping[str, Any]
    dialect: Dialect
    text: str
    token_id: int
    prompt_token_ids: Sequence[int]
    finish_reason: str | None  # None: the answer continues after the token.
    stop_reason: Any

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None


def kept_body(body: Mapping[str, Any], transfer_id: str, dialect: Dialect) -> dict[str, Any]:
    leg = prefill_body(body, transfer_id, dialect, continues=True)
    leg["return_token_ids"] = True
    if (body.get("max_completion_tokens") or body.get("max_tokens")) == 1:
        del leg[PARAMS]  # P gives the whole answer: no engine would fetch what P lends.
    if body.get("min_tokens"):
        leg["min_tokens"] = 1  # The first token, too, must not end the answer.
    return leg


def read_kept(
    answer: Mapping[str, Any], body: Mapping[str, Any], dialect: Dialect, *, max_model_len: int | None
) -> KeptToken | None:
    """The token of P's answer. None: it cannot be shown, or D cannot continue after it; D gives all tokens.

    `max_model_len`: the limit of the engine that has to continue.
    """
    choice = choice_of(answer)
    if choice is None:
        return None
    text, prompt = dialect.text_of(choice), _prompt_of(answer, choice)
    ids, finish = choice.get("token_ids"), choice.get("finish_reason")
    limit = dialect.limit_of(body)
    token_id = ids[0] if isinstance(ids, list) and len(ids) == 1 and _are_ids(ids) else None
    if text is None or prompt is None or limit is None or token_id is None:
        return None
    if finish == "stop" or limit == 1:
        return KeptToken(answer, dialect, text, token_id, prompt, finish, choice.get("stop_reason"))
    # Engines hold an incomplete character back, and a special token has no text: only the engine that gives
    # the whole answer shows these correctly. D has to refuse a request that is too long for it.
    if finish != "length" or not text or text.endswith("\ufffd"):
        return None
    if max_model_len is None or len(prompt) + limit > max_model_len:
        return None
    return KeptToken(answer, dialect, text, token_id, prompt, None, None)


def opening(kept: KeptToken, body: Mapping[str, Any]) -> bytes:
    """Events that give the token to the client."""
    choice: dict[str, Any] = {
        "index": 0,
        "logprobs": None,
        "finish_reason": kept.finish_reason,
        "stop_reason": kept.stop_reason,
    }
    prompt = {}
    if body.get("return_token_ids"):
        choice["token_ids"], prompt = [kept.token_id], {"prompt_token_ids": kept.prompt_token_ids}
    chunks = kept.dialect.opening_of(choice, kept.text, prompt)
    return b"".join(sse_event({**_head(kept), **chunk}) for chunk in chunks)


def ending(kept: KeptToken, body: Mapping[str, Any]) -> bytes:
    """Events that end the stream after a token that is the last one."""
    usage = b""
    if (body.get("stream_options") or {}).get("include_usage"):
        usage = sse_event({**_head(kept), "choices": [], "usage": kept.answer.get("usage")})
    return usage + DONE_EVENT


def continuation_body(
    body: Mapping[str, Any],
    prompt: PromptIds,
    token_ids: Sequence[int],
    params: Mapping[str, Any] | None,
    dialect: Dialect,
) -> dict[str, Any]:
    """Body for a vLLM that has to continue after these tokens of the answer.

    `params`: where D finds the KV of the prompt; None: D computes it.
    """
    leg = {key: value for key, value in body.items() if key != PARAMS}
    limit, num_given = dialect.limit_of(body), len(token_ids)
    assert limit is not None
    assert limit > num_given, "the tokens are the whole answer"
    leg |= dict.fromkeys(
        [*(name for name in dialect.limits if leg.get(name) is not None)] or ["max_tokens"], limit - num_given
    )
    if leg.get("min_tokens"):
        leg["min_tokens"] = max(0, leg["min_tokens"] - num_given)
    ids: PromptIds
    if isinstance(prompt, msgspec.Raw):
        ids = msgspec.Raw(bytes(prompt).rstrip()[:-1] + b"," + msgspec.json.encode(token_ids)[1:])
    else:
        ids = [*prompt, *token_ids]
    leg, params = dialect.with_prompt(leg, ids, params)
    return leg if params is None else {**leg, PARAMS: dict(params)}


def _prompt_of(answer: Mapping[str, Any], choice: Mapping[str, Any]) -> list[int] | None:
    """Token ids of the prompt: a field of the choice in completions, of the answer in chats."""
    ids = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
    return ids if ids and _are_ids(ids) else None


def _are_ids(ids: Any) -> bool:
    return isinstance(ids, list) and all(type(token_id) is int and token_id >= 0 for token_id in ids)


def _head(kept: KeptToken) -> dict[str, Any]:
    head = {name: kept.answer[name] for name in ("id", "created", "model") if name in kept.answer}
    return {**head, "object": kept.dialect.chunk_object}


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
        part, name = self._kept.dialect.part_of(choice), self._kept.dialect.text_name
        if not isinstance(part, dict):
            return False
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
