"""The real CudaDriver with a library that follows CUDA's rules on a machine without a GPU.

Its streams do nothing before they are waited for, so a missing wait is always detected.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest

from baton.core.errors import TransferError
from baton.core.layout import CopySpan, Region
from baton.testing.transport_producers import REGION_BYTES, ProcessProducer, new_address, pattern
from baton.testing.transport_rig import (
    BLOCK_BYTES,
    BLOCK_SPAN,
    Connection,
    Producer,
    TransportRig,
    drain,
)
from baton.testing.transport_suite import TransportSuite
from baton.transport.base.interface import Transport
from baton.transport.cuda_ipc.driver import CudaDriver
from tests.transport.fake_cuda import COMPILER, PAGE, FakeDevice, FakeDeviceMemory, build, make, place

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(COMPILER is None, reason="there is no C compiler for the driver's double"),
]


class FakeCudaRig(TransportRig):
    def __init__(self, library: str) -> None:
        self._library = library
        self.place = functools.partial(place, library)  # type: ignore[method-assign]

    def reader(self, on_completion: Callable[[], None] | None = None) -> Transport:
        return make(self._library, new_address("reader"), on_completion=on_completion)

    def producer(self, seed: int) -> Producer:
        return ProcessProducer(functools.partial(make, self._library), seed, self.place)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("fake_cuda"))


@pytest.fixture(scope="module")
def rig(library: str) -> FakeCudaRig:
    return FakeCudaRig(library)


class TestCudaIpcOnFakeDevice(TransportSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls, library: str) -> TransportRig:
        return FakeCudaRig(library)


@pytest.fixture(scope="module")
def producer(rig: FakeCudaRig) -> Iterator[Producer]:
    producer = rig.producer(seed=6)
    yield producer
    producer.close()


def test_a_peer_mapped_twice_is_unmapped_twice(rig: FakeCudaRig, library: str, producer: Producer) -> None:
    """Two links of one rank to another do this: the driver gives both the same addresses."""
    device = FakeDevice(library)
    with closing(rig.reader()) as reader:
        first = Connection(reader, producer, rig.place)
        second = reader.connect(producer.address, producer.endpoint)
        assert device.num_opened == 2, "one allocation for both regions, opened for two peers"
        reader.disconnect(first.peer)
        reader.disconnect(first.peer)
        assert device.num_opened == 1
        prepared = reader.prepare(second, [BLOCK_SPAN])
        assert drain(reader, [reader.post_read(prepared, [1], [2])])[0].ok
        assert np.array_equal(first.memory[0, BLOCK_BYTES : 2 * BLOCK_BYTES], _block(producer, 2))
    assert device.num_opened == 0


def test_a_read_that_fails_half_way_leaves_no_copy_running(
    rig: FakeCudaRig, library: str, producer: Producer
) -> None:
    """What was launched before the failed copy must not arrive after the end of the read."""
    device = FakeDevice(library)
    with closing(rig.reader()) as reader:
        connection = Connection(reader, producer, rig.place)
        prepared = connection.prepare()
        # The blocks are not adjacent, so that each is a separate copy.
        device.fail_copy_in(3)
        completion = connection.read(prepared, [0, 2, 4, 6], [1, 3, 5, 7])
        assert not completion.ok
        assert "illegal memory access" in (completion.error or "")
        connection.memory[0] = 9  # The blocks belong to another request now.
        connection.peer = reader.connect(producer.address, producer.endpoint)  # The failure lost the peer.
        other = connection.prepare(CopySpan(1, 0, BLOCK_BYTES, 0, 0, BLOCK_BYTES, BLOCK_BYTES))
        assert connection.read(other, [0], [0]).ok
        assert (connection.memory[0] == 9).all()


def test_a_region_over_two_allocations_is_refused(library: str) -> None:
    device, driver = FakeDevice(library), CudaDriver(library)
    base = device.allocate(4 * PAGE)
    try:
        driver.share(Region(base + PAGE, 3 * PAGE, "cuda:0"))
        with pytest.raises(TransferError, match="several CUDA allocations"):
            driver.share(Region(base + PAGE, 4 * PAGE, "cuda:0"))
    finally:
        device.free(base)


@pytest.mark.parametrize("device", ["cpu", "cuda:x", "cuda:1"])
def test_memory_of_another_device_is_refused(library: str, device: str) -> None:
    with pytest.raises(TransferError):
        CudaDriver(library).share(Region(PAGE, PAGE, device))


def test_a_missing_library_means_no_driver() -> None:
    with pytest.raises(TransferError, match="no CUDA driver"):
        CudaDriver("libcuda-that-is-nowhere.so.1")


def test_the_fake_driver_copies_nothing_before_a_wait(library: str) -> None:
    """Otherwise the tests above would show nothing."""
    memory = FakeDeviceMemory(FakeDevice(library), pattern(3).copy())
    driver = CudaDriver(library)
    before = memory[0].copy()
    address = memory.regions[0].address
    driver._enter(0)
    stream = driver._stream(0)
    driver._call("cuMemcpyDtoDAsync_v2", *_pointers(address, memory.regions[1].address), REGION_BYTES, stream)
    assert np.array_equal(memory[0], before)
    driver._call("cuStreamSynchronize", stream)
    assert np.array_equal(memory[0], pattern(3)[1])


def _pointers(*addresses: int) -> list[object]:
    return [ctypes.c_uint64(address) for address in addresses]


def _block(producer: Producer, index: int) -> object:
    return pattern(producer.seed)[0, index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
