"""No change of bytes between reader and owner makes a read succeed with wrong bytes."""

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.core.config import ClusterSecret
from baton.core.errors import ConfigError, PeerError, TransferError
from baton.core.layout import CopySpan
from baton.testing.transport_producers import new_address, pattern, regions_of
from baton.testing.transport_rig import drain
from baton.transport.base import gather
from baton.transport.tcp import reader as tcp_reader
from baton.transport.tcp.sealing import Integrity
from baton.transport.tcp.transport import TcpOptions, TcpTransport
from baton.transport.tcp.wire import ANSWER, REQUEST, VERSION, TcpEndpoint
from tests.transport.copy_library import built
from tests.transport.frame_proxy import END, Frame, FrameProxy, Tamper, pass_on

SECRET = ClusterSecret(b"the secret of this cluster")
OLD_SECRET = ClusterSecret(b"the secret before this one")
BLOCK_BYTES = 64
SPAN = CopySpan(0, 0, BLOCK_BYTES, 0, 0, BLOCK_BYTES, BLOCK_BYTES)
FRAMES = {"challenge": 1, "hello": 1, "welcome": 1, "request": REQUEST.size, "answer": ANSWER.size}


@dataclass
class Outcome:
    ok: bool
    is_right: bool  # Whether the memory holds the owner's bytes.
    error: str


class Wire:
    """An owner, and the proxy in front of it."""

    def __init__(self, integrity: Integrity) -> None:
        self.integrity: Integrity = integrity
        self.proxy = FrameProxy()
        self.memory = pattern(4)[:, :4096].copy()
        self.target = np.zeros_like(self.memory)  # The memory of the last reader.
        options = TcpOptions(advertise_port=self.proxy.port, integrity=integrity)
        self.address = new_address("owner")
        self.transport = TcpTransport(self.address, options, secret=SECRET)
        self.endpoint = self.transport.register(regions_of(self.memory))
        self.proxy.target = self.transport.port

    def close(self) -> None:
        self.transport.close()
        self.proxy.close()

    def read(self, tamper: Tamper, *, num_reads: int = 1) -> list[Outcome]:
        """Reads block 7 + i into block i with a new reader; all are posted before the first ends."""
        self.proxy.tamper = tamper
        target = self.target = np.zeros_like(self.memory)
        reader = TcpTransport(
            new_address("reader"), TcpOptions(integrity=self.integrity), secret=SECRET, num_lanes=1
        )
        with closing(reader):
            reader.register(regions_of(target))
            try:
                peer = reader.connect(self.address, self.endpoint)
                prepared = reader.prepare(peer, [SPAN])
                ops = [reader.post_read(prepared, [i], [7 + i]) for i in range(num_reads)]
            except (TransferError, PeerError) as error:
                return [Outcome(False, False, str(error))]
            ended = sorted(drain(reader, ops), key=lambda completion: completion.op)
            source = self.memory[0].reshape(-1, BLOCK_BYTES)
            blocks = target[0].reshape(-1, BLOCK_BYTES)
            return [
                Outcome(c.ok, bool((blocks[i] == source[7 + i]).all()), c.error or "")
                for i, c in enumerate(ended)
            ]


@pytest.fixture(params=["mac", "mac, compiled", "encrypt, compiled"])
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Wire]:
    monkeypatch.setattr(tcp_reader, "STALL_S", 1.0)  # A changed length makes one end wait.
    integrity, _, is_compiled = request.param.partition(", ")
    monkeypatch.setattr(gather, "LIBRARY", built() if is_compiled else tmp_path / "not-built")
    wire = Wire(integrity)
    yield wire
    wire.close()


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def flip(kind: str, bit: int) -> Tamper:
    """Flips a bit in all frames of this kind."""

    def tamper(frame: Frame) -> list[bytes]:
        return [flipped(frame.content, bit) if frame.kind == kind else frame.content]

    return tamper


def assert_nothing_wrong_is_believed(outcomes: list[Outcome]) -> None:
    assert all(outcome.is_right for outcome in outcomes if outcome.ok)


def test_an_unchanged_wire_is_right(wire: Wire) -> None:
    assert wire.read(pass_on, num_reads=3) == [Outcome(True, True, "")] * 3
    assert {frame.kind for frame in wire.proxy.frames} == FRAMES.keys()


@pytest.mark.parametrize("kind", ["request", "answer"])
def test_a_flipped_bit_in_any_byte_of_a_frame_fails_the_read(wire: Wire, kind: str) -> None:
    """Flips one bit of each byte: kind, count, number, address, length, payload and tag."""
    [whole] = [f for f in _frames_of_a_read(wire) if f.kind == kind]
    rng = random.Random(kind + wire.integrity)
    for byte in range(len(whole.content)):
        outcomes = wire.read(flip(kind, 8 * byte + rng.randrange(8)))
        assert [outcome.ok for outcome in outcomes] == [False], f"byte {byte} of the {kind}"
    assert wire.read(pass_on) == [Outcome(True, True, "")]


@pytest.mark.parametrize("bit", range(6, 12))
def test_a_request_for_another_address_is_not_answered(wire: Wire, bit: int) -> None:
    """Flips address bits that lead to other registered memory."""
    [outcome] = wire.read(flip("request", 8 * REQUEST.size + bit))
    assert not outcome.ok
    assert wire.transport.counters.bad_requests == 1
    assert wire.transport.counters.served_bytes == 0


@pytest.mark.parametrize("kind", ["challenge", "hello", "welcome"])
def test_a_flipped_bit_in_the_handshake_refuses_the_connection(wire: Wire, kind: str) -> None:
    [whole] = [f for f in _frames_of_a_read(wire) if f.kind == kind]
    rng = random.Random(kind)
    for byte in range(6, len(whole.content), 7):  # The length is left out: its flip only makes an end wait.
        [outcome] = wire.read(flip(kind, 8 * byte + rng.randrange(8)))
        assert not outcome.ok, f"byte {byte}"


@pytest.mark.parametrize("kind", ["request", "answer"])
def test_a_duplicated_frame_fails_what_follows(wire: Wire, kind: str) -> None:
    outcomes = wire.read(lambda frame: [frame.content] * (2 if frame.kind == kind else 1), num_reads=4)
    assert_nothing_wrong_is_believed(outcomes)
    assert not all(outcome.ok for outcome in outcomes)


@pytest.mark.parametrize("kind", ["request", "answer"])
def test_frames_in_another_order_are_refused(wire: Wire, kind: str) -> None:
    held: list[bytes] = []

    def swap(frame: Frame) -> list[bytes]:
        if frame.kind != kind or frame.number > 1:
            return [frame.content]
        held.insert(0, frame.content)
        return held if len(held) == 2 else []

    outcomes = wire.read(swap, num_reads=4)
    assert_nothing_wrong_is_believed(outcomes)
    assert not any(outcome.ok for outcome in outcomes)


@pytest.mark.parametrize("kind", ["request", "answer"])
def test_frames_of_another_connection_are_refused(wire: Wire, kind: str) -> None:
    [recorded] = [f for f in _frames_of_a_read(wire) if f.kind == kind]
    [outcome] = wire.read(lambda frame: [recorded.content if frame.kind == kind else frame.content])
    assert not outcome.ok


def test_an_answer_is_not_accepted_for_another_request(wire: Wire) -> None:
    """The second answer has the content of the first one, under its own number."""
    first: list[bytes] = []

    def repeat(frame: Frame) -> list[bytes]:
        if frame.kind != "answer":
            return [frame.content]
        first.append(frame.content)
        return [frame.content[: ANSWER.size] + first[0][ANSWER.size :]]

    outcomes = wire.read(repeat, num_reads=2)
    assert outcomes[0] == Outcome(True, True, "")
    assert not outcomes[1].ok


@pytest.mark.parametrize("kind", ["challenge", "hello", "welcome", "request", "answer"])
def test_a_truncated_frame_fails_the_read(wire: Wire, kind: str) -> None:
    [outcome] = wire.read(lambda frame: [frame.content[:-1], END] if frame.kind == kind else [frame.content])
    assert not outcome.ok


def test_an_answer_that_is_changed_once_is_read_again(wire: Wire) -> None:
    def change_the_first(frame: Frame) -> list[bytes]:
        is_first = frame.kind == "answer" and frame.number == 0
        return [flipped(frame.content, 8 * ANSWER.size + 3) if is_first else frame.content]

    assert wire.read(change_the_first) == [Outcome(True, True, "")]


def test_an_encrypted_wire_shows_no_kv() -> None:
    for integrity, is_visible in (("mac", True), ("encrypt", False)):
        with closing(Wire(integrity)) as wire:  # type: ignore[arg-type]
            [answer] = [f for f in _frames_of_a_read(wire) if f.kind == "answer"]
            block = wire.memory[0, 7 * BLOCK_BYTES : 8 * BLOCK_BYTES].tobytes()
            assert (block in answer.content) is is_visible


@pytest.mark.parametrize("theirs", ["off", "mac", "encrypt"])
@pytest.mark.parametrize("ours", ["off", "mac", "encrypt"])
def test_a_connection_has_the_stronger_level_of_its_ends(ours: Integrity, theirs: Integrity) -> None:
    with closing(Wire(theirs)) as wire:
        wire.integrity = ours
        changed = [o.ok for o in wire.read(flip("answer", 8 * ANSWER.size))]
        assert changed == [{ours, theirs} == {"off"}]
        [answer] = [f for f in _frames_of_a_read(wire) if f.kind == "answer"]
        block = wire.memory[0, 7 * BLOCK_BYTES : 8 * BLOCK_BYTES].tobytes()
        assert (block not in answer.content) is ("encrypt" in (ours, theirs))


def test_the_default_level_depends_on_the_bound_address() -> None:
    assert TcpOptions().level == "mac"
    assert TcpOptions(host="10.0.0.7").level == "encrypt"
    assert TcpOptions(advertise_host="10.0.0.7").level == "encrypt"
    assert TcpOptions(host="10.0.0.7", integrity="mac").level == "mac"


@pytest.mark.parametrize("options", [{"host": "10.0.0.7"}, {"advertise_host": "10.0.0.7"}])
def test_off_is_for_the_loopback_only(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"tcp\.integrity: off is allowed on the loopback only"):
        TcpOptions(integrity="off", **options)  # type: ignore[arg-type]


def test_off_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    TcpTransport(new_address("owner"), TcpOptions(integrity="off")).close()
    assert "integrity is off" in caplog.text


def test_while_a_secret_is_replaced_both_secrets_connect() -> None:
    both = ClusterSecret(SECRET.key, previous=OLD_SECRET.key)
    for ours, theirs in ((both, OLD_SECRET), (OLD_SECRET, both), (both, SECRET), (both, both)):
        assert _connects(ours, theirs)
    assert not _connects(SECRET, OLD_SECRET)
    assert not _connects(SECRET, None)
    assert _connects(None, None)


def test_another_version_is_refused_with_a_clear_message() -> None:
    with closing(Wire("mac")) as wire, closing(TcpTransport(new_address("r"), secret=SECRET)) as reader:
        named = msgspec.msgpack.decode(wire.endpoint, type=TcpEndpoint)
        older = msgspec.msgpack.encode(msgspec.structs.replace(named, version=VERSION - 1))
        with pytest.raises(TransferError, match=f"version {VERSION - 1}.*version {VERSION}: run the same"):
            reader.connect(wire.address, older)


def _frames_of_a_read(wire: Wire) -> list[Frame]:
    del wire.proxy.frames[:]
    [outcome] = wire.read(pass_on)
    assert outcome.ok
    return list(wire.proxy.frames)


def _connects(ours: ClusterSecret | None, theirs: ClusterSecret | None) -> bool:
    memory = np.zeros((1, 4096), dtype=np.uint8)
    address = new_address("owner")
    with (
        closing(TcpTransport(address, secret=theirs)) as owner,
        closing(TcpTransport(new_address("reader"), secret=ours)) as reader,
    ):
        try:
            reader.connect(address, owner.register(regions_of(memory)))
        except TransferError:
            return False
        return True
