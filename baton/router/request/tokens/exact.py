"""Requests whose answer two engines may give one after the other: P the first token, D the rest.

The two parts equal the answer of one engine only if no field of the request depends on earlier *output*,
because D counts that output as prompt. Stop strings, seeds, output penalties and grammars depend on it. The
lists have the fields that are known to be harmless; with any other field D gives all tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

DEFAULT_MAX_TOKENS = 16  # Default of OpenAI's completions; a chat has none.

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


def can_split(body: Mapping[str, Any], *, is_chat: bool) -> bool:
    """Whether two engines that answer one after the other give the answer of one."""
    if body.get("stream") is not True or limit_of(body, is_chat=is_chat) is None:
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


def limit_of(body: Mapping[str, Any], *, is_chat: bool) -> int | None:
    """The most tokens that the client wants; None: it names no valid limit."""
    if is_chat:
        limit = body.get("max_completion_tokens")
        limit = body.get("max_tokens") if limit is None else limit
    else:
        limit = body.get("max_tokens", DEFAULT_MAX_TOKENS)
    return limit if _is_count(limit) and limit >= 1 else None


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_idle(name: str, value: Any) -> bool:
    # A number is no flag: `logprobs: 0` asks for something.
    return any(
        value == idle and isinstance(value, bool) == isinstance(idle, bool) for idle in _IDLE.get(name, ())
    )
