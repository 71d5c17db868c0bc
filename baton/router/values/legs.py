"""The bodies of the two legs, made from the client's body: pure functions of JSON.

    pull    client's body --prefill_body--> P   one token, not streamed, do_remote_decode, a transfer id
            P's answer    --read_prefill--> params
            client's body + params -decode_body-> D   otherwise as the client sent it

    push    both at once, with one transfer id; D's params are `push_params`, which name P

    continuation   a Baton D gets the client's body, and OUTPUT_TOKEN_IDS: the tokens that the client has

    first token    P gets `first_token_body`, the client's whole body: P stops by itself after one token

Addresses and tickets come from engines only: a body that brings its own is refused.
"""

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from baton.core.errors import UserError
from baton.core.json_text import NotJson, decode_json
from baton.core.retention import NEEDS_SESSION, RETENTION, TENANT, parse_retention
from baton.core.transfer_params import CONTINUE, LEND_STORED
from baton.http.json_body import decode_as, decode_field
from baton.http.lax_values import SCALARS, as_lax
from baton.router.values.dialects import Dialect
from baton.tracing.trace_context import HEADERS as TRACE_HEADERS

PARAMS = "kv_transfer_params"
FIRST_TOKEN = "baton_first_token"
TOKEN_IDS = "baton_token_ids"
OUTPUT_TOKEN_IDS = "baton_output_token_ids"
SEED_BITS = 63  # Seeds are signed 64-bit numbers.
PREFIX_CHARS = 1024  # Characters that are equal in prompts that "begin alike", for the affinity policy.
PREFIX_TOKENS = 256
CHARS_PER_TOKEN = 4  # An estimate, good enough for a threshold.

# The fields that routing reads, besides the prompt. They are decoded, and encoded anew for each leg.
_ROUTED = frozenset(
    {
        PARAMS,
        "vllm_xargs",
        "model",
        "cache_salt",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "priority",
        "n",
        "best_of",
        "temperature",
        "seed",
        "echo",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "return_token_ids",
        "presence_penalty",
        "frequency_penalty",
        "length_penalty",
        "use_beam_search",
        "include_stop_str_in_output",
        "stop",
        "tools",
        "tool_choice",
        "response_format",
        "bad_words",
        "suffix",
        "store",
        "background",
        "previous_response_id",
        "truncation",
        "max_output_tokens",
    }
)
_NULL = msgspec.Raw(b"null")
_IDS = re.compile(rb"\[\s*\d")
_FIRST_IDS_BYTES = 16 << 10  # Enough for PREFIX_TOKENS ids and white space between them.

# Fields of messages that are media, or no part of the prompt.
_NO_TEXTS = frozenset(
    {"type", "id", "call_id", "tool_call_id", "tool_use_id", "status", "signature", "encrypted_content"}
    | {"source", "image_url", "video_url", "audio_url", "input_audio", "data", "file", "file_data"}
)

# Reasons why a decode engine computes the prompt. A label of `baton:router_prefills`.
LocalReason = Literal[
    "several_prompts",
    "prompt_logprobs",
    "short_prompt",
    "cheaper",
    "no_pair",
    "other_weights",
    "no_decode_engine",
    "prefill_failed",
    "nothing_lent",
    "ticket_refused",
    "introduction_refused",
    "engines_disagree",
]


@dataclass(frozen=True, slots=True)
class Shape:
    """Properties of a request that routing uses."""

    num_prompt_tokens: int  # Exact for token ids, an estimate for text.
    prefix_key: bytes
    direct_reason: LocalReason | None  # Why this request cannot be handed over; None: it can.
    is_text: bool  # The request is no chat with images or other media.


NO_ALIASES: Mapping[str, str] = MappingProxyType({})


def parse_body(raw: bytes, aliases: Mapping[str, str] = NO_ALIASES) -> dict[str, Any]:
    """Parse a client's body. `aliases`: other names of models. Raises UserError naming the field.

    Fields that routing does not read stay as the client wrote them (`msgspec.Raw`), and so do prompt and
    messages: the legs carry these bytes. Decoding and encoding 2^20 token ids for each leg would stop the
    event loop for 100 ms.
    """
    try:
        str(raw, "utf-8")  # The decoder does not check fields that stay encoded.
    except UnicodeDecodeError as error:
        raise UserError(f"is not valid JSON: {error}", field="body") from error
    fields = decode_as(raw, dict[str, msgspec.Raw])
    body = {name: _look_at(name, value) for name, value in fields.items()}
    params = body.get(PARAMS)
    if isinstance(params, Mapping) and params.keys() == {RETENTION}:
        parse_retention(params)
    elif params is not None:
        raise UserError(f"is set by the router, except {RETENTION}; leave it out", field=PARAMS)
    refuse_hidden_params(body.get("vllm_xargs"))
    if aliases and isinstance(model := body.get("model"), str) and model in aliases:
        body["model"] = aliases[model]
    return body


def refuse_hidden_params(xargs: object) -> None:
    """Refuse transfer params in a client's `vllm_xargs`. Raises UserError."""
    if isinstance(xargs, Mapping) and xargs.get(PARAMS) is not None:
        raise UserError("is set by the router, never by a client; leave it out", field=f"vllm_xargs.{PARAMS}")


def take_kept(body: dict[str, Any], *, session: str | None, tenant: str) -> dict[str, Any]:
    """Take the retention and tenant for the engines' tiers out of a parsed body, as params for all its legs.

    Raises UserError.

    `session`: the session in the header. `tenant`: the tenant that a key or token names; or "".
    """
    kept = body.pop(PARAMS, None) or {}
    if parse_retention(kept).ends_session and not session and body.get("session_id") is None:
        raise UserError(NEEDS_SESSION, field=f"{PARAMS}.{RETENTION}.ends_session")
    return {**kept, TENANT: tenant} if tenant else kept


def with_kept(body: Mapping[str, Any], kept: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body with the result of `take_kept` in its params."""
    return {**body, PARAMS: {**kept, **(body.get(PARAMS) or {})}} if kept else body


def _look_at(name: str, value: msgspec.Raw) -> Any:
    """Raises UserError."""
    if name in _ROUTED:
        return as_lax(decode_field(value, name), SCALARS.get(name, object))
    return None if value == _NULL else value


class _Named(msgspec.Struct):
    model: Any = None


def without_alias(raw: bytes, aliases: Mapping[str, str]) -> bytes:
    """The body with the engines' name of its model. A body that is no object stays as it is."""
    if not aliases:
        return raw
    try:
        model = decode_json(raw, _Named).model
        if not isinstance(model, str) or model not in aliases:
            return raw
        return msgspec.json.encode({**decode_json(raw, dict[str, msgspec.Raw]), "model": aliases[model]})
    except NotJson:
        return raw


def _first_ids(prompt: msgspec.Raw) -> list[Any]:
    """The first token ids of a prompt: at least as many as routing reads."""
    text = bytes(memoryview(prompt)[: _FIRST_IDS_BYTES + 1])
    if len(text) > _FIRST_IDS_BYTES:
        text = text.rpartition(b",")[0] + b"]"
    try:
        return list(decode_json(text, list[Any]))
    except NotJson:
        return []  # The engine refuses this prompt.


def new_transfer_id() -> str:
    """128 random bits. Every attempt has a new one, retries included."""
    return secrets.token_hex(16)


def prefill_body(
    body: Mapping[str, Any], transfer_id: str, dialect: Dialect, *, continues: bool = False
) -> dict[str, Any]:
    """The body of a prefill leg. `continues`: the answer continues after the token that P samples."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    return {**dialect.for_prefill(body), PARAMS: {**params, CONTINUE: True} if continues else params}


def stored_body(body: Mapping[str, Any], transfer_id: str | None, dialect: Dialect) -> dict[str, Any]:
    """Body that asks an engine to lend the tokens of the prompt that it has, and to compute nothing.

    `transfer_id`: the id of a loan through the engine's cache; None: a loan from its host memory.
    """
    leg = prefill_body(body, transfer_id or "", dialect)
    params = leg[PARAMS] if transfer_id is not None else {}
    return {**leg, PARAMS: {**params, LEND_STORED: True}}


def first_token_body(body: Mapping[str, Any], transfer_id: str) -> dict[str, Any]:
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    return {**body, PARAMS: {**params, FIRST_TOKEN: True, CONTINUE: True}}


def push_params(
    transfer_id: str, *, engine_id: str, introduction: str, continues: bool = False
) -> dict[str, Any]:
    """Params of D's leg in a push. `continues`: the same value as in P's leg."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_engine_id": engine_id,
        "baton_introduction": introduction,
    }
    return {**params, CONTINUE: True} if continues else params


def with_seed(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with a seed, because two engines draw the same token only from the same seed.

    A seed of the client stays. Temperature 0 needs none.
    """
    if body.get("seed") is not None or body.get("temperature") == 0:
        return dict(body)
    return {**body, "seed": secrets.randbits(SEED_BITS)}


def is_one_answer(body: Mapping[str, Any]) -> bool:
    """Whether the request has one answer, whose first token can come from another engine than the rest."""
    return body.get("n") in (None, 1) and body.get("best_of") in (None, 1)


def is_one_token(body: Mapping[str, Any]) -> bool:
    """Whether P's answer is the whole answer."""
    return (body.get("max_completion_tokens") or body.get("max_tokens")) == 1


def decode_body(body: Mapping[str, Any], ticket: Mapping[str, Any] | None) -> dict[str, Any]:
    leg = {key: value for key, value in body.items() if key != PARAMS}
    if ticket is not None:
        leg[PARAMS] = ticket
    return leg


def with_context(body: Mapping[str, Any], headers: Mapping[str, str]) -> Mapping[str, Any]:
    """The body with the trace context of the leg's headers in its params.

    A vLLM that makes no spans of its own hides headers from its connector.
    """
    context = {name: headers[name] for name in TRACE_HEADERS if name in headers}
    return {**body, PARAMS: {**body[PARAMS], **context}} if context and body.get(PARAMS) else body


def shape_of(body: Mapping[str, Any], dialect: Dialect) -> Shape:
    """The shape of a request. Never raises: an engine refuses a malformed request, in its own words."""
    if dialect.texts:
        parts = [_decoded(body.get(name)) for name in dialect.texts]
        texts = _texts(parts)
        num_tokens = sum(map(len, texts)) // CHARS_PER_TOKEN
        return Shape(num_tokens, _key(body, _leading(texts)), _direct_reason(body, None), _is_text(parts[0]))
    prompt = body.get("prompt")
    if isinstance(prompt, msgspec.Raw) and _IDS.match(prompt):
        key = _key(body, repr(_first_ids(prompt)[:PREFIX_TOKENS]))
        return Shape(bytes(prompt).count(b",") + 1, key, _direct_reason(body, None), is_text=True)
    prompt = _decoded(prompt)
    direct_reason, num_tokens, leading = _direct_reason(body, prompt), 0, ""
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if isinstance(prompt, str):
        num_tokens, leading = len(prompt) // CHARS_PER_TOKEN, prompt[:PREFIX_CHARS]
    elif isinstance(prompt, list):
        num_tokens, leading = len(prompt), repr(prompt[:PREFIX_TOKENS])
    return Shape(num_tokens, _key(body, leading), direct_reason, is_text=True)


def _decoded(value: Any) -> Any:
    try:
        return decode_json(value) if isinstance(value, msgspec.Raw) else value
    except NotJson:
        return None


def _direct_reason(body: Mapping[str, Any], prompt: Any) -> LocalReason | None:
    if isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(part, int) for part in prompt):
        return "several_prompts"  # A ticket is for one prompt.
    if body.get("prompt_logprobs") is not None or (body.get("echo") and body.get("logprobs") is not None):
        return "prompt_logprobs"  # Only the engine that computes the prompt has its logprobs.
    return None


def _is_text(messages: Any) -> bool:
    return messages is None or (
        isinstance(messages, list)
        and all(
            isinstance(message, Mapping) and isinstance(message.get("content"), str | None)
            for message in messages
        )
    )


def _texts(prompt: list[Any]) -> list[str]:
    """The texts in a prompt, in their order. A prompt may be nested deeply, so this does not recurse."""
    texts, left = [], prompt[::-1]
    while left:
        part = left.pop()
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, list):
            left += part[::-1]
        elif isinstance(part, dict):
            left += [value for name, value in reversed(part.items()) if name not in _NO_TEXTS]
    return texts


def _leading(texts: Iterable[str]) -> str:
    leading = ""
    for text in texts:
        leading += f"{len(text)}:{text[:PREFIX_CHARS]}"
        if len(leading) >= PREFIX_CHARS:
            break
    return leading[:PREFIX_CHARS]


def _key(body: Mapping[str, Any], leading: str) -> bytes:
    # Two salts never share a block, so they need not share an engine.
    whole = f"{body.get('model')}\0{body.get('cache_salt')}\0{leading}"
    return hashlib.blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=16).digest()
