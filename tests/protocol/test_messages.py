"""Frames: what is sent arrives unchanged, and a malformed frame is a PeerError."""

import math
import re
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import PeerError
from baton.core.identity import KVIdentity
from baton.core.ids import Address, BlockId, EngineId, Epoch, LoanId, PromptHash, TransferId
from baton.protocol import messages as wire
from baton.protocol.effects import Send, pack_sends

P, D = Address(EngineId("p"), Epoch(1)), Address(EngineId("d"), Epoch(wire.U64_MAX))
LOAN = LoanId(Epoch(1), 7)

u64 = st.integers(0, wire.U64_MAX)
names = st.text(min_size=1, max_size=40)
addresses = st.builds(Address, names.map(EngineId), u64.map(Epoch))
loan_ids = st.builds(LoanId, u64.map(Epoch), u64)
kv_identities = st.builds(
    KVIdentity,
    model=names,
    weights=names,
    dtype=names,
    num_layers=st.integers(1, 200),
    num_kv_heads=st.integers(1, 128),
    head_dim=st.integers(1, 512),
    hash_seed=names,
)
transfers = st.text(min_size=1, max_size=40).map(TransferId)
u32 = st.integers(0, 2**32 - 1)
tables = st.lists(st.lists(u32, max_size=5).map(tuple), max_size=3).map(tuple)
messages: st.SearchStrategy[wire.Message] = st.one_of(
    st.builds(wire.Renew, loan_ids, u64, u64),
    st.builds(wire.Renewed, loan_ids, u64, u64, st.floats(0, allow_nan=False, allow_infinity=False)),
    st.builds(wire.Released, loan_ids, u64),
    st.builds(wire.Gone, loan_ids, u64),
    st.builds(wire.Want, transfers, u64, st.binary(min_size=32, max_size=32).map(PromptHash), u64),
    st.builds(wire.Working, transfers, u64),
    st.builds(wire.Announced, transfers, u64, u64, u64, tables, u64, st.integers(0, 4096)),
    st.builds(wire.Finished, transfers, u64, u64, st.text(min_size=1, max_size=40)),
    st.builds(wire.Failed, transfers, u64, st.text(max_size=40)),
    st.builds(wire.Withdraw, transfers, u64),
    st.builds(wire.Hello, u64, kv_identities, addresses),
    st.builds(wire.Welcome, u64, kv_identities, st.binary(max_size=100)),
    st.builds(wire.Refused, st.lists(st.text(max_size=40), max_size=5).map(tuple)),
    st.builds(wire.Stranger, addresses),
)
envelopes = st.builds(
    wire.Envelope, st.just(wire.WIRE_VERSION), addresses, addresses, st.lists(messages, max_size=6).map(tuple)
)


@given(envelopes)
def test_an_envelope_arrives_as_it_was_sent(envelope: wire.Envelope) -> None:
    assert wire.decode_envelope(wire.encode_envelope(envelope)) == envelope


@given(envelopes, st.data())
def test_a_damaged_frame_is_a_peer_error_or_still_a_sound_envelope(
    envelope: wire.Envelope, data: st.DataObject
) -> None:
    frame = bytearray(wire.encode_envelope(envelope))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = wire.decode_envelope(bytes(frame))
    except PeerError:
        return
    assert wire.decode_envelope(wire.encode_envelope(decoded)) == decoded


def raw(*fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


def of_p(messages: list[object]) -> bytes:
    return raw(wire.WIRE_VERSION, ["p", 1], ["d", 2], messages)


HOSTILE = {
    "another version": raw(3, ["p", 1], ["d", 2], []),
    "another version with another shape": raw(3, "whatever", 1, 2, 3),
    "negative epoch": raw(wire.WIRE_VERSION, ["p", -1], ["d", 2], []),
    "no engine id": raw(wire.WIRE_VERSION, ["", 1], ["d", 2], []),
    "long engine id": raw(wire.WIRE_VERSION, ["p" * 257, 1], ["d", 2], []),
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
    "blocks without end": of_p([["announced", "x", 1, 1, 4, [[7] * (wire.MAX_LISTED_BLOCKS + 1)], 0, 0]]),
    "groups without end": of_p([["announced", "x", 1, 1, 4, [[]] * 257, 0, 0]]),
    "no ticket": of_p([["finished", "x", 1, 1, ""]]),
    "a ticket without end": of_p([["finished", "x", 1, 1, "t" * ((1 << 20) + 1)]]),
    "a novel for a failure": of_p([["failed", "x", 1, "no" * 300]]),
    "too many messages": raw(
        wire.WIRE_VERSION, ["p", 1], ["d", 2], [["gone", [1, 7], 1]] * (wire.MAX_MESSAGES + 1)
    ),
    "oversize": b"\x00" * (wire.MAX_FRAME_BYTES + 1),
    "a list that claims to be huge": b"\x94\x02\x92\xa1p\x01\x92\xa1d\x02\xdd\xff\xff\xff\xff",
    "deeply nested": b"\x91" * 100_000,
    "invalid text": b"\x94\x02\x92\xa1\xff\x01\x92\xa1d\x02\x90",
    "nothing": b"",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_frame_is_a_peer_error(what: str) -> None:
    with pytest.raises(PeerError) as refused:
        wire.decode_envelope(HOSTILE[what])
    assert ("wire version" in str(refused.value)) == what.startswith("another version")


X = TransferId("x")
HASH = PromptHash(bytes(32))
MODEL = KVIdentity(
    model="m", weights="r", dtype="bf16", num_layers=2, num_kv_heads=1, head_dim=1, hash_seed="s"
)


def announced(block_ids: object = (), **changes: object) -> wire.Announced:
    fields = dict(transfer_id=X, number=1, run=1, num_tokens=4, block_ids=block_ids) | changes
    return wire.Announced(**fields)  # type: ignore[arg-type]


NUMBERS: dict[str, Callable[[int], object]] = {
    "epoch of a loan": lambda n: wire.Released(LoanId(Epoch(n), 1), 1),
    "counter of a loan": lambda n: wire.Released(LoanId(Epoch(1), n), 1),
    "claim": lambda n: wire.Gone(LOAN, n),
    "loan of a renewal": lambda n: wire.Renew(LoanId(Epoch(n), 1), 1, 1),
    "claim of a renewal": lambda n: wire.Renew(LOAN, n, 1),
    "sequence of a renewal": lambda n: wire.Renew(LOAN, 1, n),
    "loan of an answer": lambda n: wire.Renewed(LoanId(Epoch(n), 1), 1, 1, 1.0),
    "claim of an answer": lambda n: wire.Renewed(LOAN, n, 1, 1.0),
    "sequence of an answer": lambda n: wire.Renewed(LOAN, 1, n, 1.0),
    "number of a transfer": lambda n: wire.Working(X, n),
    "number of a want": lambda n: wire.Want(X, n, HASH, 4),
    "tokens of a want": lambda n: wire.Want(X, 1, HASH, n),
    "number of an announcement": lambda n: announced(number=n),
    "run of an announcement": lambda n: announced(run=n),
    "tokens of an announcement": lambda n: announced(num_tokens=n),
    "partial tokens of an announcement": lambda n: announced(partial_tokens=n),
    "number of a ticket": lambda n: wire.Finished(X, n, 1, "t"),
    "run of a ticket": lambda n: wire.Finished(X, 1, n, "t"),
    "number of a failure": lambda n: wire.Failed(X, n, "why"),
    "number of a withdrawal": lambda n: wire.Withdraw(X, n),
    "version of a hello": lambda n: wire.Hello(n, MODEL, P),
    "version of a welcome": lambda n: wire.Welcome(n, MODEL, b""),
    "epoch of an address": lambda n: wire.Stranger(Address(EngineId("p"), Epoch(n))),
    "epoch of a sender": lambda n: wire.Envelope(2, Address(EngineId("p"), Epoch(n)), D, ()),
    "epoch of a target": lambda n: wire.Envelope(2, P, Address(EngineId("d"), Epoch(n)), ()),
}


@pytest.mark.parametrize("what", NUMBERS)
def test_a_number_of_a_message_is_unsigned_and_has_64_bits(what: str) -> None:
    for number in (0, wire.U64_MAX):
        NUMBERS[what](number)
    for number in (-1, wire.U64_MAX + 1):
        with pytest.raises(ValueError, match=rf"^{number} is not in \[0, 2\*\*64\)$"):
            NUMBERS[what](number)


BLOCK = BlockId(1)
NAMED = "a transfer_id must have 1 to 256 characters"
LISTED = f"more than {wire.MAX_LISTED_BLOCKS} blocks or 256 cache groups"


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: wire.Renewed(LOAN, 0, 0, math.nan), "ttl_s is nan, must be finite and not negative"),
        (lambda: wire.Renewed(LOAN, 0, 0, math.inf), "ttl_s is inf, must be finite and not negative"),
        (lambda: wire.Renewed(LOAN, 0, 0, -0.1), "ttl_s is -0.1, must be finite and not negative"),
        (
            lambda: wire.Stranger(Address(EngineId(""), Epoch(1))),
            "an engine_id must have 1 to 256 characters",
        ),
        (
            lambda: wire.Stranger(Address(EngineId("p" * 257), Epoch(1))),
            "an engine_id must have 1 to 256 characters",
        ),
        (lambda: wire.Working(TransferId(""), 1), NAMED),
        (lambda: wire.Want(TransferId("x" * 257), 1, HASH, 4), NAMED),
        (lambda: announced(transfer_id=TransferId("")), NAMED),
        (lambda: wire.Finished(TransferId(""), 1, 1, "t"), NAMED),
        (lambda: wire.Failed(TransferId(""), 1, "why"), NAMED),
        (lambda: wire.Want(X, 1, PromptHash(bytes(33)), 4), "a prompt_hash must have 32 bytes"),
        (lambda: announced([[BLOCK]], first_blocks=(0, 0)), "2 first blocks for 1 cache groups"),
        (
            lambda: announced([[BLOCK]], first_blocks=(-1,)),
            f"first_blocks must be in [0, {wire.MAX_LISTED_BLOCKS}]",
        ),
        (
            lambda: announced([[BLOCK]], first_blocks=(wire.MAX_LISTED_BLOCKS + 1,)),
            f"first_blocks must be in [0, {wire.MAX_LISTED_BLOCKS}]",
        ),
        (lambda: announced(partial_layers=-1), "partial_layers is -1, at most 4096"),
        (lambda: announced(partial_layers=4097), "partial_layers is 4097, at most 4096"),
        (lambda: announced([[BLOCK] * wire.MAX_LISTED_BLOCKS, [BLOCK]]), LISTED),
        (lambda: announced([[]] * 257), LISTED),
        (lambda: announced([[BLOCK, -1]]), "block ids must be in [0, 2**32)"),
        (lambda: announced([[2**32, BLOCK]]), "block ids must be in [0, 2**32)"),
        (lambda: wire.Finished(X, 1, 1, ""), f"a ticket must have 1 to {1 << 20} characters"),
        (
            lambda: wire.Finished(X, 1, 1, "t" * ((1 << 20) + 1)),
            f"a ticket must have 1 to {1 << 20} characters",
        ),
        (lambda: wire.Failed(X, 1, "w" * 513), "a reason must have at most 512 characters"),
        (
            lambda: wire.Hello(1, MODEL, Address(EngineId(""), Epoch(1))),
            "an engine_id must have 1 to 256 characters",
        ),
        (
            lambda: wire.Welcome(1, MODEL, bytes((3 << 20) + 1)),
            f"a payload of {(3 << 20) + 1} bytes, at most {3 << 20}",
        ),
        (lambda: wire.Refused(("no",) * 33), "more than 32 reasons, or one of more than 512 characters"),
        (lambda: wire.Refused(("n" * 513,)), "more than 32 reasons, or one of more than 512 characters"),
        (
            lambda: wire.Envelope(2, P, D, (wire.Gone(LOAN, 1),) * 4097),
            "4097 messages in one frame, at most 4096",
        ),
    ],
)
def test_messages_that_a_peer_would_refuse_cannot_be_made(make: Callable[[], object], error: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        make()


def test_the_largest_and_the_smallest_messages_can_be_made() -> None:
    longest_name = TransferId("x" * 256)
    wire.Stranger(Address(EngineId("p" * 256), Epoch(1)))
    wire.Renewed(LOAN, 0, 0, 0.0)
    wire.Want(longest_name, 1, HASH, 4)
    announced([[BLOCK]], first_blocks=(0,))
    announced([[BLOCK]], first_blocks=(wire.MAX_LISTED_BLOCKS,))
    announced(partial_layers=4096)
    announced([[BLOCK] * wire.MAX_LISTED_BLOCKS])
    announced([[]] * 256)
    announced([[0, 2**32 - 1]])
    wire.Finished(X, 1, 1, "t" * (1 << 20))
    wire.Failed(X, 1, "w" * 512)
    wire.Welcome(1, MODEL, bytes(3 << 20))
    wire.Refused(("n" * 512,) * 32)
    wire.Envelope(2, P, D, (wire.Gone(LOAN, 1),) * 4096)


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (bytes(wire.MAX_FRAME_BYTES + 1), f"frame of {(1 << 22) + 1} bytes, at most {1 << 22}"),
        (HOSTILE["another version"], "frame of wire version 3, ours is 2"),
        (HOSTILE["another version with another shape"], "frame of wire version 3, ours is 2"),
        (HOSTILE["no engine id"], "malformed frame: an engine_id must have 1 to 256 characters"),
    ],
)
def test_a_frame_that_is_refused_is_described(frame: bytes, error: str) -> None:
    with pytest.raises(PeerError) as refused:
        wire.decode_envelope(frame)
    assert str(refused.value).startswith(error)


def test_messages_of_one_turn_to_one_peer_share_an_envelope_in_order() -> None:
    sends = [Send(D, wire.Gone(LOAN, 1)), Send(P, wire.Gone(LOAN, 2)), Send(D, wire.Gone(LOAN, 3))]
    to_d, to_p = pack_sends(P, sends)
    assert (to_d.sender, to_d.target, to_d.messages) == (P, D, (wire.Gone(LOAN, 1), wire.Gone(LOAN, 3)))
    assert to_p.messages == (wire.Gone(LOAN, 2),)
    assert pack_sends(P, []) == []


def test_many_messages_are_split_over_envelopes() -> None:
    packed = pack_sends(P, [Send(D, wire.Gone(LOAN, claim)) for claim in range(wire.MAX_MESSAGES + 1)])
    assert [len(envelope.messages) for envelope in packed] == [wire.MAX_MESSAGES, 1]


def test_equal_messages_of_one_turn_are_sent_once() -> None:
    [envelope] = pack_sends(
        P, [Send(D, wire.Gone(LOAN, 1)), Send(D, wire.Gone(LOAN, 2)), Send(D, wire.Gone(LOAN, 1))]
    )
    assert envelope.messages == (wire.Gone(LOAN, 1), wire.Gone(LOAN, 2))


def test_all_messages_of_a_turn_fit_into_its_frames() -> None:
    """A hostile frame of Hellos that all differ is answered with as many long refusals."""
    refusals = [wire.Refused((f"{number}" + "x" * 500,) * 32) for number in range(600)]
    packed = pack_sends(P, [Send(D, refusal) for refusal in refusals])
    assert len(packed) > 1
    assert [
        m for envelope in packed for m in wire.decode_envelope(wire.encode_envelope(envelope)).messages
    ] == refusals


def test_the_longest_prompt_and_the_longest_ticket_fit_into_one_frame() -> None:
    blocks = (tuple(range(2**32 - wire.MAX_LISTED_BLOCKS, 2**32)),)
    longest = [
        Send(D, wire.Announced(TransferId("x"), 1, 1, wire.U64_MAX, blocks)),  # type: ignore[arg-type]
        Send(D, wire.Finished(TransferId("x"), 1, 1, "t" * (1 << 20))),
    ]
    for envelope in pack_sends(P, longest):
        assert wire.decode_envelope(wire.encode_envelope(envelope)) == envelope
