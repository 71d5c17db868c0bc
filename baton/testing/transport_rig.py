"""Test rig of the transport suite: makes readers and producers, and breaks producers on demand.

Readers are in this process, producers anywhere. Producers offer two regions of `REGION_BYTES` filled by
`pattern`, so the expected bytes are known.
"""

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from baton.core.errors import TransferError
from baton.core.ids import Address
from baton.core.layout import CopySpan
from baton.testing.transport_producers import NUM_REGIONS, REGION_BYTES, Placed, place_on_host
from baton.transport.base.interface import Completion, OpId, PeerHandle, Prepared, Transport

BLOCK_BYTES = 4096
NUM_BLOCKS = REGION_BYTES // BLOCK_BYTES
BLOCK_SPAN = CopySpan(0, 0, BLOCK_BYTES, 0, 0, BLOCK_BYTES, BLOCK_BYTES)  # Whole blocks of region 0.
END_TIMEOUT_S = 30.0  # Far above the time of any operation, also on a loaded machine.


class Producer(Protocol):
    """A peer with registered memory that can be broken."""

    address: Address
    endpoint: bytes
    seed: int

    def kill(self) -> None:
        """End without closing connections."""

    def replace(self) -> None:
        """Replace it by another incarnation: same engine id and, if it has one, same port."""

    def withdraw(self) -> None:
        """Close its transport in order; the process continues."""

    def close(self) -> None: ...


class TransportRig(ABC):
    """Makes readers and producers for one transport."""

    @abstractmethod
    def reader(self, on_completion: Callable[[], None] | None = None) -> Transport:
        """Return a new transport in this process."""

    @abstractmethod
    def producer(self, seed: int) -> Producer:
        """Return a new producer whose memory is `pattern(seed)`."""

    def place(self, content: NDArray[np.uint8]) -> Placed:
        """Put these bytes into memory that the reader's transport can write; by default host memory."""
        return place_on_host(content)


class Plan(msgspec.Struct, frozen=True):
    """Spans and blocks of one read."""

    spans: tuple[CopySpan, ...]
    local_blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]

    def apply(self, local: NDArray[np.uint8], remote: NDArray[np.uint8]) -> None:
        """Do what a read must do, one block and span at a time."""
        for span in self.spans:
            for to, source in zip(self.local_blocks, self.remote_blocks, strict=True):
                start = span.local_offset + to * span.local_stride
                remote_start = span.remote_offset + source * span.remote_stride
                local[span.local_region, start : start + span.nbytes] = remote[
                    span.remote_region, remote_start : remote_start + span.nbytes
                ]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Layers of one to three heads each, at any offsets on both sides, also adjacent ones."""
    num_blocks = draw(st.integers(1, 12))
    spans: list[CopySpan] = []
    used = [0] * NUM_REGIONS
    for _ in range(draw(st.integers(1, 4))):
        head_bytes = draw(st.integers(1, 300) | st.sampled_from((4096, 70_000)))
        num_heads = draw(st.integers(1, 3))
        local_region, remote_region = draw(st.integers(0, 1)), draw(st.integers(0, 1))
        local_stride = head_bytes * num_heads + draw(st.integers(0, 1) | st.integers(0, 64))
        remote_stride = head_bytes * num_heads + draw(st.integers(0, 1) | st.integers(0, 64))
        if used[local_region] + local_stride * num_blocks > REGION_BYTES:
            continue
        remote_offset = draw(st.integers(0, REGION_BYTES - remote_stride * num_blocks))
        heads = draw(st.permutations(range(num_heads)) | st.just(list(range(num_heads))))
        spans += [
            CopySpan(
                local_region,
                used[local_region] + to * head_bytes,
                local_stride,
                remote_region,
                remote_offset + source * head_bytes,
                remote_stride,
                head_bytes,
            )
            for to, source in enumerate(heads)
        ]
        used[local_region] += local_stride * num_blocks
    blocks = st.lists(st.integers(0, num_blocks - 1), max_size=num_blocks)
    local_blocks = draw(blocks.map(lambda b: list(dict.fromkeys(b))) | st.just(list(range(num_blocks))))
    remote_blocks = [draw(st.integers(0, num_blocks - 1) | st.just(block)) for block in local_blocks]
    return Plan(tuple(spans), tuple(local_blocks), tuple(remote_blocks))


class Connection:
    """A reader with memory of its own, connected to a producer."""

    def __init__(
        self,
        transport: Transport,
        producer: Producer,
        place: Callable[[NDArray[np.uint8]], Placed] = place_on_host,
    ) -> None:
        self.transport = transport
        self.producer = producer
        self.memory, regions = place(np.zeros((NUM_REGIONS, REGION_BYTES), dtype=np.uint8))
        transport.register(regions)
        self.peer: PeerHandle = transport.connect(producer.address, producer.endpoint)

    def prepare(self, *spans: CopySpan) -> Prepared:
        return self.transport.prepare(self.peer, spans or (BLOCK_SPAN,))

    def read(self, prepared: Prepared, local: Sequence[int], remote: Sequence[int]) -> Completion:
        op = self.transport.post_read(prepared, local, remote)
        (completion,) = drain(self.transport, [op])
        return completion


def drain(transport: Transport, ops: Sequence[OpId]) -> list[Completion]:
    """Wait until all `ops` have ended. Fails if one ends twice, never, or was not posted."""
    waiting = set(ops)
    ended: list[Completion] = []
    deadline = time.monotonic() + END_TIMEOUT_S
    while waiting:
        assert transport.wait_completion(max(0.0, deadline - time.monotonic())), f"{len(waiting)} never ended"
        for completion in transport.poll():
            assert completion.op in waiting, f"operation {completion.op} ended twice, or was never posted"
            assert (completion.error is None) == completion.ok
            waiting.remove(completion.op)
            ended.append(completion)
    assert transport.poll() == []
    return ended


def assert_reads_fail(connection: Connection, prepared: Prepared) -> None:
    """Check that reads are refused or end not ok, within the time that `drain` gives."""
    for _ in range(2):
        try:
            completion = connection.read(prepared, [0], [0])
        except TransferError:
            continue
        assert not completion.ok


@contextmanager
def nothing_left_over() -> Iterator[None]:
    """Fails if a thread or a file descriptor of this process outlives the block."""
    threads = set(threading.enumerate())
    fds = set(os.listdir("/proc/self/fd"))
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in threads]
    assert not left, f"threads not ended: {left}"
    # The descriptor that lists the directory may differ.
    assert len(os.listdir("/proc/self/fd")) <= len(fds), "file descriptors not closed"
