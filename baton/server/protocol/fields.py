"""Table of every request field of the servers of vLLM 0.32 and 0.33, with its status in this server.

    implemented   the request structs of this package have the field
    refused       HTTP 400 for any value but null and the neutral ones
    ignored       the field has no effect on the answer of this server, so any value is accepted

A field that is not in the table is unknown: it is ignored, and logged once per name. The table also makes the
tables of `docs/api.md` (`python -m baton.server.protocol.fields` prints them).
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from baton.core.errors import UserError
from baton.http.json_body import decode_field
from baton.http.lax_values import as_lax

logger = logging.getLogger(__name__)

Endpoint: TypeAlias = Literal["completions", "chat", "tokenize", "detokenize"]
Status: TypeAlias = Literal["implemented", "refused", "ignored"]

PATHS: dict[Endpoint, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
MAX_NEUTRAL_BYTES = 256  # JSON of a neutral value with blanks; longer values are refused undecoded.
MAX_LOGGED_NAMES = 256  # Clients choose the names, so the log and its memory must be bounded.
MAX_LOGGED_CHARS = 64


@dataclass(frozen=True, slots=True)
class Field:
    """`note`: for an implemented field its range and what differs from vLLM; for a refused one what to do
    instead, which is also the error's text; for an ignored one why that is harmless."""

    name: str
    endpoints: tuple[Endpoint, ...]
    status: Status
    note: str
    neutral: tuple[Any, ...] = ()  # Values besides null that a refused field may have.


_TEXT: tuple[Endpoint, ...] = ("completions",)
_CHAT: tuple[Endpoint, ...] = ("chat",)
_GENERATE: tuple[Endpoint, ...] = ("completions", "chat")
_TOKENIZE: tuple[Endpoint, ...] = ("tokenize",)
_ENCODE: tuple[Endpoint, ...] = ("chat", "tokenize")
_ALL: tuple[Endpoint, ...] = ("completions", "chat", "tokenize", "detokenize")

_RENAMED = "it is a field of structured_outputs now"
_NO_MEDIA = "this server takes text only; leave the field out"
_NO_CHOICE = "the template belongs to the model; pass variables in chat_template_kwargs"


def _implemented(endpoints: tuple[Endpoint, ...], *fields: tuple[str, str]) -> Iterable[Field]:
    return (Field(name, endpoints, "implemented", note) for name, note in fields)


def _refused(endpoints: tuple[Endpoint, ...], *fields: tuple[str, str, tuple[Any, ...]]) -> Iterable[Field]:
    return (Field(name, endpoints, "refused", note, neutral) for name, note, neutral in fields)


def _ignored(endpoints: tuple[Endpoint, ...], *fields: tuple[str, str]) -> Iterable[Field]:
    return (Field(name, endpoints, "ignored", note) for name, note in fields)


FIELDS: tuple[Field, ...] = (
    *_implemented(_ALL, ("model", "the served model's name; empty or left out: the same")),
    *_implemented(
        _TEXT,
        ("prompt", "text, token ids, or a list of either; at most 1024 prompts"),
        ("echo", "with `max_tokens: 0` the answer is the prompt alone"),
        ("logprobs", "0 to 20"),
        ("best_of", "OpenAI's; must be equal to `n`"),
        ("add_special_tokens", "true or false"),
    ),
    *_implemented(
        _CHAT,
        ("messages", "1 to 4096 messages of text, with tool calls, tool results and reasoning"),
        ("max_completion_tokens", "takes precedence over `max_tokens`"),
        ("logprobs", "true or false"),
        ("top_logprobs", "0 to 20; above 0 it needs `logprobs: true`"),
        ("tools", "input of the template; calls come back as text, unless `tool_choice` asks for them"),
        (
            "tool_choice",
            "`none` or `auto`, with the same effect: the model decides; `required`, or a tool's name: the "
            "answer is constrained to calls, and comes back as `tool_calls`",
        ),
        ("parallel_tool_calls", "false: `required` gives one call; it does not change calls that are text"),
        ("documents", "input of the template"),
        (
            "reasoning_effort",
            "`none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`; input of the template, with "
            "`enable_thinking`",
        ),
        ("add_generation_prompt", "true or false"),
        ("chat_template_kwargs", "variables of the template"),
    ),
    *_implemented(
        _GENERATE,
        ("n", "1 to 128"),
        ("stream", "true or false"),
        ("stream_options", "`include_usage`, and with it `continuous_usage_stats`; needs `stream: true`"),
        (
            "max_tokens",
            "1 to the model's context length; cut to the room that the prompt leaves; completions: 16 unless "
            "given",
        ),
        ("min_tokens", "0 to `max_tokens`"),
        ("temperature", "0 (greedy) to 100; values above 0 are at least 0.01"),
        ("top_p", "above 0, at most 1"),
        ("top_k", "-1 or 0 (all tokens), or positive"),
        ("min_p", "0 to 1"),
        ("seed", "64 bits; the draws are not those of vLLM"),
        ("repetition_penalty", "above 0, at most 100"),
        ("presence_penalty", "-2 to 2"),
        ("frequency_penalty", "-2 to 2"),
        ("logit_bias", "token ids to numbers, which are cut to -100 to 100; at most 1024"),
        ("allowed_token_ids", "at least one id; no other token is chosen"),
        (
            "response_format",
            "`text`, `json_object` or `json_schema`; not with `min_tokens`, `allowed_token_ids`, `bad_words`",
        ),
        (
            "structured_outputs",
            "one of `json`, `regex`, `choice`, `grammar` (Lark or GBNF) and `json_object: true`; at most "
            "131072 characters; of the options `disable_any_whitespace`",
        ),
        ("bad_words", "at most 128 words, with and without a space before; at most 1024 tokens in all"),
        ("stop", "at most 16 strings of 1 to 1024 characters"),
        ("stop_token_ids", "at most 1024 ids"),
        ("include_stop_str_in_output", "true or false; shows stop tokens too"),
        ("ignore_eos", "true or false"),
        ("skip_special_tokens", "true or false"),
        (
            "truncate_prompt_tokens",
            "-1 (all but one token of the context) or 1 to the context length",
        ),
        ("truncation_side", "`left` (keeps the last tokens, the default) or `right`"),
        (
            "prompt_logprobs",
            "0 to 20, with `stream: true` only 0; the whole prompt is computed here: no cache is read, no "
            "KV is loaded",
        ),
        ("priority", "32 bits; lower runs first under policy `priority`"),
        ("cache_salt", "1 to 1024 characters"),
        (
            "session_id",
            "1 to 256 characters; or the header X-Session-Id; for `baton_retention` (docs/tiers.md)",
        ),
        ("return_token_ids", "true or false"),
        ("return_tokens_as_token_ids", "true: logprobs show tokens as `token_id:<id>`"),
        ("kv_transfer_params", "see docs/protocol.md"),
    ),
    *_implemented(
        _TOKENIZE,
        ("prompt", "text; either `prompt` or `messages`"),
        ("messages", "as in a chat"),
        ("add_special_tokens", "of a prompt; a chat's are written by the template"),
        ("add_generation_prompt", "true or false"),
        ("chat_template_kwargs", "variables of the template"),
        ("tools", "input of the template"),
    ),
    *_implemented(("detokenize",), ("tokens", "token ids")),
    *_refused(
        _GENERATE,
        ("guided_json", _RENAMED, ()),
        ("guided_regex", _RENAMED, ()),
        ("guided_choice", _RENAMED, ()),
        ("guided_grammar", _RENAMED, ()),
        ("guided_decoding_backend", "the backend is llguidance; leave it out", ()),
        ("guided_whitespace_pattern", "leave it out; structured_outputs has disable_any_whitespace", ()),
        ("use_beam_search", "use sampling with n, and choose among the answers", (False,)),
        ("length_penalty", "it is for beam search; leave it out", (1.0,)),
        ("watermarking", "leave it out", (False,)),
        ("logprob_token_ids", "ask for the most likely tokens by logprobs or top_logprobs", ([],)),
        ("repetition_detection", "use the penalties or max_tokens", ()),
        ("thinking_token_budget", "use max_tokens", (-1,)),
        ("spaces_between_special_tokens", "set skip_special_tokens instead", (True,)),
        ("ec_transfer_params", _NO_MEDIA, ({},)),
        ("return_weight_versions", "ask /weight_info before and after the answer", (False,)),
        ("vllm_xargs", "this server has no custom extensions; leave it out", ({},)),
    ),
    *_refused(
        _TEXT,
        ("suffix", "this server does not fill in the middle; put the whole text into prompt", ("",)),
        ("prompt_embeds", "give the prompt as text or token ids", ([],)),
    ),
    *_refused(
        _CHAT,
        ("echo", "prepend the last message to the answer in the client", (False,)),
        ("add_special_tokens", "the chat template writes the special tokens; leave it out", (False,)),
        ("return_prompt_text", "ask /tokenize for the prompt's tokens", (False,)),
        ("functions", "use tools", ([],)),
        ("function_call", "use tools and tool_choice", ("none", "auto")),
    ),
    *_refused(
        _ENCODE,
        ("continue_final_message", "end the messages with one of the user", (False,)),
        ("chat_template", _NO_CHOICE, ()),
        ("media_io_kwargs", _NO_MEDIA, ({},)),
        ("mm_processor_kwargs", _NO_MEDIA, ({},)),
    ),
    *_refused(_TOKENIZE, ("return_token_strs", "ask /detokenize for the text", (False,))),
    *_ignored(
        _GENERATE,
        ("user", "vLLM ignores it as well"),
        ("request_id", "the header X-Request-Id names the answer"),
        ("stream_interval", "every token has its own chunk, which is always allowed"),
        ("return_token_offsets", "vLLM's render endpoints alone read it"),
        ("mm_payload", "vLLM's render endpoints alone read it"),
        ("return_mm_kwargs", "vLLM's render endpoints alone read it"),
        ("routed_experts_prompt_start", "no routed experts are returned"),
        ("store", "OpenAI's: answers are not stored"),
        ("metadata", "OpenAI's: answers are not stored"),
        ("service_tier", "OpenAI's: there is one tier"),
    ),
    *_ignored(
        _CHAT,
        ("include_reasoning", "reasoning comes back as text, as from vLLM without a reasoning parser"),
    ),
)

_BY_ENDPOINT: dict[Endpoint, dict[str, Field]] = {
    endpoint: {field.name: field for field in FIELDS if endpoint in field.endpoints} for endpoint in PATHS
}
_logged_names: set[str] = set()


def check_fields(body: dict[str, msgspec.Raw], endpoint: Endpoint) -> None:
    """Raise UserError for a refused field, and log each unknown name once.

    `body` is the JSON object with undecoded values: values of implemented and ignored fields are not
    checked here.
    """
    known = _BY_ENDPOINT[endpoint]
    for name, raw in body.items():
        field = known.get(name)
        if field is None:
            _log_unknown(name, endpoint)
        elif field.status == "refused":
            _check_refused(field, raw)


def _check_refused(field: Field, raw: msgspec.Raw) -> None:
    if len(memoryview(raw)) <= MAX_NEUTRAL_BYTES:
        value = decode_field(raw, field.name)  # The value may be a number that no double holds.
        if value is None or any(as_lax(value, type(neutral)) == neutral for neutral in field.neutral):
            return
    accepted = "".join(f" or {msgspec.json.encode(value).decode()}" for value in field.neutral)
    raise UserError(f"is not supported: {field.note} (accepted: null{accepted})", field=field.name)


def _log_unknown(name: str, endpoint: Endpoint) -> None:
    name = name[:MAX_LOGGED_CHARS]
    if name in _logged_names or len(_logged_names) >= MAX_LOGGED_NAMES:
        return
    _logged_names.add(name)
    logger.warning(
        "requests to %s have a field %r that this server does not know; it is ignored", PATHS[endpoint], name
    )


def tables() -> str:
    """Return the tables of `docs/api.md` as Markdown."""
    lines: list[str] = []
    for endpoint, path in PATHS.items():
        lines += [f"## `POST {path}`", "", "| field | status | |", "|---|---|---|"]
        for field in sorted(_BY_ENDPOINT[endpoint].values(), key=lambda field: field.name):
            note = field.note.replace("|", "\\|")
            if field.status == "refused":
                accepted = ", ".join(
                    f"`{msgspec.json.encode(value).decode()}`" for value in (None, *field.neutral)
                )
                note += f"; accepted: {accepted}"
            lines.append(f"| `{field.name}` | {field.status} | {note} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())
