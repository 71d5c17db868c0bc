"""Frames: what is sent arrives unchanged, and a malformed frame is a PeerError."""

import math
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import PeerError
from baton.core.ids import Address, EngineId, Epoch, LoanId, PromptHash, TransferId
from baton.core.layout import ModelFingerprint
from baton.protocol.effects import Send, pack_sends
from baton.protocol.messages import (
    MAX_FRAME_BYTES,
    MAX_LISTED_BLOCKS,
    MAX_MESSAGES,
    U64_MAX,
    WIRE_VERSION,
    Announced,
    Envelope,
    Failed,
    Finished,
    Gone,
    Hello,
    Message,
    Refused,
    Released,
    Renew,
    Renewed,
    Stranger,
    Want,
    Welcome,
    Withdraw,
    Working,
    decode_envelope,
    encode_envelope,
)

P, D = Address(EngineId("p"), Epoch(1)), Address(EngineId("d"), Epoch(U64_MAX))
LOAN = LoanId(Epoch(1), 7)

u64 = st.integers(0, U64_MAX)
names = st.text(min_size=1, max_size=40)
addresses = st.builds(Address, names.map(EngineId), u64.map(Epoch))
loan_ids = st.builds(LoanId, u64.map(Epoch), u64)
fingerprints = st.builds(
    ModelFingerprint,
    model=names,
    revision=names,
    dtype=names,
    num_layers=st.integers(1, 200),
    num_kv_heads=st.integers(1, 128),
    head_dim=st.integers(1, 512),
    hash_seed=names,
)
transfers = st.text(min_size=1, max_size=40).map(TransferId)
u32 = st.integers(0, 2**32 - 1)
tables = st.lists(st.lists(u32, max_size=5).map(tuple), max_size=3).map(tuple)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Renew, loan_ids, u64, u64),
    st.builds(Renewed, loan_ids, u64, u64, st.floats(0, allow_nan=False, allow_infinity=False)),
    st.builds(Released, loan_ids, u64),
    st.builds(Gone, loan_ids, u64),
    st.builds(Want, transfers, u64, st.binary(min_size=32, max_size=32).map(PromptHash), u64),
    st.builds(Working, transfers, u64),
    st.builds(Announced, transfers, u64, u64, u64, tables, u64, st.integers(0, 4096)),
    st.builds(Finished, transfers, u64, u64, st.text(min_size=1, max_size=40)),
    st.builds(Failed, transfers, u64, st.text(max_size=40)),
    st.builds(Withdraw, transfers, u64),
    st.builds(Hello, u64, fingerprints, addresses),
    st.builds(Welcome, u64, fingerprints, st.binary(max_size=100)),
    st.builds(Refused, st.lists(st.text(max_size=40), max_size=5).map(tuple)),
    st.builds(Stranger, addresses),
)
envelopes = st.builds(
    Envelope, st.just(WIRE_VERSION), addresses, addresses, st.lists(messages, max_size=6).map(tuple)
)


@given(envelopes)
def test_an_envelope_arrives_as_it_was_sent(envelope: Envelope) -> None:
    assert decode_envelope(encode_envelope(envelope)) == envelope


@given(st.binary(max_size=200))
def test_any_malformed_frame_is_a_peer_error(garbage: bytes) -> None:
    with pytest.raises(PeerError):
        decode_envelope(garbage)


@given(envelopes, st.data())
def test_a_damaged_frame_is_a_peer_error_or_still_a_sound_envelope(
    envelope: Envelope, data: st.DataObject
) -> None:
    frame = bytearray(encode_envelope(envelope))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode_envelope(bytes(frame))
    except PeerError:
        return
    assert decode_envelope(encode_envelope(decoded)) == decoded


@given(envelopes, st.data())
def test_a_cut_frame_is_a_peer_error(envelope: Envelope, data: st.DataObject) -> None:
    frame = encode_envelope(envelope)
    with pytest.raises(PeerError):
        decode_envelope(frame[: data.draw(st.integers(0, len(frame) - 1))])


def raw(*fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


def of_p(messages: list[object]) -> bytes:
    return raw(WIRE_VERSION, ["p", 1], ["d", 2], messages)


HOSTILE = {
    "another version": raw(3, ["p", 1], ["d", 2], []),
    "another version with another shape": raw(3, "whatever", 1, 2, 3),
    "negative epoch": raw(WIRE_VERSION, ["p", -1], ["d", 2], []),
    "no engine id": raw(WIRE_VERSION, ["", 1], ["d", 2], []),
    "long engine id": raw(WIRE_VERSION, ["p" * 257, 1], ["d", 2], []),
    "text for a number": of_p([["gone", [1, "7"], 1]]),
    "true for a number": of_p([["gone", [1, True], 1]]),
    "unknown message": of_p([["shutdown"]]),
    "message without its fields": of_p([["renew", [1, 7]]]),
    "message with one more": of_p([["gone", [1, 7], 1, 2]]),
    "negative claim": of_p([["gone", [1, 7], -1]]),
    "no number": of_p([["renewed", [1, 7], 1, 1, math.nan]]),
    "endless": of_p([["renewed", [1, 7], 1, 1, math.inf]]),
    "negative duration": of_p([["renewed", [1, 7], 1, 1, -1.0]]),
    "too many reasons": of_p([["refused", ["no"] * 33]]),
    "a novel for a reason": of_p([["refused", ["no" * 300]]]),
    "no transfer": of_p([["working", "", 1]]),
    "a novel for a transfer": of_p([["working", "x" * 257, 1]]),
    "a short hash": of_p([["want", "x", 1, b"short", 4]]),
    "text for a hash": of_p([["want", "x", 1, "h" * 32, 4]]),
    "a negative block": of_p([["announced", "x", 1, 1, 4, [[-1]], 0, 0]]),
    "a huge block": of_p([["announced", "x", 1, 1, 4, [[2**32]], 0, 0]]),
    "no cache group": of_p([["announced", "x", 1, 1, 4, [7], 0, 0]]),
    "layers without end": of_p([["announced", "x", 1, 1, 4, [[7]], 8, 4097]]),
    "blocks without end": of_p([["announced", "x", 1, 1, 4, [[7] * (MAX_LISTED_BLOCKS + 1)], 0, 0]]),
    "groups without end": of_p([["announced", "x", 1, 1, 4, [[]] * 257, 0, 0]]),
    "no ticket": of_p([["finished", "x", 1, 1, ""]]),
    "a ticket without end": of_p([["finished", "x", 1, 1, "t" * ((1 << 20) + 1)]]),
    "a novel for a failure": of_p([["failed", "x", 1, "no" * 300]]),
    "too many messages": raw(WIRE_VERSION, ["p", 1], ["d", 2], [["gone", [1, 7], 1]] * (MAX_MESSAGES + 1)),
    "oversize": b"\x00" * (MAX_FRAME_BYTES + 1),
    "a list that claims to be huge": b"\x94\x02\x92\xa1p\x01\x92\xa1d\x02\xdd\xff\xff\xff\xff",
    "deeply nested": b"\x91" * 100_000,
    "invalid text": b"\x94\x02\x92\xa1\xff\x01\x92\xa1d\x02\x90",
    "nothing": b"",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_frame_is_a_peer_error(what: str) -> None:
    with pytest.raises(PeerError) as refused:
        decode_envelope(HOSTILE[what])
    assert ("wire version" in str(refused.value)) == what.startswith("another version")


def test_a_frame_of_another_version_is_not_reported_as_malformed() -> None:
    with pytest.raises(PeerError, match="wire version 3, ours is 2"):
        decode_envelope(HOSTILE["another version with another shape"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Renew(LOAN, -1, 0),
        lambda: Renew(LOAN, 0, U64_MAX + 1),
        lambda: Renewed(LOAN, 0, 0, math.nan),
        lambda: Stranger(Address(EngineId(""), Epoch(1))),
    ],
)
def test_messages_that_a_peer_would_refuse_cannot_be_made(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"2\*\*64|finite|engine_id"):
        make()


def test_messages_of_one_turn_to_one_peer_share_an_envelope_in_order() -> None:
    sends = [Send(D, Gone(LOAN, 1)), Send(P, Gone(LOAN, 2)), Send(D, Gone(LOAN, 3))]
    to_d, to_p = pack_sends(P, sends)
    assert (to_d.sender, to_d.target, to_d.messages) == (P, D, (Gone(LOAN, 1), Gone(LOAN, 3)))
    assert to_p.messages == (Gone(LOAN, 2),)
    assert pack_sends(P, []) == []


def test_many_messages_are_split_over_envelopes() -> None:
    packed = pack_sends(P, [Send(D, Gone(LOAN, claim)) for claim in range(MAX_MESSAGES + 1)])
    assert [len(envelope.messages) for envelope in packed] == [MAX_MESSAGES, 1]


def test_equal_messages_of_one_turn_are_sent_once() -> None:
    [envelope] = pack_sends(P, [Send(D, Gone(LOAN, 1)), Send(D, Gone(LOAN, 2)), Send(D, Gone(LOAN, 1))])
    assert envelope.messages == (Gone(LOAN, 1), Gone(LOAN, 2))


def test_all_messages_of_a_turn_fit_into_its_frames() -> None:
    """A hostile frame of Hellos that all differ is answered with as many long refusals."""
    refusals = [Refused((f"{number}" + "x" * 500,) * 32) for number in range(600)]
    packed = pack_sends(P, [Send(D, refusal) for refusal in refusals])
    assert len(packed) > 1
    assert [m for envelope in packed for m in decode_envelope(encode_envelope(envelope)).messages] == refusals


def test_the_longest_prompt_and_the_longest_ticket_fit_into_one_frame() -> None:
    blocks = (tuple(range(2**32 - MAX_LISTED_BLOCKS, 2**32)),)
    longest = [
        Send(D, Announced(TransferId("x"), 1, 1, U64_MAX, blocks)),  # type: ignore[arg-type]
        Send(D, Finished(TransferId("x"), 1, 1, "t" * (1 << 20))),
    ]
    for envelope in pack_sends(P, longest):
        assert decode_envelope(encode_envelope(envelope)) == envelope
