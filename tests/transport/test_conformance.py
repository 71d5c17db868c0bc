"""Every transport of ours passes the suite that foreign transports have to pass."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.core.config import ClusterSecret
from baton.core.ids import Address
from baton.testing import transport_producers as producers
from baton.testing.transport_rig import Producer, TransportRig
from baton.testing.transport_suite import TransportSuite
from baton.transport.base import gather
from baton.transport.base.interface import Transport
from baton.transport.cuda_ipc.transport import CudaIpcTransport
from baton.transport.local.transport import LocalPeer, LocalTransport
from baton.transport.memory import MemoryNetwork, MemoryTransport
from baton.transport.nixl.agent import is_installed
from baton.transport.nixl.transport import NixlTransport
from baton.transport.tcp.reader import TcpPeer
from baton.transport.tcp.transport import TcpTransport
from tests.transport.copy_library import built
from tests.transport.fake_cuda import COMPILER

SECRET = ClusterSecret(b"a secret for this test")
NO_LIBRARY = Path("not-built")


class MemoryRig(TransportRig):
    def __init__(self) -> None:
        self.network = MemoryNetwork()

    def reader(self, on_completion: Callable[[], None] | None = None) -> Transport:
        return MemoryTransport(producers.new_address("reader"), self.network, on_completion=on_completion)

    def producer(self, seed: int) -> Producer:
        return producers.MemoryProducer(self.network, seed)


class ProcessRig(TransportRig):
    def __init__(
        self,
        make: producers.MakeTransport,
        make_reader: Callable[..., Transport],
        place: producers.Place = producers.place_on_host,
    ) -> None:
        self._make = make
        self._make_reader = make_reader
        self.place = place  # type: ignore[method-assign]

    def reader(self, on_completion: Callable[[], None] | None = None) -> Transport:
        return self._make_reader(producers.new_address("reader"), on_completion=on_completion)

    def producer(self, seed: int) -> Producer:
        return producers.ProcessProducer(self._make, seed, self.place)


class MappedReader(LocalTransport):
    def connect(self, address: Address, endpoint: bytes) -> LocalPeer:
        peer = super().connect(address, endpoint)
        assert peer.way == "mapped"
        return peer


class MappedRig(TransportRig):
    def reader(self, on_completion: Callable[[], None] | None = None) -> Transport:
        address = producers.new_address("reader")
        return MappedReader(address, library=built(), on_completion=on_completion)

    def producer(self, seed: int) -> Producer:
        return producers.ProcessProducer(producers.make_local, seed, producers.place_in_sealed_memory)


def suite(rig: Callable[[], TransportRig], *marks: pytest.MarkDecorator) -> type[TransportSuite]:
    class Suite(TransportSuite):
        @pytest.fixture(scope="class")
        @classmethod
        def rig(cls) -> TransportRig:
            return rig()

    for mark in marks:
        mark(Suite)
    return Suite


def tcp_reader(address: Address, on_completion: Callable[[], None] | None) -> Transport:
    return TcpTransport(address, secret=SECRET, on_completion=on_completion)


class PythonTcpReader(TcpTransport):
    """A reader without the copy library, which a connection looks for when it is made."""

    def connect(self, address: Address, endpoint: bytes) -> TcpPeer:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gather, "LIBRARY", NO_LIBRARY)
            return super().connect(address, endpoint)


def python_tcp_reader(address: Address, on_completion: Callable[[], None] | None) -> Transport:
    return PythonTcpReader(address, secret=SECRET, on_completion=on_completion)


def make_python_tcp(address: Address, port: int) -> Transport:
    """Makes a transport without the copy library, in the producer's process."""
    gather.LIBRARY = NO_LIBRARY
    return producers.make_tcp(address, port, SECRET)


def reader_on_host(address: Address, on_completion: Callable[[], None] | None) -> Transport:
    return CudaIpcTransport(address, driver=producers.HostDevice(), on_completion=on_completion)


processes, gpu = pytest.mark.processes, pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
needs_nixl = pytest.mark.skipif(
    not is_installed(), reason="nixl is not installed: pip install 'kv-baton[nixl]'"
)
needs_no_compiler = pytest.mark.skipif(COMPILER is not None, reason="test_cuda_driver runs the real driver")
make_tcp = functools.partial(producers.make_tcp, secret=SECRET)
place_on_cuda = producers.place_on_cuda

TestMemory = suite(MemoryRig)
TestLocal = suite(lambda: ProcessRig(producers.make_local, LocalTransport), processes)  # Cross-memory attach.
TestLocalMapped = suite(MappedRig, processes)
TestTcp = suite(lambda: ProcessRig(make_tcp, tcp_reader), processes)
TestTcpInPython = suite(lambda: ProcessRig(make_python_tcp, python_tcp_reader), processes)
TestNixl = suite(lambda: ProcessRig(producers.make_nixl, NixlTransport), processes, needs_nixl)
# Host memory replaces the device where test_cuda_driver cannot build its library for the real driver.
TestCudaIpcOnHost = suite(
    lambda: ProcessRig(producers.make_cuda_ipc_on_host, reader_on_host), processes, needs_no_compiler
)
# Two processes on one GPU.
TestCudaIpc = suite(
    lambda: ProcessRig(producers.make_cuda_ipc, CudaIpcTransport, place_on_cuda), gpu, processes, needs_gpu
)
TestNixlOnCuda = suite(
    lambda: ProcessRig(producers.make_nixl, NixlTransport, place_on_cuda),
    gpu,
    processes,
    needs_gpu,
    needs_nixl,
)
