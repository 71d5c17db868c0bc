"""One NIXL agent with its UCX backend, as narrow as we need it. NIXL's exceptions end here.

What NIXL 1.5.1 was found to do (tests/transport/test_nixl.py holds what can be held by a test), and what
follows for whoever reads with it:

* *Cancelling does not cancel.* `releaseXferReq` of a running read, `invalidateRemoteMD` of its peer and
  `deregisterMem` of its target all answer SUCCESS at once; the bytes may land afterwards: 66.8 of 67.1 MB,
  in a read from a stopped process that went on later. Only the agent's end stops them (the UCX worker is
  destroyed with it; nothing landed, after 7 ms). So an agent is made per peer, which costs 20 ms, 10 file
  descriptors and no thread, and *severing a peer is destroying its agent*.
* *A failed read is not over.* The first error is reported while other pieces of the same request still
  run. So an agent that reported an error is destroyed before anybody hears of it.
* *An emulated read endangers its owner.* Where there is neither RDMA nor cross-memory attach, UCX has the
  owner's process answer over tcp, and a reader that dies at the wrong moment takes the owner with it
  (SIGSEGV, or "Fatal: unexpected error: Endpoint timeout"; openucx/ucx#7274). See `nixl.py`.
* The progress thread polls without a pause in the Python API (`pthrDelay` 0 becomes poll(0)): a whole core,
  or the engine's half. With a delay it sleeps in poll(2) until UCX wakes it.
"""

import contextlib
import functools
import importlib.util
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NewType

import numpy as np
from numpy.typing import NDArray

from baton.core.errors import ConfigError, TransferError
from baton.core.layout import Region
from baton.transport.threads import free_affinity

PROGRESS_DELAY_US = 100_000  # Between looks for a wake-up that UCX missed; everything else wakes the thread.

DescriptorList = NewType("DescriptorList", int)
Request = NewType("Request", int)
Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Strided:
    """`count` pieces of memory of one size, `stride` bytes apart."""

    address: int
    nbytes: int
    stride: int
    count: int
    device: int


def is_installed() -> bool:
    """Whether NIXL is installed and loads. A build for another version of CUDA does not load."""
    if importlib.util.find_spec("nixl") is None:
        return False
    try:
        bindings()
    except ConfigError:
        return False
    return True


@functools.cache
def bindings() -> Any:
    """NIXL's own module. Raises ConfigError where it is not installed or does not load."""
    raise_exceptions = logging.raiseExceptions
    try:
        from nixl import _bindings
    except ImportError as error:
        raise ConfigError(
            f"nixl cannot be loaded ({error}); install it with: pip install 'kv-baton[nixl]'",
            field="transports",
        ) from error
    finally:
        logging.raiseExceptions = raise_exceptions  # NIXL's import turns it off for the whole process.
    return _bindings


class NixlAgent:
    """Not thread-safe: whoever has it takes turns. Raises TransferError for whatever NIXL reports."""

    def __init__(self, name: str, *, has_progress_thread: bool, cpus: Collection[int] | None = None) -> None:
        self._nixl = bindings()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = has_progress_thread
        config.useListenThread = False
        config.listenPort = 0
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = PROGRESS_DELAY_US
        config.lthrDelay = PROGRESS_DELAY_US
        config.captureTelemetry = True
        # The threads that NIXL and UCX start inherit where this one may run.
        with _mended(), _inherited_affinity(cpus):
            self._agent = self._nixl.nixlAgent(name, config)
            self._backends = [self._agent.createBackend("UCX", {})]
        self._lists: list[DescriptorList] = []
        self._requests: set[Request] = set()
        self.is_destroyed = False

    def register(self, regions: Sequence[Region]) -> None:
        with _mended():
            for kind in {memory_kind(region)[0] for region in regions}:
                rows = [
                    (region.address, region.nbytes, memory_kind(region)[1], "")
                    for region in regions
                    if memory_kind(region)[0] == kind
                ]
                self._agent.registerMem(self._nixl.nixlRegDList(self._kind(kind), rows), self._backends)

    def metadata(self) -> bytes:
        with _mended():
            return bytes(self._agent.getLocalMD())

    def load(self, metadata: bytes) -> str:
        """The name of the agent that it describes, which can be read from afterwards."""
        with _mended():
            name = self._agent.loadRemoteMD(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def prepare(self, agent: str | None, kind: str, pieces: Sequence[Strided]) -> DescriptorList:
        """One list of all pieces, numbered in order. None: our own memory. `kind`: see `memory_kind`."""
        assert not self.is_destroyed
        rows = [(p.address, p.nbytes, p.device, p.stride, p.count) for p in pieces]
        with _mended():
            prepared = DescriptorList(
                self._agent.prepXferDlist(
                    self._nixl.NIXL_INIT_AGENT if agent is None else agent,
                    self._kind(kind),
                    np.array(rows, dtype=np.uint64),
                    self._backends,
                )
            )
        self._lists.append(prepared)
        return prepared

    def post_read(
        self, local: DescriptorList, local_pieces: Int32s, remote: DescriptorList, remote_pieces: Int32s
    ) -> Request:
        """Where the reader copies by itself (cross-memory attach), all of it happens in here."""
        with _mended():
            request = Request(
                self._agent.makeXferReq(
                    self._nixl.NIXL_READ, local, local_pieces, remote, remote_pieces, b"", self._backends
                )
            )
            self._requests.add(request)
            self._agent.postXferReq(request, b"")
        return request

    def is_done(self, request: Request) -> bool:
        """Makes progress, too. After an error the agent has to be destroyed: see above."""
        with _mended():
            status = self._agent.getXferStatus(request)
        if status == self._nixl.NIXL_IN_PROG:
            return False
        if status != self._nixl.NIXL_SUCCESS:
            raise TransferError(f"NIXL: {status}")
        return True

    def release(self, request: Request) -> tuple[int, float]:
        """Of a request that is done. Returns how many pieces NIXL made of it, and how long they took in s."""
        with _mended():
            telemetry = self._agent.getXferTelemetry(request)
            self._agent.releaseXferReq(request)
        self._requests.discard(request)
        return int(telemetry.descCount), telemetry.xferDuration / 1e6

    def destroy(self) -> None:
        """When this returns, nothing writes into registered memory for this agent. Idempotent."""
        if self.is_destroyed:
            return
        self.is_destroyed = True
        for request in self._requests:
            with contextlib.suppress(TransferError), _mended():
                self._agent.releaseXferReq(request)
        for prepared in self._lists:
            with contextlib.suppress(TransferError), _mended():
                self._agent.releasedDlistH(prepared)
        del self._agent

    def _kind(self, kind: str) -> Any:
        return self._nixl.DRAM_SEG if kind == "cpu" else self._nixl.VRAM_SEG


def memory_kind(region: Region) -> tuple[str, int]:
    """("cpu", 0) or ("cuda", index)."""
    kind, _, index = region.device.partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdecimal():
        raise TransferError(f"NIXL is used for memory of cpu and cuda devices, not of {region.device!r}")
    return kind, int(index or 0)


@functools.cache
def _nixl_errors() -> tuple[type[Exception], ...]:
    nixl = bindings()
    return tuple(getattr(nixl, name) for name in dir(nixl) if name.endswith("Error"))


@contextlib.contextmanager
def _mended() -> Iterator[None]:
    try:
        yield
    except _nixl_errors() as error:
        raise TransferError(f"NIXL: {error}") from error


@contextlib.contextmanager
def _inherited_affinity(cpus: Collection[int] | None) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    free_affinity(cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
