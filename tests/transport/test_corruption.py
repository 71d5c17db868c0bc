"""Changed bytes that each connection between engines detects (docs/protocol.md, section 13).

tcp has its own file (test_tcp_integrity). NIXL's fake agent is in test_nixl.
"""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest

from baton.core.config import ClusterSecret
from baton.core.errors import TransferError
from baton.testing.transport_producers import HostDevice, new_address, pattern, regions_of
from baton.testing.transport_rig import BLOCK_SPAN, drain
from baton.transport.base.interface import Completion, Transport
from baton.transport.base.iovec import read_process_memory
from baton.transport.base.spans import Copies
from baton.transport.control.channel import ControlChannel
from baton.transport.cuda_ipc.transport import CudaIpcTransport
from baton.transport.local import transport as local
from baton.transport.local.transport import LocalTransport
from tests.transport.relay import Piece, Relay, flipped

SECRET = ClusterSecret(b"the secret of this cluster")
TIMEOUT_S = 30.0


# --- Transports that copy memory: local, cuda_ipc, memory -----------------------------------------------


class Copier:
    """An owner and a reader in this process, on a transport whose copies a test can change."""

    def __init__(self, make: Callable[[], Transport]) -> None:
        self.memory, self.target = pattern(4).copy(), np.zeros_like(pattern(4))
        self.owner, self.reader = make(), make()
        endpoint = self.owner.register(regions_of(self.memory))
        self.reader.register(regions_of(self.target))
        self.peer = self.reader.connect(self.owner._address, endpoint)  # type: ignore[attr-defined]
        self.prepared = self.reader.prepare(self.peer, [BLOCK_SPAN])

    def close(self) -> None:
        self.reader.close()
        self.owner.close()

    def read(self) -> Completion:
        """Reads block 5 into block 3."""
        (completion,) = drain(self.reader, [self.reader.post_read(self.prepared, [3], [5])])
        return completion

    @property
    def is_right(self) -> bool:
        rows, source = (memory[0].reshape(-1, 4096) for memory in (self.target, self.memory))
        return bool((rows[3] == source[5]).all())


class BentDevice(HostDevice):
    """A GPU driver that changes what it copies, or reports a failure."""

    def __init__(self) -> None:
        super().__init__()
        self.bend: Callable[[Copies], Copies] = lambda copies: copies

    def copy(self, copies: Copies, device: int) -> None:
        super().copy(self.bend(copies), device)


def test_local_notices_a_short_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Copier(lambda: LocalTransport(new_address("local")))) as copier:
        assert copier.read().ok
        copier.target[:] = 0

        def nothing_but_the_page(pid: int, to: np.ndarray, source: np.ndarray) -> int:
            return read_process_memory(pid, to[:1], source[:1])

        monkeypatch.setattr(local, "read_process_memory", nothing_but_the_page)
        assert not copier.read().ok


@pytest.mark.parametrize("page", [0, -1])
def test_local_notices_a_changed_identity_page(monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    with closing(Copier(lambda: LocalTransport(new_address("local")))) as copier:

        def flip(pid: int, to: np.ndarray, source: np.ndarray) -> int:
            count = read_process_memory(pid, to, source)
            _byte_at(int(to[page, 0]))[0] ^= 1
            return count

        monkeypatch.setattr(local, "read_process_memory", flip)
        assert not copier.read().ok


def test_cuda_ipc_notices_driver_errors_and_a_withdrawn_owner() -> None:
    device = BentDevice()
    with closing(Copier(lambda: CudaIpcTransport(new_address("cuda"), driver=device))) as copier:
        assert copier.read().ok

        def fail(copies: Copies) -> Copies:
            raise TransferError("CUDA_ERROR_ECC_UNCORRECTABLE")

        device.bend = fail
        assert "ECC" in (copier.read().error or "")
    device = BentDevice()
    with closing(Copier(lambda: CudaIpcTransport(new_address("cuda"), driver=device))) as copier:

        def withdraw(copies: Copies) -> Copies:
            copier.owner._identity.void()  # type: ignore[attr-defined]
            return copies

        device.bend = withdraw
        assert "withdrawn" in (copier.read().error or "")


def test_transports_without_a_wire_do_not_check_the_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documentation says so: only the machine's ECC protects a copy from memory to memory."""
    device = BentDevice()
    with closing(Copier(lambda: CudaIpcTransport(new_address("cuda"), driver=device))) as copier:
        device.bend = lambda copies: Copies(copies.local, copies.remote + 1, copies.nbytes - 1)
        assert copier.read().ok
        assert not copier.is_right
    with closing(Copier(lambda: LocalTransport(new_address("local")))) as copier:

        def flip(pid: int, to: np.ndarray, source: np.ndarray) -> int:
            count = read_process_memory(pid, to, source)
            _byte_at(int(to[1, 0]))[0] ^= 1
            return count

        monkeypatch.setattr(local, "read_process_memory", flip)
        assert copier.read().ok
        assert not copier.is_right


def _byte_at(address: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_ubyte * 1).from_address(address))


# --- The control channel --------------------------------------------------------------------------


class Bent:
    """Two channels with a proxy between them, and the forwarded pieces."""

    def __init__(self, secret: ClusterSecret | None) -> None:
        self.here, self.there = ControlChannel(secret=secret), ControlChannel(secret=secret)
        self.beside = ControlChannel(secret=secret)
        self.proxy = Relay(self.there.port)
        self.frames: list[bytes] = []

    def close(self) -> None:
        for channel in (self.here, self.beside, self.there):
            channel.close()
        self.proxy.close()

    def send_bent(
        self, bend: Callable[[bytes], list[bytes]], until: Callable[[list[bytes]], bool]
    ) -> list[bytes]:
        """Frames received `until` then: FRAME, changed in transit, and a later frame of another channel."""
        passed = threading.Event()

        def bend_frame(piece: Piece) -> list[bytes]:
            if piece.way == "back":
                return [piece.content]
            passed.set()
            return bend(piece.content)

        self.here.send(self.proxy.url, b"before")
        self._receive_until(lambda received: b"before" in received)
        self.proxy.change = bend_frame
        self.here.send(self.proxy.url, FRAME)
        while not passed.wait(0.001):
            self.here.poll(0.0)
        self.beside.send(self.there.url, b"after")
        return self._receive_until(until)

    def _receive_until(self, until: Callable[[list[bytes]], bool]) -> list[bytes]:
        received: list[bytes] = []
        pause = threading.Event()
        for _ in range(int(TIMEOUT_S / 0.002)):
            self.here.poll(0.0)
            self.beside.poll(0.0)
            received += [message.frame for message in self.there.poll(0.0)]
            if until(received):
                return received
            pause.wait(0.002)
        raise AssertionError(f"only {received} arrived")


@pytest.fixture
def bent() -> Iterator[Callable[[ClusterSecret | None], Bent]]:
    with contextlib.ExitStack() as stack:

        def make(secret: ClusterSecret | None) -> Bent:
            made = Bent(secret)
            stack.callback(made.close)
            return made

        yield make


FRAME = bytes(range(64))


def _flip(at: int) -> Callable[[bytes], list[bytes]]:
    return lambda piece: [flipped(piece, at)]


@pytest.mark.parametrize(
    "bend",
    [_flip(0), _flip(1), _flip(12), _flip(40), _flip(-1), lambda p: [p, p], lambda p: [p[: len(p) // 2]]],
    ids=["flag", "length", "nonce", "payload", "end", "twice", "truncated"],
)
def test_with_a_secret_no_changed_control_frame_arrives(
    bent: Callable[[ClusterSecret | None], Bent], bend: Callable[[bytes], list[bytes]]
) -> None:
    received = bent(SECRET).send_bent(bend, until=lambda received: b"after" in received)
    assert set(received) <= {FRAME, b"before", b"after"}
    assert received.count(FRAME) <= 1


def test_without_a_secret_the_channel_itself_notices_nothing(
    bent: Callable[[ClusterSecret | None], Bent],
) -> None:
    """The MAC in each frame (`baton.protocol.signed_frame`) then detects it."""
    changed = flipped(FRAME, -1)
    assert changed in bent(None).send_bent(_flip(-1), until=lambda received: changed in received)
