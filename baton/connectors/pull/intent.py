"""`kv_transfer_params` of one request, judged by what this engine is: lend, borrow, nothing, or a refusal.

The same judgement is passed twice: at the HTTP door, where a refusal is a 400, and in the scheduler half,
which trusts no door. Only the latter can compare a ticket with the model and the prompt (`check_offer`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from baton.connectors.pull.identity import EngineIdentity
from baton.contract import host
from baton.core.errors import BadTransferParams
from baton.core.hashing import extra_key, prompt_hash
from baton.core.ids import NO_EPOCH, Address, EngineId, PromptHash, TransferId
from baton.core.kv_groups import KVCacheGroup
from baton.core.reasons import Fault
from baton.core.transfer_params import FIELD, Compute, Fetch, Named, Stream, parse_transfer_params
from baton.protocol.introduction import BadIntroduction, Introduction, check_introduction, open_introduction
from baton.protocol.signed_token import BadSignedToken
from baton.protocol.ticket import BadTicket, Ticket, check_ticket, open_ticket

_MAYBE_OTHER_ENGINE = (Fault.VERSION, Fault.SIGNATURE)
"""Faults of a well-formed ticket that no client can mend: an engine of another configuration made it."""


class Borrow(msgspec.Struct, frozen=True):
    """Fetch what this ticket, which is of our cluster, names."""

    ticket: Ticket

    @property
    def producer(self) -> Address:
        return self.ticket.producer

    @property
    def control_url(self) -> str:
        return self.ticket.control_url

    @property
    def public_key(self) -> bytes:
        return self.ticket.public_key


class Resume(Borrow, frozen=True):
    """Fetch the beginning of the prompt, an earlier turn, from who decoded it; compute the rest."""


class Lend(msgspec.Struct, frozen=True):
    """Hold the blocks for whoever brings the ticket."""

    transfer_id: TransferId | None
    resume: Resume | None = None


class Follow(msgspec.Struct, frozen=True):
    """Fetch what this producer, an engine of our cluster, computes under this name, while it does."""

    introduction: Introduction
    transfer_id: TransferId | None

    @property
    def producer(self) -> Address:
        return self.introduction.address

    @property
    def control_url(self) -> str:
        return self.introduction.control_url

    @property
    def public_key(self) -> bytes:
        return self.introduction.public_key


class Seek(msgspec.Struct, frozen=True):
    """As `Follow`, but who the producer is has to be asked where the configuration allows to."""

    engine_id: EngineId
    control_url: str
    transfer_id: TransferId | None

    @property
    def producer(self) -> Address:
        return Address(self.engine_id, NO_EPOCH)

    @property
    def public_key(self) -> None:
        """The producer tells it with its first answer."""
        return None


Wish: TypeAlias = Lend | Borrow | Follow | Seek


def read_params(raw: Mapping[str, Any] | None, identity: EngineIdentity) -> Wish | None:
    """Raises BadTransferParams naming the field; a BadTicket says which fault."""
    match parse_transfer_params(raw):
        case None:
            return None
        case Compute(transfer_id, before):
            if not identity.is_producer:
                raise BadTransferParams(
                    "this engine has kv_role kv_consumer; send the prefill leg to a producer",
                    field=f"{FIELD}.do_remote_decode",
                )
            if before is None:
                return Lend(transfer_id)
            if not identity.is_consumer:
                raise BadTransferParams(
                    "is of an earlier turn, which only an engine with kv_role kv_both can fetch",
                    field=f"{FIELD}.baton_ticket",
                )
            return Lend(
                transfer_id, Resume(open_ticket(before, identity.ticket_key, identity.previous_ticket_key))
            )
        case Fetch(text, remote_engine_id):
            _need_consumer(identity)
            ticket = open_ticket(text, identity.ticket_key, identity.previous_ticket_key)
            _compare_engines(remote_engine_id, ticket.producer, "ticket")
            return Borrow(ticket)
        case Stream(transfer_id, text, remote_engine_id):
            _need_consumer(identity)
            if not identity.does_push:
                raise BadTransferParams(
                    "asks for a push, which this connector does not do; send the producer's ticket",
                    field=f"{FIELD}.baton_introduction",
                )
            introduction = open_introduction(text, identity.ticket_key, identity.previous_ticket_key)
            _compare_engines(remote_engine_id, introduction.address, "introduction")
            return Follow(introduction, transfer_id)
        case Named(transfer_id, engine_id, host, port):
            _need_consumer(identity)
            return Seek(engine_id, _allowed_url(host, port, identity), transfer_id)


def _need_consumer(identity: EngineIdentity) -> None:
    if not identity.is_consumer:
        raise BadTransferParams(
            "this engine has kv_role kv_producer; send the decode leg to a consumer",
            field=f"{FIELD}.do_remote_prefill",
        )


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


def _compare_engines(named: EngineId, signer: Address, paper: str) -> None:
    if signer.engine_id != named:
        raise BadTransferParams(
            f"is {named!r}, but the {paper} is signed by {signer.engine_id!r}; "
            "send what the producer gave as it is",
            field=f"{FIELD}.remote_engine_id",
        )


def check_at_door(raw: Mapping[str, Any] | None, identity: EngineIdentity) -> None:
    """Raises BadTransferParams for what deserves a 400 before the engine sees the request."""
    try:
        read_params(raw, identity)
    except BadSignedToken as error:
        if error.reason in _MAYBE_OTHER_ENGINE and identity.recomputes_failed_loads:
            return  # The scheduler half refuses it, counts it, and computes the prompt here.
        raise


class OpenRequests:
    """`kv_transfer_params` of each open request: parsed, and its signature checked, once."""

    def __init__(self, identity: EngineIdentity) -> None:
        self._identity = identity
        self._parsed: dict[str, Wish | BadTransferParams | None] = {}  # By request id.

    def params_of(self, request: host.Request) -> Wish | None:
        """Raises BadTransferParams, each time, for params that are refused."""
        if request.request_id not in self._parsed:
            try:
                self._parsed[request.request_id] = read_params(request.kv_transfer_params, self._identity)
            except BadTransferParams as error:
                self._parsed[request.request_id] = error
        parsed = self._parsed[request.request_id]
        if isinstance(parsed, BadTransferParams):
            raise parsed
        return parsed

    def forget(self, request_id: str) -> None:
        self._parsed.pop(request_id, None)


def judge(
    request: host.Request, wish: Wish | None, identity: EngineIdentity
) -> Borrow | Follow | Seek | None:
    """What this request is to fetch, and from whom. An earlier turn (`Resume`) is not judged yet.

    Raises BadTransferParams for what this engine, or this prompt, cannot use.
    """
    match wish:
        case Lend(_, Resume() as resume):
            return resume  # Whatever is wrong with it, the prompt can be computed.
        case Borrow(ticket):
            check_offer(ticket, request, identity)
        case Follow(introduction):
            check_producer(introduction, request, identity)
        case Seek():
            if request.prompt_token_ids is None:
                raise BadTransferParams("is for a prompt of tokens, this one has none", field=FIELD)
        case _:
            return None
    return wish


def check_offer(ticket: Ticket, request: host.Request, identity: EngineIdentity) -> None:
    """Is the ticket for our model and exactly this request's prompt? Raises BadTicket."""
    if request.prompt_token_ids is None:
        raise BadTicket(Fault.PROMPT, "is for a prompt of tokens, this one has none")
    check_ticket(
        ticket,
        fingerprint=identity.fingerprint,
        prompt_hash_of=lambda num_tokens: hash_of_prompt(request, num_tokens, identity),
        num_prompt_tokens=len(request.prompt_token_ids),
        converts_dtype=identity.settings.convert_dtype,
    )
    # Which layers a group has may differ; what they see may not, unless the producer keeps everything.
    if set(ticket.windows) not in ({None}, set(identity.windows)):
        raise BadTicket(
            Fault.LAYOUT,
            f"has cache groups with windows {_shown(ticket.windows)}, this engine has "
            f"{_shown(identity.windows)}; set hybrid_kv_cache alike on both",
        )
    if moves_by_groups(ticket, identity) and ticket.block_tokens != identity.block_tokens:
        raise BadTicket(
            Fault.LAYOUT,
            f"has blocks of {ticket.block_tokens} tokens, this engine of {identity.block_tokens}; "
            "engines whose cache has several groups need the same",
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


def moves_by_groups(ticket: Ticket, identity: EngineIdentity) -> bool:
    """Whether either side has several block tables, or one with holes."""
    return identity.has_block_tables or len(ticket.block_ids) > 1


def _shown(windows: tuple[int | None, ...]) -> list[int | str]:
    return [window if window is not None else "none" for window in windows]


def check_producer(introduction: Introduction, request: host.Request, identity: EngineIdentity) -> None:
    """Is the introduced engine of our model, and the request one to compute? Raises BadIntroduction."""
    if request.prompt_token_ids is None:
        raise BadIntroduction(Fault.PROMPT, "is of no use for a prompt without tokens")
    check_introduction(
        introduction,
        fingerprint=identity.fingerprint,
        converts_dtype=identity.settings.convert_dtype,
    )


def hash_of_prompt(request: host.Request, num_tokens: int, identity: EngineIdentity) -> PromptHash:
    assert request.prompt_token_ids is not None
    return hash_of_tokens(request, request.prompt_token_ids, num_tokens, identity)


def hash_of_tokens(
    request: host.Request, token_ids: Sequence[int], num_tokens: int, identity: EngineIdentity
) -> PromptHash:
    """Over everything of the request that their KV depends on."""
    adapter = getattr(request, "lora_request", None)
    media = getattr(request, "mm_features", None) or ()  # vLLM's name; the embedded engine has neither.
    extra = extra_key(
        cache_salt=request.cache_salt,
        adapter=adapter.lora_name if adapter is not None else None,
        media=[f"{item.mm_position.offset}:{item.identifier}" for item in media],
    )
    return prompt_hash(token_ids, num_tokens, extra, identity.fingerprint.hash_seed)


def num_blocks(num_tokens: int, block_tokens: int) -> int:
    return -(-num_tokens // block_tokens)
