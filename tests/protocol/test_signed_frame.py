"""Signed frames: only the process that has an address can write in its name."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import PeerError
from baton.core.ids import Address, EngineId, Epoch, LoanId
from baton.protocol import signed_frame
from baton.protocol.messages import WIRE_VERSION, Envelope, Released, encode_envelope
from baton.protocol.signed_frame import ForgedFrame, ProcessKey, epoch_of

P, D, LIAR = (ProcessKey(bytes((number,)) * 32) for number in (1, 2, 3))
AT_P, AT_D = (Address(EngineId(name), key.epoch) for name, key in (("p", P), ("d", D)))
ENVELOPE = Envelope(WIRE_VERSION, AT_D, AT_P, (Released(LoanId(AT_P.epoch, 1), 7),))
FRAME = D.sign(ENVELOPE, P.public)


def test_a_frame_arrives_as_its_sender_wrote_it() -> None:
    opened = P.open(FRAME, AT_P)
    assert (opened.envelope, opened.public_key, opened.is_proved) == (ENVELOPE, D.public, True)


@given(st.integers(0, len(FRAME) * 8 - 1))
def test_no_bit_of_a_frame_can_be_changed(bit: int) -> None:
    damaged = bytearray(FRAME)
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        opened = P.open(bytes(damaged), AT_P)
    except PeerError:
        return
    assert not opened.is_proved  # The target was changed: the only answer is Stranger.
    assert opened.envelope.target != AT_P


@pytest.mark.parametrize(
    "frame",
    [
        LIAR.sign(ENVELOPE, P.public),
        LIAR.sign(ENVELOPE, D.public),
        D.sign(ENVELOPE, LIAR.public),
        D.sign(ENVELOPE, None),
        P.sign(ENVELOPE, P.public),
    ],
    ids=["in another's name", "for another", "wrong pair", "unsigned", "the receiver's own key"],
)
def test_a_frame_that_its_sender_did_not_sign_for_us_is_forged(frame: bytes) -> None:
    with pytest.raises(ForgedFrame):
        P.open(frame, AT_P)


def test_the_senders_public_key_alone_cannot_sign() -> None:
    mac_of_liar = msgspec.msgpack.decode(LIAR.sign(ENVELOPE, P.public))[2]
    frame = msgspec.msgpack.encode([WIRE_VERSION, D.public, mac_of_liar, encode_envelope(ENVELOPE)])
    with pytest.raises(ForgedFrame):
        P.open(frame, AT_P)


def test_a_frame_cannot_be_reflected_to_its_sender() -> None:
    with pytest.raises(ForgedFrame):
        D.open(FRAME, AT_D._replace(engine_id=AT_P.engine_id, epoch=AT_P.epoch))


def test_a_frame_for_a_predecessor_proves_nothing() -> None:
    old = Envelope(WIRE_VERSION, AT_D, Address(AT_P.engine_id, Epoch(5)), ENVELOPE.messages)
    assert not P.open(D.sign(old, None), AT_P).is_proved


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(32), b"\1" + bytes(31)])
def test_an_invalid_public_key_is_refused(key: bytes) -> None:
    with pytest.raises(PeerError, match="not a public key"):
        D.sign(ENVELOPE, key)


def test_another_version_is_named_with_ours() -> None:
    old = msgspec.msgpack.encode([1, list(AT_D), list(AT_P), []])
    new = msgspec.msgpack.encode([WIRE_VERSION + 1, b"", b"", b""])
    for frame, version in ((old, 1), (new, WIRE_VERSION + 1)):
        with pytest.raises(PeerError, match=f"wire version {version}, ours is {WIRE_VERSION}"):
            P.open(frame, AT_P)


def test_the_keys_of_many_peers_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signed_frame, "PAIR_KEYS_MAX", 3)
    key = ProcessKey()
    for number in range(10):
        key.sign(ENVELOPE, ProcessKey(bytes((number,)) * 32).public)
    assert len(key._pair_keys) == 3


def test_no_process_has_the_epoch_that_means_none() -> None:
    assert epoch_of(P.public) != 0
    assert len({ProcessKey().epoch for _ in range(10)}) == 10
