"""Handshake between two engines: compares versions and models, then exchanges the layouts of their memory.

It has two phases, so that engines of different versions can at least report why they cannot transfer. First
versions and kv_identities are compared, field by field. Then the opaque payload is decoded, whose format may
differ between versions. The result of `decode_ranks` is verified.
"""

from collections.abc import Mapping, Sequence

import msgspec

from baton.core.errors import PeerError
from baton.core.identity import KVIdentity, differences, differs_in_weights_only
from baton.core.ids import Address, Epoch
from baton.core.layout import RankLayout
from baton.protocol.messages import MAX_PAYLOAD_BYTES, MAX_REASON_CHARS, U64_MAX, Hello, Refused, Welcome
from baton.protocol.plan import check_layout

PROTOCOL_VERSION = 8
MAX_RANKS = 4096
MAX_TRANSPORTS = 16
MAX_ENDPOINT_BYTES = 1 << 16  # Size of the endpoint of one transport of one rank.


class RankCard(msgspec.Struct, frozen=True):
    """Layout and transport endpoints of one rank's memory."""

    tp_rank: int
    layout: RankLayout
    endpoints: dict[str, bytes]  # Endpoints by transport name, in the order of the owner's preference.
    epoch: Epoch = Epoch(0)  # Epoch of the process that holds this memory; its endpoints are bound to it.


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[RankCard, ...])


def encode_ranks(cards: Sequence[RankCard]) -> bytes:
    payload = _encoder.encode(tuple(cards))
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise PeerError(f"rank cards of {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES}")
    decode_ranks(payload)  # Never send what a peer would refuse.
    return payload


def decode_ranks(payload: bytes) -> tuple[RankCard, ...]:
    """The cards of all ranks of one engine, ordered by pipeline stage, then TP rank.

    Raises PeerError if the payload is malformed, incomplete or unsound.
    """
    try:
        cards = _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"malformed rank cards: {error}") from error
    if not 0 < len(cards) <= MAX_RANKS:
        raise PeerError(f"{len(cards)} rank cards, expected 1 to {MAX_RANKS}")
    first = cards[0].layout
    for index, card in enumerate(cards):
        layout = card.layout
        sizes = (layout.tp_size, layout.pp_size)
        at = (card.tp_rank, layout.tp_rank, layout.pp_rank)
        if (
            sizes != (first.tp_size, first.pp_size)
            or layout.tp_size < 1
            or layout.tp_size * layout.pp_size != len(cards)
            or at != (index % layout.tp_size, index % layout.tp_size, index // layout.tp_size)
        ):
            raise PeerError(
                f"rank card {index} of {len(cards)} names rank {card.tp_rank} "
                f"with the layout of rank {layout.tp_rank} of {layout.tp_size}, "
                f"stage {layout.pp_rank} of {layout.pp_size}"
            )
        if not 0 <= card.epoch <= U64_MAX:
            raise PeerError(f"rank card {index} has epoch {card.epoch}, expected 0 to 2**64 - 1")
        check_layout(layout)
        _check_endpoints(card.endpoints)
    return cards


def make_hello(own_address: Address, kv_identity: KVIdentity) -> Hello:
    return Hello(PROTOCOL_VERSION, kv_identity, own_address)


def answer_hello(hello: Hello, kv_identity: KVIdentity, payload: bytes) -> Welcome | Refused:
    """`payload`: our ranks, encoded by `encode_ranks`.

    A reader with other weights is welcomed. It compares them, and its tickets decide what it may use.
    """
    theirs = hello.protocol_version, hello.kv_identity
    reasons = incompatibilities(kv_identity, *theirs)
    if reasons and not has_other_weights_only(kv_identity, *theirs):
        return Refused(tuple(reason[:MAX_REASON_CHARS] for reason in reasons))
    return Welcome(PROTOCOL_VERSION, kv_identity, payload)


def incompatibilities(ours: KVIdentity, their_version: int, their_identity: KVIdentity) -> list[str]:
    """One line for each thing that differs; empty if the engines are compatible."""
    reasons = differences(ours, their_identity)
    if their_version != PROTOCOL_VERSION:
        reasons.insert(0, f"protocol_version: ours {PROTOCOL_VERSION}, theirs {their_version}")
    return reasons


def has_other_weights_only(ours: KVIdentity, their_version: int, their_identity: KVIdentity) -> bool:
    """Whether the engines can transfer as soon as an update of weights has reached both."""
    return their_version == PROTOCOL_VERSION and differs_in_weights_only(ours, their_identity)


def _check_endpoints(endpoints: Mapping[str, bytes]) -> None:
    if len(endpoints) > MAX_TRANSPORTS:
        raise PeerError(f"{len(endpoints)} transports on one rank, at most {MAX_TRANSPORTS}")
    for name, endpoint in endpoints.items():
        if len(endpoint) > MAX_ENDPOINT_BYTES:
            raise PeerError(f"endpoint {name!r} has {len(endpoint)} bytes, at most {MAX_ENDPOINT_BYTES}")
