"""One NIXL agent with its UCX backend, with the few calls that we need. It maps NIXL's exceptions to ours.

Behaviour found in NIXL 1.5.1 (tests/transport/test_nixl.py tests what can be tested), and its consequences:

* *Cancelling does not cancel.* `releaseXferReq` of a running read, `invalidateRemoteMD` of its peer and
  `deregisterMem` of its target all return SUCCESS at once, but the bytes may arrive afterwards: 66.8 of
  67.1 MB, in a read from a stopped process that resumed later. Only destroying the agent stops them (it
  destroys the UCX worker; nothing arrived later, after 7 ms). Therefore each peer has its own agent, which
  costs 20 ms, 10 file descriptors and no thread, and *severing a peer means destroying its agent*.
* *A failed read may still run.* The first error is reported while other parts of the same request are still
  running. Therefore an agent that reported an error is destroyed before the error is passed on.
* *An emulated read endangers its owner.* With neither RDMA nor cross-memory attach, UCX lets the owner's
  process answer over tcp, and a reader that dies at the wrong moment kills the owner (SIGSEGV, or "Fatal:
  unexpected error: Endpoint timeout"; openucx/ucx#7274). See `nixl.py`.
* *A dead peer endangers the reader.* UCX aborts the process (`ucs_arbiter_group_is_empty`) if an agent is
  destroyed while operations are queued on an endpoint that has failed: about 1 of 100 peers killed on a busy
  machine. UCX ends such operations when it makes progress, which `getNotifs` does until nothing is left.
* The progress thread polls without a pause in the Python API (`pthrDelay` 0 becomes poll(0)): it takes a
  whole core, or half of the engine's. With a delay it sleeps in poll(2) until UCX wakes it.
"""

import contextlib
import functools
import importlib.util
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NewType

import numpy as np
from numpy.typing import NDArray

from baton.core.errors import ConfigError, TransferError
from baton.core.layout import Region
from baton.transport.base.threads import free_affinity

PROGRESS_DELAY_US = 100_000  # Polling interval in case UCX misses a wake-up.

DescriptorList = NewType("DescriptorList", int)
Request = NewType("Request", int)
Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Strided:
    """`count` blocks of memory of one size, `stride` bytes apart."""

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
    """NIXL's own module. Raises ConfigError if it is not installed or does not load."""
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
    """Not thread-safe. Raises TransferError for every error that NIXL reports."""

    def __init__(self, name: str, *, has_progress_thread: bool) -> None:
        self._nixl = bindings()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = has_progress_thread
        config.useListenThread = False
        config.listenPort = 0
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = PROGRESS_DELAY_US
        config.lthrDelay = PROGRESS_DELAY_US
        config.captureTelemetry = True
        # Threads started by NIXL and UCX inherit this thread's CPU affinity.
        with _nixl_errors_mapped(), _inherited_affinity():
            self._agent = self._nixl.nixlAgent(name, config)
            self._backends = [self._agent.createBackend("UCX", {})]
        self._lists: list[DescriptorList] = []
        self._requests: set[Request] = set()
        self.is_destroyed = False

    def register(self, regions: Sequence[Region]) -> None:
        with _nixl_errors_mapped():
            for kind in {memory_kind(region)[0] for region in regions}:
                rows = [
                    (region.address, region.nbytes, memory_kind(region)[1], "")
                    for region in regions
                    if memory_kind(region)[0] == kind
                ]
                self._agent.registerMem(self._nixl.nixlRegDList(self._kind(kind), rows), self._backends)

    def metadata(self) -> bytes:
        with _nixl_errors_mapped():
            return bytes(self._agent.getLocalMD())

    def load(self, metadata: bytes) -> str:
        """Name of the agent that `metadata` describes, which can be read from afterwards."""
        with _nixl_errors_mapped():
            name = self._agent.loadRemoteMD(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def prepare(self, agent: str | None, kind: str, pieces: Sequence[Strided]) -> DescriptorList:
        """One list of all blocks, numbered in order. `agent` None: our own memory. See `memory_kind`."""
        assert not self.is_destroyed
        rows = [(p.address, p.nbytes, p.device, p.stride, p.count) for p in pieces]
        with _nixl_errors_mapped():
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
        """Posts a read. With cross-memory attach the whole copy happens inside this call."""
        with _nixl_errors_mapped():
            request = Request(
                self._agent.makeXferReq(
                    self._nixl.NIXL_READ, local, local_pieces, remote, remote_pieces, b"", self._backends
                )
            )
            self._requests.add(request)
            self._agent.postXferReq(request, b"")
        return request

    def is_done(self, request: Request) -> bool:
        """Also makes progress. After an error the agent must be destroyed: see the module docstring."""
        with _nixl_errors_mapped():
            status = self._agent.getXferStatus(request)
        if status == self._nixl.NIXL_IN_PROG:
            return False
        if status != self._nixl.NIXL_SUCCESS:
            raise TransferError(f"NIXL: {status}")
        return True

    def release(self, request: Request) -> tuple[int, float]:
        """Frees a request that is done. Returns NIXL's number of descriptors and its duration in s."""
        with _nixl_errors_mapped():
            telemetry = self._agent.getXferTelemetry(request)
            self._agent.releaseXferReq(request)
        self._requests.discard(request)
        return int(telemetry.descCount), telemetry.xferDuration / 1e6

    def destroy(self) -> None:
        """When this returns, this agent writes no more into registered memory. Idempotent."""
        if self.is_destroyed:
            return
        self.is_destroyed = True
        with contextlib.suppress(TransferError), _nixl_errors_mapped():
            self._agent.getNotifs({})
        for request in self._requests:
            with contextlib.suppress(TransferError), _nixl_errors_mapped():
                self._agent.releaseXferReq(request)
        for prepared in self._lists:
            with contextlib.suppress(TransferError), _nixl_errors_mapped():
                self._agent.releasedDlistH(prepared)
        del self._agent

    def _kind(self, kind: str) -> Any:
        return self._nixl.DRAM_SEG if kind == "cpu" else self._nixl.VRAM_SEG


def memory_kind(region: Region) -> tuple[str, int]:
    """("cpu", 0) or ("cuda", index)."""
    kind, _, index = region.device.partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdecimal():
        raise TransferError(f"NIXL supports memory of cpu and cuda devices, not {region.device!r}")
    return kind, int(index or 0)


@functools.cache
def _nixl_errors() -> tuple[type[Exception], ...]:
    nixl = bindings()
    return tuple(getattr(nixl, name) for name in dir(nixl) if name.endswith("Error"))


@contextlib.contextmanager
def _nixl_errors_mapped() -> Iterator[None]:
    try:
        yield
    except _nixl_errors() as error:
        raise TransferError(f"NIXL: {error}") from error


@contextlib.contextmanager
def _inherited_affinity() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    free_affinity()
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
