"""Faults that the memory transport injects, for the tests of connectors."""

from collections.abc import Iterator

import numpy as np
import pytest

from baton.core.errors import TransferError
from baton.core.ids import Address, EngineId, Epoch
from baton.core.layout import CopySpan, Region
from baton.transport.base.spans import PreparedSpans
from baton.transport.memory import MemoryNetwork, MemoryPeer, MemoryTransport

BLOCK = 64
PRODUCER, CONSUMER = Address(EngineId("producer"), Epoch(1)), Address(EngineId("consumer"), Epoch(2))


class World:
    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.source = np.arange(4 * BLOCK, dtype=np.uint8)
        self.target = np.zeros(4 * BLOCK, dtype=np.uint8)
        self.owner = MemoryTransport(PRODUCER, self.network)
        self.reader = MemoryTransport(CONSUMER, self.network)
        self.endpoint = self.owner.register([Region(self.source.ctypes.data, self.source.nbytes)])
        self.reader.register([Region(self.target.ctypes.data, self.target.nbytes)])
        self.prepared: PreparedSpans[MemoryPeer] = self.connect()

    def connect(self) -> PreparedSpans[MemoryPeer]:
        peer = self.reader.connect(PRODUCER, self.endpoint)
        return self.reader.prepare(peer, [CopySpan(0, 0, BLOCK, 0, 0, BLOCK, BLOCK)])


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.reader.close()
    world.owner.close()


def test_a_held_read_copies_what_is_there_when_it_is_released(world: World) -> None:
    world.network.hold()
    world.reader.post_read(world.prepared, [0], [1])
    assert world.network.held_count == 1
    assert world.reader.poll() == []
    world.source[:] = 99
    assert world.network.release() == 1
    assert [c.ok for c in world.reader.poll()] == [True]
    assert (world.target[:BLOCK] == 99).all()


def test_held_reads_are_released_one_by_one_oldest_first(world: World) -> None:
    world.network.hold()
    ops = [world.reader.post_read(world.prepared, [block], [block]) for block in range(3)]
    assert world.network.release(1) == 1
    assert [c.op for c in world.reader.poll()] == ops[:1]
    assert world.network.held_count == 2
    world.reader.post_read(world.prepared, [3], [3])
    assert world.network.held_count == 3


def test_a_read_that_is_told_to_fail_copies_nothing(world: World) -> None:
    world.network.fail_next("the cable is cut")
    world.reader.post_read(world.prepared, [0], [1])
    world.reader.post_read(world.prepared, [1], [1])
    first, second = world.reader.poll()
    assert (first.ok, first.error, second.ok) == (False, "the cable is cut", True)
    assert not world.target[:BLOCK].any()


def test_a_kill_ends_held_and_later_reads(world: World) -> None:
    world.network.hold()
    world.reader.post_read(world.prepared, [0], [1])
    world.network.kill(PRODUCER)
    assert [c.ok for c in world.reader.poll()] == [False]
    world.network.release()
    world.reader.post_read(world.prepared, [0], [1])
    assert [c.ok for c in world.reader.poll()] == [False]
    with pytest.raises(TransferError, match="not on this process's memory network"):
        world.connect()


def test_a_cancelled_read_never_copies(world: World) -> None:
    world.network.hold()
    op = world.reader.post_read(world.prepared, [0], [1])
    world.reader.cancel(op)
    assert [(c.op, c.error) for c in world.reader.poll()] == [(op, "cancelled")]
    assert world.network.release() == 0
    assert not world.target.any()


def test_a_disconnect_ends_held_reads_of_that_peer_only(world: World) -> None:
    other = world.connect()
    world.network.hold()
    mine = world.reader.post_read(world.prepared, [0], [1])
    world.reader.post_read(other, [1], [1])
    world.reader.disconnect(world.prepared.peer)
    assert [(c.op, c.error) for c in world.reader.poll()] == [(mine, "disconnected")]
    assert world.network.held_count == 1
