"""`kv_transfer_params` of a request, validated once and parsed into one of four types.

A router sends `{"do_remote_decode": true}` with the prefill leg. The producer's answer carries vLLM's keys,
so that existing proxies pass it on unchanged to the decode leg, and one more, `baton_ticket`: the signed
part, and the only part that a consumer trusts.

A router that streams sends both legs at once, with one `transfer_id`. The decode leg then carries the
producer's signed `baton_introduction` instead of a ticket, and the producer itself sends the ticket. A proxy
that does not know introductions names the producer and its control address instead. That comes from a client,
so it is accepted only for addresses that the engine's own configuration allows.

    do_remote_decode                                      Compute    P
    do_remote_decode, baton_ticket                        Compute    P; the ticket is of the previous turn
    do_remote_prefill, baton_ticket                       Fetch      D
    do_remote_prefill, transfer_id, baton_introduction    Stream     D
    do_remote_prefill, remote_host, remote_port           Named      D

Without a `transfer_id` both engines use the request's own id as the transfer's.

`"baton_continue": true` with a leg means that the answer continues after the token that P samples. It matters
for models with a recurrent state: P then lends the state after the whole prompt. Otherwise P leaves the last
token out and lends the state before it; P's answer is empty, and D computes that token.

In addition to any of these or none, `"baton_offload": "off" | "load_only" | "store_only"` limits what an
engine that offloads its KV may do for this request.

`"baton_lend_stored": true` asks an engine that lends its host memory (`lend` of BatonOffloadConnector) for
what it has of the prompt there. With `do_remote_decode` it asks for what the engine has in any place: it is
loaded into the cache, and lent from there. Nothing is computed; the answer has no token, and the params of a
Fetch if something is lent.

`"baton_prefetch": [token ids]`, too, may come with any of these or none: a prompt that begins with these
tokens will come, so an engine with stores reads its KV ahead. A KV hint of vLLM may do the same.

The producer's answer also has `"baton_cached_tokens"`, unless it is 0: how many tokens of the prompt the
producer had in its cache. The consumer uses the number for its `usage` only.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import msgspec

from baton.core.errors import BadTransferParams
from baton.core.ids import EngineId, TransferId

FIELD = "kv_transfer_params"
CONTINUE = "baton_continue"
LEND_STORED = "baton_lend_stored"
MAX_TICKET_CHARS = 1 << 20  # A ticket of 128k tokens in 16-token blocks is below 64 KiB.
MAX_INTRODUCTION_CHARS = 1 << 13
MAX_BLOCK_ID = 2**32 - 1
MAX_TRANSFER_ID_CHARS = 256
MAX_ENGINE_ID_CHARS = 256
MAX_HOST_CHARS = 253  # Length of a domain name.


class Compute(msgspec.Struct, frozen=True):
    """Prefill here and hold the blocks for the consumer that brings the ticket.

    `ticket`: another engine holds the KV of the beginning of the prompt, from an earlier turn.
    `continues`: the answer goes on after the token that is sampled here.
    """

    transfer_id: TransferId | None = None
    ticket: str | None = None
    continues: bool = False


class Fetch(msgspec.Struct, frozen=True):
    """Decode here. The ticket names the place of the prompt's KV.

    `remote_engine_id` is unsigned. It is kept to be compared with the ticket's.
    """

    ticket: str
    remote_engine_id: EngineId


class Stream(msgspec.Struct, frozen=True):
    """Decode here. The introduced producer computes the prompt now, under the same `transfer_id`.

    `transfer_id` is None if the router gave none; the request's id then takes its place. `remote_engine_id`
    is unsigned. It is kept to be compared with the introduction's.
    """

    transfer_id: TransferId | None
    introduction: str
    remote_engine_id: EngineId
    continues: bool = False  # The producer has the same in its leg.


class Named(msgspec.Struct, frozen=True):
    """A `Stream` with an unsigned name and control address of the producer.

    The engine's configuration decides whether this address may be used.
    """

    transfer_id: TransferId | None
    remote_engine_id: EngineId
    remote_host: str
    remote_port: int
    continues: bool = False


KVTransferParams: TypeAlias = Compute | Fetch | Stream | Named


class OffloadChoice(NamedTuple):
    """Permissions of an offloading engine for one request."""

    may_load: bool = True
    may_store: bool = True


OFFLOAD_CHOICES: Final = {
    "off": OffloadChoice(may_load=False, may_store=False),
    "load_only": OffloadChoice(may_store=False),
    "store_only": OffloadChoice(may_load=False),
}


def parse_offload_choice(raw: Mapping[str, Any] | None) -> OffloadChoice:
    """Raises BadTransferParams naming the field. Without `baton_offload` both are allowed."""
    if raw is None:
        return OffloadChoice()
    if not isinstance(raw, Mapping):
        raise BadTransferParams(f"must be an object, not {type(raw).__name__}", field=FIELD)
    value = _optional(raw, "baton_offload")
    if value is None:
        return OffloadChoice()
    if value not in OFFLOAD_CHOICES:
        raise BadTransferParams(
            f"must be one of {', '.join(OFFLOAD_CHOICES)}", field=f"{FIELD}.baton_offload"
        )
    return OFFLOAD_CHOICES[value]


def lends_stored(raw: Mapping[str, Any] | None) -> bool:
    """Whether the request asks for a loan of what is stored. Raises BadTransferParams."""
    return raw is not None and _flag(raw, LEND_STORED)


def asks_for_prefill(raw: Mapping[str, Any] | None) -> bool:
    """Whether blocks of this engine's cache are to be lent. Raises BadTransferParams."""
    return raw is not None and _flag(raw, "do_remote_decode")


PREFETCH = "baton_prefetch"
MAX_PREFETCH_TOKENS = 1 << 20
_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]


def parse_prefetch(raw: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Tokens of a prompt that will come; empty without. Raises BadTransferParams naming the field."""
    tokens = (raw or {}).get(PREFETCH)
    if tokens is None:
        return ()
    if isinstance(tokens, list) and len(tokens) > MAX_PREFETCH_TOKENS:
        raise BadTransferParams(
            f"must have at most {MAX_PREFETCH_TOKENS} token ids", field=f"{FIELD}.{PREFETCH}"
        )
    try:  # msgspec is compiled: Python code would stop the server's event loop for 250 ms at 2^20 ids.
        return tuple(msgspec.convert(tokens, _TokenIds))
    except msgspec.ValidationError as error:
        raise BadTransferParams("must be a list of token ids", field=f"{FIELD}.{PREFETCH}") from error


def prefetches_of_hints(hints: Any) -> list[tuple[int, ...]]:
    """Tokens of each action "prefetch" in vLLM's KvHintsEnvelope, or in None.

    Its payload is `{"token_ids": [...]}`. One that does not fit is another component's.
    """
    found = []
    for kind, payload in actions_of(hints):
        if kind == "prefetch" and payload:
            with contextlib.suppress(BadTransferParams):
                found.append(parse_prefetch({PREFETCH: payload.get("token_ids")}))
    return found


def actions_of(hints: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Type, in lower case, and payload of each action in vLLM's KvHintsEnvelope, or in None.

    A payload that is no mapping counts as empty.
    """
    for action in getattr(hints, "actions", None) or ():
        payload = getattr(action, "payload", None)
        kind = str(getattr(action, "action_type", "")).lower()
        yield kind, payload if isinstance(payload, Mapping) else {}


CACHED_TOKENS = "baton_cached_tokens"


def parse_cached_tokens(raw: Mapping[str, Any] | None) -> int:
    """Tokens of the prompt that the producer had in its cache. Raises BadTransferParams."""
    return _ranged(raw or {}, CACHED_TOKENS, 0, 2**53) or 0


def cached_tokens(own: int, transferred: int, at_prefill: int) -> int:
    """Tokens of the prompt that were in a cache before the request.

    `own`: hits of the consumer's cache; `transferred`: tokens that it loaded; `at_prefill`: hits of the
    producer's cache. The producer computed the other transferred tokens for this request.
    """
    return max(own, min(at_prefill, own + transferred))


def parse_transfer_params(raw: Mapping[str, Any] | None) -> KVTransferParams | None:
    """Raises BadTransferParams naming the field. None when the request asks for no transfer."""
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise BadTransferParams(f"must be an object, not {type(raw).__name__}", field=FIELD)
    decode_elsewhere = _flag(raw, "do_remote_decode")
    prefilled_elsewhere = _flag(raw, "do_remote_prefill")
    if decode_elsewhere and prefilled_elsewhere:
        raise BadTransferParams(
            "must not set both do_remote_prefill and do_remote_decode",
            field=FIELD,
        )
    if lends_stored(raw) and prefilled_elsewhere:
        raise BadTransferParams("must not be set with do_remote_prefill", field=f"{FIELD}.{LEND_STORED}")
    if decode_elsewhere:
        transfer_id = _sized(raw, "transfer_id", MAX_TRANSFER_ID_CHARS)
        ticket = _sized(raw, "baton_ticket", MAX_TICKET_CHARS)
        name = TransferId(transfer_id) if transfer_id is not None else None
        return Compute(name, ticket, _flag(raw, CONTINUE))
    if prefilled_elsewhere:
        return _parse_decode_leg(raw)
    return None


def _parse_decode_leg(raw: Mapping[str, Any]) -> Fetch | Stream | Named:
    ticket = _sized(raw, "baton_ticket", MAX_TICKET_CHARS)
    introduction = _sized(raw, "baton_introduction", MAX_INTRODUCTION_CHARS)
    transfer_id = _sized(raw, "transfer_id", MAX_TRANSFER_ID_CHARS)
    if ticket is None and introduction is None:
        if raw.get("remote_block_ids") is None and raw.get("remote_port") is not None:
            return _parse_named(raw, TransferId(transfer_id) if transfer_id is not None else None)
        raise BadTransferParams(
            "is missing; do_remote_prefill needs the producer's complete answer, or its baton_introduction",
            field=f"{FIELD}.baton_ticket",
        )
    engine_id = _optional(raw, "remote_engine_id")
    if engine_id is None:
        raise BadTransferParams(
            "is missing; do_remote_prefill needs the producer's complete answer",
            field=f"{FIELD}.remote_engine_id",
        )
    # vLLM's keys are untrusted hints and not used. A wrong type still shows that the sender is broken.
    _optional(raw, "remote_host")
    _optional(raw, "remote_request_id")
    _ranged(raw, "remote_port", 1, 65535)
    _ranged(raw, "tp_size", 1, 4096)
    _check_block_ids(raw.get("remote_block_ids"))
    if ticket is not None:
        return Fetch(ticket, EngineId(engine_id))
    assert introduction is not None
    name = TransferId(transfer_id) if transfer_id is not None else None
    return Stream(name, introduction, EngineId(engine_id), _flag(raw, CONTINUE))


def _parse_named(raw: Mapping[str, Any], transfer_id: TransferId | None) -> Named:
    """Parses what the proxies of vLLM's push examples send, which have no answer of the producer."""
    port = _ranged(raw, "remote_port", 1, 65535)
    host = _sized(raw, "remote_host", MAX_HOST_CHARS)
    engine_id = _sized(raw, "remote_engine_id", MAX_ENGINE_ID_CHARS)
    if host is None or engine_id is None:
        raise BadTransferParams(
            "is missing; required with remote_port, to name the producer",
            field=f"{FIELD}.{'remote_host' if host is None else 'remote_engine_id'}",
        )
    for key in ("tp_size", "pp_size"):
        _ranged(raw, key, 1, 4096)
    _optional(raw, "remote_request_id")
    assert port is not None
    return Named(transfer_id, EngineId(engine_id), host, port, _flag(raw, CONTINUE))


def _check_block_ids(value: Any) -> None:
    field = f"{FIELD}.remote_block_ids"
    if value is None:
        return
    if not isinstance(value, list):
        raise BadTransferParams(f"must be a list, not {type(value).__name__}", field=field)
    groups = value if value and isinstance(value[0], list) else [value]
    for group in groups:
        if not isinstance(group, list):
            raise BadTransferParams("must be one list of block ids per cache group", field=field)
        for block_id in group:
            if not isinstance(block_id, int) or isinstance(block_id, bool):
                raise BadTransferParams(f"block ids are integers, not {type(block_id).__name__}", field=field)
            if not 0 <= block_id <= MAX_BLOCK_ID:
                raise BadTransferParams(f"block id {block_id} is out of range", field=field)


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise BadTransferParams(f"must be true or false, not {type(value).__name__}", field=f"{FIELD}.{key}")
    return value


def _optional(raw: Mapping[str, Any], key: str) -> str | None:
    value = raw.get(key)
    if value is not None and not isinstance(value, str):
        raise BadTransferParams(f"must be a string, not {type(value).__name__}", field=f"{FIELD}.{key}")
    return value


def _sized(raw: Mapping[str, Any], key: str, max_chars: int) -> str | None:
    value = _optional(raw, key)
    if value is not None and not 0 < len(value) <= max_chars:
        raise BadTransferParams(f"must have 1 to {max_chars} characters", field=f"{FIELD}.{key}")
    if value is not None and not _is_unicode(value):
        raise BadTransferParams("must be valid Unicode, without unpaired surrogates", field=f"{FIELD}.{key}")
    return value


def _is_unicode(value: str) -> bool:
    """Whether UTF-8 can encode `value`: JSON can hold unpaired surrogates, which messages cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _ranged(raw: Mapping[str, Any], key: str, low: int, high: int) -> int | None:
    value = raw.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadTransferParams(f"must be an integer, not {type(value).__name__}", field=f"{FIELD}.{key}")
    if not low <= value <= high:
        raise BadTransferParams(f"must be in [{low}, {high}], is {value}", field=f"{FIELD}.{key}")
    return value
