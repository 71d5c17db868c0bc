"""Every transport of ours passes the suite that foreign transports have to pass."""

import functools
from collections.abc import Callable

import pytest
import torch

from baton.core.config import ClusterSecret
from baton.core.ids import Address
from baton.testing.transport_producers import (
    HostDevice,
    MakeTransport,
    MemoryProducer,
    Place,
    ProcessProducer,
    make_cuda_ipc,
    make_cuda_ipc_on_host,
    make_local,
    make_nixl,
    make_tcp,
    new_address,
    place_on_cuda,
    place_on_host,
)
from baton.testing.transport_rig import Producer, TransportRig
from baton.testing.transport_suite import TransportSuite
from baton.transport.base import Transport
from baton.transport.cuda_ipc import CudaIpcTransport
from baton.transport.local import LocalTransport
from baton.transport.memory import MemoryNetwork, MemoryTransport
from baton.transport.nixl import NixlTransport
from baton.transport.nixl_agent import is_installed
from baton.transport.tcp import TcpTransport

SECRET = ClusterSecret(b"a secret for this test")


class MemoryRig(TransportRig):
    def __init__(self) -> None:
        self.network = MemoryNetwork()

    def reader(self, on_completion: Callable[[], None] | None = None) -> Transport:
        return MemoryTransport(new_address("reader"), self.network, on_completion=on_completion)

    def producer(self, seed: int) -> Producer:
        return MemoryProducer(self.network, seed)


class ProcessRig(TransportRig):
    def __init__(
        self, make: MakeTransport, make_reader: Callable[..., Transport], place: Place = place_on_host
    ) -> None:
        self._make = make
        self._make_reader = make_reader
        self.place = place  # type: ignore[method-assign]

    def reader(self, on_completion: Callable[[], None] | None = None) -> Transport:
        return self._make_reader(new_address("reader"), on_completion=on_completion)

    def producer(self, seed: int) -> Producer:
        return ProcessProducer(self._make, seed, self.place)


class TestMemory(TransportSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls) -> TransportRig:
        return MemoryRig()


@pytest.mark.processes
class TestLocal(TransportSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls) -> TransportRig:
        return ProcessRig(make_local, LocalTransport)


@pytest.mark.processes
class TestTcp(TransportSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls) -> TransportRig:
        def reader(address: Address, on_completion: Callable[[], None] | None) -> Transport:
            return TcpTransport(address, secret=SECRET, on_completion=on_completion)

        return ProcessRig(functools.partial(make_tcp, secret=SECRET), reader)


@pytest.mark.processes
@pytest.mark.skipif(not is_installed(), reason="nixl is not installed: pip install 'kv-baton[nixl]'")
class TestNixl(TransportSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls) -> TransportRig:
        return ProcessRig(make_nixl, NixlTransport)


@pytest.mark.processes
class TestCudaIpcOnHost(TransportSuite):
    """All of it except the driver, whose device is host memory here."""

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls) -> TransportRig:
        def reader(address: Address, on_completion: Callable[[], None] | None) -> Transport:
            return CudaIpcTransport(address, driver=HostDevice(), on_completion=on_completion)

        return ProcessRig(make_cuda_ipc_on_host, reader)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


@pytest.mark.gpu
@pytest.mark.processes
@needs_gpu
class TestCudaIpc(TransportSuite):
    """Two processes on one GPU."""

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls) -> TransportRig:
        return ProcessRig(make_cuda_ipc, CudaIpcTransport, place_on_cuda)


@pytest.mark.gpu
@pytest.mark.processes
@needs_gpu
@pytest.mark.skipif(not is_installed(), reason="nixl is not installed: pip install 'kv-baton[nixl]'")
class TestNixlOnCuda(TransportSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls) -> TransportRig:
        return ProcessRig(make_nixl, NixlTransport, place_on_cuda)
