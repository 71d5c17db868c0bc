"""Producers for the transport suite: real processes, and the in-process one of the memory transport."""

import functools
import itertools
import multiprocessing
import os
import struct
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import ForkServerContext
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from baton.core.config import ClusterSecret
from baton.core.errors import TransferError
from baton.core.ids import Address, EngineId, Epoch
from baton.core.layout import Region
from baton.core.sealed_memory import allocate_sealed
from baton.transport.base.interface import Transport
from baton.transport.base.iovec import IOV_MAX, iovec_array, read_process_memory
from baton.transport.base.spans import Copies, Int64s
from baton.transport.cuda_ipc.driver import HANDLE_BYTES, SharedMemory
from baton.transport.cuda_ipc.transport import CudaIpcTransport
from baton.transport.local.transport import LocalTransport
from baton.transport.memory import MemoryNetwork, MemoryTransport
from baton.transport.tcp.transport import TcpOptions, TcpTransport

REGION_BYTES = 4 << 20
NUM_REGIONS = 2
ANSWER_TIMEOUT_S = 120.0  # The first answer includes the imports of the fork server.

MakeTransport = Callable[[Address, int], Transport]
"""(address, port) -> transport; port 0 for a free one. Importable by name, for use in another process."""


class Memory(Protocol):
    """`[NUM_REGIONS, REGION_BYTES]` bytes that a transport can reach, accessed like a numpy array.

    numpy arrays are such memory; device memory is copied from and to the device.
    """

    def __getitem__(self, key: Any, /) -> NDArray[np.uint8]: ...
    def __setitem__(self, key: Any, value: Any, /) -> None: ...


class Placed(NamedTuple):
    memory: Memory
    regions: list[Region]


Place = Callable[[NDArray[np.uint8]], Placed]
"""Puts these bytes, `[NUM_REGIONS, REGION_BYTES]`, where a transport can reach them. Importable by name."""

_epochs = itertools.count(1)


def new_address(engine_id: str) -> Address:
    return Address(EngineId(engine_id), Epoch(2**63 + next(_epochs)))


@functools.cache
def _context() -> ForkServerContext:
    """Return a fork server that has imported everything: importing NIXL takes a second or two."""
    context = multiprocessing.get_context("forkserver")
    # Modules that are not installed are skipped.
    context.set_forkserver_preload([__name__, "nixl._bindings"])
    return context


@functools.cache
def pattern(seed: int) -> NDArray[np.uint8]:
    """Return `[NUM_REGIONS, REGION_BYTES]` bytes, the same in every process. Read-only."""
    shape = (NUM_REGIONS, REGION_BYTES)
    memory = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    memory.flags.writeable = False
    return memory


def regions_of(memory: NDArray[np.uint8]) -> list[Region]:
    return [Region(row.ctypes.data, row.nbytes) for row in memory]


def place_on_host(content: NDArray[np.uint8]) -> Placed:
    memory = content.copy()
    return Placed(memory, regions_of(memory))


def place_in_sealed_memory(content: NDArray[np.uint8]) -> Placed:
    """Place the content where `local` can map it, as the embedded engine's cache."""
    memory = np.frombuffer(allocate_sealed(content.nbytes, "baton-test"), dtype=np.uint8)
    memory = memory.reshape(content.shape)
    memory[:] = content
    return Placed(memory, regions_of(memory))


def place_on_cuda(content: NDArray[np.uint8]) -> Placed:
    memory = TorchMemory(content, "cuda:0")
    return Placed(memory, memory.regions)


def make_local(address: Address, port: int) -> Transport:
    return LocalTransport(address)


def make_cuda_ipc_on_host(address: Address, port: int) -> Transport:
    return CudaIpcTransport(address, driver=HostDevice())


def make_cuda_ipc(address: Address, port: int) -> Transport:
    return CudaIpcTransport(address)


def make_nixl(address: Address, port: int) -> Transport:
    from baton.transport.nixl.transport import NixlTransport  # Needs an optional package.

    return NixlTransport(address)


def make_tcp(address: Address, port: int, secret: ClusterSecret | None = None) -> Transport:
    return TcpTransport(address, TcpOptions(port=port), secret=secret)


class TorchMemory:
    """Memory in one tensor on a device; every access copies all of it."""

    def __init__(self, content: NDArray[np.uint8], device: str) -> None:
        import torch  # Most producers do not need torch, and start faster without it.

        self._to_tensor = torch.from_numpy
        self._rows = torch.from_numpy(content.copy()).to(device)
        self.regions = [Region(row.data_ptr(), row.nbytes, str(row.device)) for row in self._rows]

    def __getitem__(self, key: Any) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = self._rows.cpu().numpy()[key]
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        content = self._rows.cpu().numpy().copy()
        content[key] = value
        self._rows.copy_(self._to_tensor(content))  # Copies from pageable memory, and therefore synchronizes.


class HostDevice:
    """CUDA driver whose only device is host memory, to test `cuda_ipc` without a GPU.

    Its handles name a process and an address. An opened handle gets another address than in the owner's
    process, as on a device, so that untranslated addresses are noticed.
    """

    _SHIFT = 1 << 50  # The n-th opened allocation is n times this far up.

    def __init__(self) -> None:
        # Per address here: pid, and the shift from the address there.
        self._opened: dict[int, tuple[int, int]] = {}

    def device_of(self, region: Region) -> int:
        if region.device != "cpu":
            raise TransferError(f"there is no device {region.device!r}; the only one is 'cpu'")
        return 0

    def uuid_of(self, device: int) -> bytes:
        return b"the host's memory"

    def share(self, region: Region) -> SharedMemory:
        before = min(64, region.address)  # The allocation begins a little before the region.
        named = (os.getpid(), region.address - before)
        return SharedMemory(struct.pack("<QQ", *named).ljust(HANDLE_BYTES, b"\0"), before)

    def open(self, handle: bytes, device: int) -> int:
        pid, address = (int(number) for number in struct.unpack_from("<QQ", handle))
        shift = self._SHIFT * (max((here // self._SHIFT for here in self._opened), default=0) + 1)
        self._opened[shift + address] = (pid, shift)
        return shift + address

    def close(self, address: int) -> None:
        del self._opened[address]

    def copy(self, copies: Copies, device: int) -> None:
        for batch in copies.batches(count_max=IOV_MAX, bytes_max=64 << 20):
            opened_as = batch.remote // self._SHIFT * self._SHIFT
            for pid, shift in list(self._opened.values()):
                these = opened_as == shift
                if these.any():
                    _read(pid, batch.local[these], batch.remote[these] - shift, batch.nbytes[these])


class ProcessProducer:
    """A process that holds memory and executes its parent's commands."""

    def __init__(self, make: MakeTransport, seed: int, place: Place = place_on_host) -> None:
        self.seed = seed
        self.address = new_address("producer")
        self._pipe, theirs = _context().Pipe()
        self.process = _context().Process(
            target=_hold_memory, args=(theirs, make, place, seed, self.address), daemon=True
        )
        self.process.start()
        theirs.close()
        self.endpoint = self._answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(ANSWER_TIMEOUT_S)

    def replace(self) -> None:
        self.address = new_address(self.address.engine_id)
        self.endpoint = self.ask(("replace", self.address))

    def withdraw(self) -> None:
        self.ask(("withdraw", None))

    def ask(self, command: tuple[str, object]) -> bytes:
        self._pipe.send(command)
        return self._answer()

    def close(self) -> None:
        self.kill()
        self._pipe.close()
        self.process.close()

    def _answer(self) -> bytes:
        assert self._pipe.poll(ANSWER_TIMEOUT_S), "the producer process does not answer"
        answer = self._pipe.recv()
        assert isinstance(answer, bytes)
        return answer


def _read(pid: int, local: Int64s, remote: Int64s, nbytes: Int64s) -> None:
    try:
        count = read_process_memory(pid, iovec_array(local, nbytes), iovec_array(remote, nbytes))
    except OSError as error:
        raise TransferError(f"process {pid}: {error}") from error
    if count != int(nbytes.sum()):
        raise TransferError("a short copy")


def _hold_memory(pipe: Pipe, make: MakeTransport, place: Place, seed: int, address: Address) -> None:
    memory, regions = place(pattern(seed))
    transport = make(address, 0)
    pipe.send(transport.register(regions))
    while True:
        match pipe.recv():
            case ("withdraw", _):
                transport.close()
                pipe.send(b"")
            case ("replace", successor):
                # The successor has the predecessor's addresses with other content: the worst case.
                transport.close()
                memory[:] = memory[:] ^ 0xFF
                transport = make(successor, getattr(transport, "port", 0))
                pipe.send(transport.register(regions))
            case command:
                raise AssertionError(f"unknown command {command}")


class MemoryProducer:
    """A producer in this process; ends when the network kills its address."""

    def __init__(self, network: MemoryNetwork, seed: int) -> None:
        self.seed = seed
        self._network = network
        self._memory = pattern(seed).copy()
        self._enter()

    def kill(self) -> None:
        self._network.kill(self.address)

    def replace(self) -> None:
        self.kill()
        self._memory ^= 0xFF
        self._enter()

    def withdraw(self) -> None:
        self._transport.close()

    def close(self) -> None:
        self._transport.close()

    def _enter(self) -> None:
        self.address = new_address("producer")
        self._transport = MemoryTransport(self.address, self._network)
        self.endpoint = self._transport.register(regions_of(self._memory))
