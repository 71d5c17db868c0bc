"""Transfer intents: what the `kv_transfer_params` of one request ask this engine to do, parsed and verified.

    kv_transfer_params --parse_transfer_params--> types --parse_intent--> TransferIntent --check_fetch--> ok

The scheduler half does this once for each request and keeps the result (`TransferIntents`). No other process
opens a ticket or an introduction: the HTTP server checks types only, and turns the half's refusal into a 400.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from baton.connectors.pull.identity import EngineIdentity
from baton.contract import host
from baton.core.errors import BadTransferParams
from baton.core.hashing import prompt_hash
from baton.core.ids import NO_EPOCH, Address, EngineId, PromptHash, TransferId
from baton.core.kv_groups import KVCacheGroup
from baton.core.reasons import Fault
from baton.core.transfer_params import (
    FIELD,
    MAX_TRANSFER_ID_CHARS,
    Compute,
    Fetch,
    Named,
    Stream,
    parse_transfer_params,
)
from baton.protocol.introduction import Introduction, check_introduction, open_introduction
from baton.protocol.ticket import BadTicket, Ticket, check_ticket, open_ticket

_NOT_THE_CLIENTS = (Fault.VERSION, Fault.SIGNATURE, Fault.UNNAMED)
"""Faults that the client cannot mend: the ticket is of an engine of another configuration, for example."""


class FetchLoan(msgspec.Struct, frozen=True):
    """Fetch the blocks that this ticket names."""

    ticket: Ticket


class FetchPreviousTurn(msgspec.Struct, frozen=True):
    """Fetch the start of the prompt from the engine that decoded the previous turn; compute the rest."""

    ticket: Ticket


class FetchStream(msgspec.Struct, frozen=True):
    """Fetch what the introduced producer computes under this transfer id, while it computes."""

    introduction: Introduction
    transfer_id: TransferId | None  # None: derived from the request's id.
    continues: bool = False  # P's token is used. False: a model with states fetches all tokens but the last.


class FetchByName(msgspec.Struct, frozen=True):
    """Like `FetchStream`; only the name and the control URL of the producer are known, from the client."""

    engine_id: EngineId
    control_url: str  # Allowed by the configuration.
    transfer_id: TransferId | None
    continues: bool = False


class LendBlocks(msgspec.Struct, frozen=True):
    """Compute the prompt, and keep its blocks for the consumer that brings the ticket."""

    transfer_id: TransferId | None
    previous_turn: FetchPreviousTurn | None = None
    continues: bool = False  # The token that is sampled here is the answer's first.


FetchIntent: TypeAlias = FetchLoan | FetchPreviousTurn | FetchStream | FetchByName
TransferIntent: TypeAlias = LendBlocks | FetchLoan | FetchStream | FetchByName


def parse_intent(raw: Mapping[str, Any] | None, identity: EngineIdentity) -> TransferIntent | None:
    """Raises BadTransferParams naming the field; a BadSignedToken names the fault too."""
    match parse_transfer_params(raw):
        case None:
            return None
        case Compute(transfer_id, before, continues):
            if not identity.is_producer:
                raise BadTransferParams(
                    "this engine has kv_role kv_consumer; send the prefill leg to a producer",
                    field=f"{FIELD}.do_remote_decode",
                )
            if before is None:
                return LendBlocks(transfer_id, continues=continues)
            if not identity.is_consumer:
                raise BadTransferParams(
                    "is of an earlier turn, which only an engine with kv_role kv_both can fetch",
                    field=f"{FIELD}.baton_ticket",
                )
            return LendBlocks(transfer_id, FetchPreviousTurn(_open(before, identity)), continues)
        case _ if not identity.is_consumer:
            raise BadTransferParams(
                "this engine has kv_role kv_producer; send the decode leg to a consumer",
                field=f"{FIELD}.do_remote_prefill",
            )
        case Fetch(text, remote_engine_id):
            ticket = _open(text, identity)
            _compare_engines(remote_engine_id, ticket.producer, "ticket")
            return FetchLoan(ticket)
        case Stream(transfer_id, text, remote_engine_id, continues):
            if not identity.does_push:
                raise BadTransferParams(
                    "asks for a push, which this connector does not do; send the producer's ticket",
                    field=f"{FIELD}.baton_introduction",
                )
            introduction = open_introduction(text, identity.ticket_key, identity.previous_ticket_key)
            _compare_engines(remote_engine_id, introduction.address, "introduction")
            return FetchStream(introduction, transfer_id, continues)
        case Named(transfer_id, engine_id, host, port, continues):
            return FetchByName(engine_id, _allowed_url(host, port, identity), transfer_id, continues)


def _open(text: str, identity: EngineIdentity) -> Ticket:
    return open_ticket(text, identity.ticket_key, identity.previous_ticket_key)


def _allowed_url(host: str, port: int, identity: EngineIdentity) -> str:
    if not identity.does_push:
        raise BadTransferParams(
            "is missing; remote_host and remote_port ask for a push, which this connector does not do",
            field=f"{FIELD}.baton_ticket",
        )
    url = identity.settings.url_of_peer(host, port)
    if url is None:
        raise BadTransferParams(
            f"with remote_port is {host}:{port}, where no client may send this engine; list it in "
            "allowed_peers of its kv_connector_extra_config, or send the producer's baton_introduction",
            field=f"{FIELD}.remote_host",
        )
    return url


def _compare_engines(named: EngineId, signer: Address, token: str) -> None:
    if signer.engine_id != named:
        raise BadTransferParams(
            f"is {named!r}, but the {token} is signed by {signer.engine_id!r}; "
            "send what the producer gave as it is",
            field=f"{FIELD}.remote_engine_id",
        )


class TransferIntents:
    """The intent of each open request, parsed and verified when it is asked for first."""

    def __init__(self, identity: EngineIdentity) -> None:
        self._identity = identity
        self._parsed: dict[str, TransferIntent | BadTransferParams | None] = {}  # Intents by request id.

    def params_of(self, request: host.Request) -> TransferIntent | None:
        """Raises BadTransferParams, each time, for params that are refused."""
        if request.request_id not in self._parsed:
            try:
                self._parsed[request.request_id] = parse_intent(request.kv_transfer_params, self._identity)
            except BadTransferParams as error:
                self._parsed[request.request_id] = error
        parsed = self._parsed[request.request_id]
        if isinstance(parsed, BadTransferParams):
            raise parsed
        return parsed

    def is_malformed(self, request_id: str) -> bool:
        """Whether its params were refused for a fault that the client can mend, and no other engine can."""
        parsed = self._parsed.get(request_id)
        return isinstance(parsed, BadTransferParams) and parsed.reason not in _NOT_THE_CLIENTS

    def outdate(self) -> None:
        """The weights have changed. Requests known now may hold KV of the old ones, and lend nothing."""
        self._parsed = dict.fromkeys(self._parsed)

    def forget(self, request_id: str) -> None:
        self._parsed.pop(request_id, None)


def route_of(fetch: FetchIntent) -> tuple[Address, str, bytes | None]:
    """(the producer, its control URL, its public key). Without a key the producer is known by name only."""
    match fetch:
        case FetchLoan(ticket) | FetchPreviousTurn(ticket):
            return ticket.producer, ticket.control_url, ticket.public_key
        case FetchStream(introduction):
            return introduction.address, introduction.control_url, introduction.public_key
        case FetchByName(engine_id, control_url):
            return Address(engine_id, NO_EPOCH), control_url, None


def check_fetch(fetch: FetchIntent, request: host.Request, identity: EngineIdentity) -> None:
    """Raises BadTransferParams for what this engine, or this prompt, cannot use."""
    identity.names.extra_of(request)
    match fetch:
        case FetchLoan(ticket) | FetchPreviousTurn(ticket):
            check_offer(ticket, request, identity)
        case FetchStream(introduction):
            check_introduction(
                introduction,
                kv_identity=identity.kv_identity,
                converts_dtype=identity.settings.convert_dtype,
            )
        case FetchByName():
            pass  # The producer is checked when it answers.


def check_offer(ticket: Ticket, request: host.Request, identity: EngineIdentity) -> None:
    """Raises BadTicket unless the ticket is for our model and exactly this request's prompt."""
    assert request.prompt_token_ids is not None, "it was checked before"
    check_ticket(
        ticket,
        kv_identity=identity.kv_identity,
        prompt_hash_of=lambda num_tokens: hash_of_prompt(request, num_tokens, identity),
        num_prompt_tokens=len(request.prompt_token_ids),
        converts_dtype=identity.settings.convert_dtype,
    )
    # The groups may have other layers. Their windows must be the same, unless the producer keeps every block.
    windows, our_windows = _windows(ticket), _windows(identity)
    if bool(ticket.state_groups) != bool(identity.state_groups):
        raise BadTicket(Fault.LAYOUT, "has recurrent states and this engine's model has none, or the reverse")
    if windows not in (frozenset((None,)), our_windows):
        raise BadTicket(
            Fault.LAYOUT,
            f"has cache groups with windows {_shown(ticket.windows)}, this engine has "
            f"{_shown(identity.windows)}; set hybrid_kv_cache alike on both",
        )
    has_tables = identity.has_block_tables or len(ticket.block_ids) > 1  # Tables on either side count.
    if has_tables and ticket.block_tokens != identity.block_tokens and (windows | our_windows) - {None}:
        raise BadTicket(
            Fault.LAYOUT,
            f"has blocks of {ticket.block_tokens} tokens, this engine of {identity.block_tokens}; "
            "engines whose cache has groups with windows need the same",
        )
    if (
        ticket.state_groups
        and ticket.num_tokens == len(request.prompt_token_ids)
        and ticket.prefilled is None
    ):
        raise BadTicket(
            Fault.LAYOUT,
            f"has the state after all {ticket.num_tokens} tokens, which cannot compute the last one again, "
            "and no first token of the answer",
        )
    last = num_blocks(ticket.num_tokens, ticket.block_tokens)
    seen = [KVCacheGroup((), window) for window in ticket.windows]
    needed = [last - group.first_kept(ticket.num_tokens, ticket.block_tokens) for group in seen]
    if any(len(held) < num for held, num in zip(ticket.block_ids, needed, strict=True)):
        raise BadTicket(
            Fault.LAYOUT,
            f"names {[len(held) for held in ticket.block_ids]} blocks for {ticket.num_tokens} tokens; "
            f"needed are {needed} in its cache groups",
        )


def _windows(of: Ticket | EngineIdentity) -> frozenset[int | None]:
    """Windows of the groups of layers with tokens."""
    return frozenset(window for group, window in enumerate(of.windows) if group not in of.state_groups)


def _shown(windows: tuple[int | None, ...]) -> list[int | str]:
    return [window if window is not None else "none" for window in windows]


def hash_of_prompt(request: host.Request, num_tokens: int, identity: EngineIdentity) -> PromptHash:
    assert request.prompt_token_ids is not None
    return hash_of_tokens(request, request.prompt_token_ids, num_tokens, identity)


def hash_of_tokens(
    request: host.Request, token_ids: Sequence[int], num_tokens: int, identity: EngineIdentity
) -> PromptHash:
    """Hash of everything that the KV of the first `num_tokens` depends on. Raises UnnamedPrompt."""
    extra = identity.names.extra_of(request)
    return prompt_hash(token_ids, num_tokens, extra, identity.kv_identity.hash_seed)


def num_blocks(num_tokens: int, block_tokens: int) -> int:
    return -(-num_tokens // block_tokens)


# --- Transfer ids -------------------------------------------------------------------------------------

_ENDING = re.compile(r"-[0-9a-f]{8}\Z")
_PREFIX = "request:"  # No router's name looks like it.


def transfer_of_request(request_id: str) -> TransferId:
    """The transfer id of a request for which the router has given none: the same on both engines.

        cmpl-1f00d-0-9c41e7ab        a client's id, the index of the completion, and a random ending
        cmpl-1f00d-0                 what both engines know of it

    Each engine adds its own ending, and so does a retry. The index stays: each completion of a request has a
    prompt of its own to fetch.
    """
    name = _PREFIX + _ENDING.sub("", request_id)
    if len(name) > MAX_TRANSFER_ID_CHARS or not name.isascii():  # A client's id can be any text.
        name = _PREFIX + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return TransferId(name)
