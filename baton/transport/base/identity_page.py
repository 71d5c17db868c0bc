"""Identity page: a few bytes in an owner's memory that identify its incarnation. Readers compare them.

    |== epoch (8) ==|== generation (8) ==|== nonce (32) ==|
    |<---------- epoch page ------------>|

What was read *before* a correct page counts. The owner of this page then still held the blocks: it voids its
page before it frees any memory, a void page stays void, and no successor has the same nonce.
"""

import ctypes
import errno
import mmap
import secrets
from typing import Any

import numpy as np

from baton.core.errors import PeerError, TransferError
from baton.core.ids import Address
from baton.core.layout import Region
from baton.core.sealed_memory import allocate_sealed
from baton.transport.base.decoding import Endpoint
from baton.transport.base.host_identity import HostProcess, this_process
from baton.transport.base.iovec import Scratch, iovec_array, read_process_memory
from baton.transport.base.spans import check_regions

PAGE_BYTES = 16
NONCE_BYTES = 32
IDENTITY_BYTES = PAGE_BYTES + NONCE_BYTES

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_libc = ctypes.CDLL(None)


class HostEndpoint(Endpoint, frozen=True, forbid_unknown_fields=True):
    """Names the owner's process, and what its identity page holds."""

    process: HostProcess
    identity_address: int
    generation: int
    nonce: bytes

    @property
    def identity(self) -> bytes:
        return identity_bytes(self.epoch, self.generation, self.nonce)

    def check_sizes(self, name: str) -> None:
        """Raises PeerError for fields that no owner can have made."""
        numbers = (self.epoch, self.generation)
        if len(self.nonce) != NONCE_BYTES or not all(0 <= number < 2**64 for number in numbers):
            raise PeerError(
                f"malformed {name} endpoint of {self.engine_id}: nonce, epoch or generation of the wrong size"
            )
        check_regions([Region(self.identity_address, IDENTITY_BYTES)])

    def prove(self) -> None:
        """Raises TransferError if the owner is on another host, or its memory cannot be read; PeerError if
        the page is not there, so that the process is not the owner."""
        prove_identity(self.process.pid, self.identity_address, self.identity, engine_id=self.engine_id)


class IdentityPage:
    """The owner's page, in memory that readers can map where the system has it."""

    def __init__(self, epoch: int) -> None:
        self.generation = secrets.randbits(64)  # Differs between ranks and restarts of one epoch.
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            self._memory = allocate_sealed(mmap.PAGESIZE, "baton-identity")
        except OSError:
            self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._memory[:IDENTITY_BYTES] = identity_bytes(epoch, self.generation, self.nonce)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def fields_of(self, address: Address) -> dict[str, Any]:
        """Fields of the owner's HostEndpoint."""
        return {
            "engine_id": address.engine_id,
            "epoch": address.epoch,
            "process": this_process(),
            "identity_address": self.address,
            "generation": self.generation,
            "nonce": self.nonce,
        }

    @property
    def region(self) -> Region:
        return Region(self.address, IDENTITY_BYTES)

    def void(self) -> None:
        """Invalidates all later reads. Call it before any memory is freed. Idempotent."""
        if not self._memory.closed:
            self._memory[:IDENTITY_BYTES] = bytes(IDENTITY_BYTES)

    def close(self) -> None:
        """Frees it. Reads of a freed page fail, and mappings of it stay void."""
        self.void()
        self._memory.close()


def epoch_page(epoch: int, generation: int) -> bytes:
    return epoch.to_bytes(8, "little") + generation.to_bytes(8, "little")


def identity_bytes(epoch: int, generation: int, nonce: bytes) -> bytes:
    return epoch_page(epoch, generation) + nonce


def let_peers_read() -> None:
    """Allows any process of the same user to read this one under Yama's mode 1, as without Yama.

    A kernel without Yama returns EINVAL, which is fine.
    """
    _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def prove_identity(pid: int, address: int, expected: bytes, *, engine_id: str) -> None:
    """Reads the page out of a process of this host. Raises TransferError if the kernel forbids it, PeerError
    if the page is not there, so that the process is not `engine_id`."""
    found = Scratch.of(len(expected))
    nbytes = np.array([len(expected)], dtype=np.int64)
    try:
        read_process_memory(
            pid,
            iovec_array(np.array([found.address], dtype=np.int64), nbytes),
            iovec_array(np.array([address], dtype=np.int64), nbytes),
        )
    except OSError as error:
        raise TransferError(explain(error, pid)) from error
    if not secrets.compare_digest(found.read(), expected):
        raise PeerError(f"process {pid} is not {engine_id}: its memory does not hold the nonce")


def explain(error: OSError, pid: int) -> str:
    """Why process_vm_readv failed, and what to do about it."""
    match error.errno:
        case errno.ESRCH:
            return f"process {pid} has ended"
        case errno.EPERM | errno.EACCES:
            return (
                f"the kernel forbids reading the memory of process {pid}: run both engines as one user and "
                "set kernel.yama.ptrace_scope to 0 or 1, or grant CAP_SYS_PTRACE; in a container, allow "
                "process_vm_readv in the seccomp profile"
            )
        case errno.ENOSYS:
            return "this kernel has no process_vm_readv, or seccomp hides it"
        case _:
            return f"cannot read the memory of process {pid}: {error.strerror}"
