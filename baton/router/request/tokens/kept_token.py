"""The first token in P's whole answer, and D's continuation after it: for engines like vLLM.

    client's body --kept_body--> P             one token, with the ids of prompt and token
    P's answer    --read_kept--> KeptToken --opening--> client
    client's body --continuation_body--> D     its prompt is P's prompt and P's token; one token less is left

D then computes one position, the token's, as if it had given the token itself. Pure functions of JSON.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from baton.router.request.tokens.exact import limit_of
from baton.router.values.legs import PARAMS, prefill_body
from baton.router.values.sse import choice_of, sse_event

PromptIds: TypeAlias = Sequence[int] | msgspec.Raw  # Raw: a JSON array that is not empty.


@dataclass(frozen=True, slots=True)
class KeptToken:
    """P's whole answer, and its one token."""

    answer: Mapping[str, Any]
    is_chat: bool
    text: str
    token_id: int
    prompt_token_ids: Sequence[int]
    finish_reason: str | None  # None: the answer continues after the token.
    stop_reason: Any

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None


def kept_body(body: Mapping[str, Any], transfer_id: str) -> dict[str, Any]:
    leg = prefill_body(body, transfer_id, continues=True)
    leg["return_token_ids"] = True
    if (body.get("max_completion_tokens") or body.get("max_tokens")) == 1:
        del leg[PARAMS]  # P gives the whole answer: no engine would fetch what P lends.
    if body.get("min_tokens"):
        leg["min_tokens"] = 1  # The first token, too, must not end the answer.
    return leg


def read_kept(
    answer: Mapping[str, Any], body: Mapping[str, Any], *, is_chat: bool, max_model_len: int | None
) -> KeptToken | None:
    """The token of P's answer. None: it cannot be shown, or D cannot continue after it; D gives all tokens.

    `max_model_len`: the limit of the engine that has to continue.
    """
    choice = choice_of(answer)
    if choice is None:
        return None
    text, prompt = _text_of(choice, is_chat=is_chat), _prompt_of(answer, choice)
    ids, finish = choice.get("token_ids"), choice.get("finish_reason")
    limit = limit_of(body, is_chat=is_chat)
    token_id = ids[0] if isinstance(ids, list) and len(ids) == 1 and _are_ids(ids) else None
    if text is None or prompt is None or limit is None or token_id is None:
        return None
    if finish == "stop" or limit == 1:
        return KeptToken(answer, is_chat, text, token_id, prompt, finish, choice.get("stop_reason"))
    # Engines hold an incomplete character back, and a special token has no text: only the engine that gives
    # the whole answer shows these correctly. D has to refuse a request that is too long for it.
    if finish != "length" or not text or text.endswith("\ufffd"):
        return None
    if max_model_len is None or len(prompt) + limit > max_model_len:
        return None
    return KeptToken(answer, is_chat, text, token_id, prompt, None, None)


def opening(kept: KeptToken, body: Mapping[str, Any]) -> bytes:
    """Events that give the token to the client."""
    shows_ids = bool(body.get("return_token_ids"))
    choice: dict[str, Any] = {
        "index": 0,
        "logprobs": None,
        "finish_reason": kept.finish_reason,
        "stop_reason": kept.stop_reason,
    }
    if shows_ids:
        choice["token_ids"] = [kept.token_id]
    if not kept.is_chat:
        if shows_ids:
            choice["prompt_token_ids"] = kept.prompt_token_ids
        return sse_event({**_head(kept), "choices": [{**choice, "text": kept.text}]})
    begin = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
    first: dict[str, Any] = {**_head(kept), "choices": [{**begin, "finish_reason": None}]}
    if shows_ids:
        first["prompt_token_ids"] = kept.prompt_token_ids
    return sse_event(first) + sse_event(
        {**_head(kept), "choices": [{**choice, "delta": {"content": kept.text}}]}
    )


def ending(kept: KeptToken, body: Mapping[str, Any]) -> bytes:
    """Events that end the stream after a token that is the last one."""
    usage = b""
    if (body.get("stream_options") or {}).get("include_usage"):
        usage = sse_event({**_head(kept), "choices": [], "usage": kept.answer.get("usage")})
    return usage + b"data: [DONE]\n\n"


def continuation_body(
    body: Mapping[str, Any],
    prompt: PromptIds,
    token_ids: Sequence[int],
    params: Mapping[str, Any] | None,
    *,
    is_chat: bool,
) -> dict[str, Any]:
    """Body for a vLLM that has to continue after these tokens of the answer.

    `params`: where D finds the KV of the prompt; None: D computes it.
    """
    leg = {key: value for key, value in body.items() if key != PARAMS}
    limit, num_given = limit_of(body, is_chat=is_chat), len(token_ids)
    assert limit is not None
    assert limit > num_given, "the tokens are the whole answer"
    for name in ("max_tokens", "max_completion_tokens"):
        if leg.get(name) is not None:
            leg[name] = limit - num_given
    if not is_chat:
        leg["max_tokens"] = limit - num_given
    if leg.get("min_tokens"):
        leg["min_tokens"] = max(0, leg["min_tokens"] - num_given)
    ids: PromptIds
    if isinstance(prompt, msgspec.Raw):
        ids = msgspec.Raw(bytes(prompt).rstrip()[:-1] + b"," + msgspec.json.encode(token_ids)[1:])
    else:
        ids = [*prompt, *token_ids]
    if is_chat:
        # vLLM takes a chat's prompt in tokens from these params, and removes it before it uses them.
        leg[PARAMS] = {**(params or {}), "prompt_token_ids": ids}
        return leg
    leg["prompt"] = ids
    if params is not None:
        leg[PARAMS] = dict(params)
    return leg


def _text_of(choice: Mapping[str, Any], *, is_chat: bool) -> str | None:
    if not is_chat:
        text = choice.get("text")
        return text if isinstance(text, str) else None
    message = choice.get("message")
    if not isinstance(message, Mapping):
        return None
    if any(message.get(key) for key in ("reasoning", "reasoning_content", "tool_calls", "refusal")):
        return None
    content = message.get("content")
    return content if isinstance(content, str) else ("" if content is None else None)


def _prompt_of(answer: Mapping[str, Any], choice: Mapping[str, Any]) -> list[int] | None:
    """Token ids of the prompt: a field of the choice in completions, of the answer in chats."""
    ids = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
    return ids if ids and _are_ids(ids) else None


def _are_ids(ids: Any) -> bool:
    return isinstance(ids, list) and all(type(token_id) is int and token_id >= 0 for token_id in ids)


def _head(kept: KeptToken) -> dict[str, Any]:
    head = {name: kept.answer[name] for name in ("id", "created", "model") if name in kept.answer}
    return {**head, "object": "chat.completion.chunk" if kept.is_chat else "text_completion"}
