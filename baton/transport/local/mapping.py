"""Mapping of an owner's registered memory into a reader's process, read-only.

    owner    register: announces which of its memory is in sealed files, each as (descriptor, inode, offset)
    reader   connect:  opens /proc/PID/fd/N for reading, checks inode, kind, seals and size, maps
             later:    populates, step by step

The seals (`baton.core.sealed_memory`) hold for the life of the file. All its pages are allocated, and it can
neither shrink nor get holes, so no later act of the owner can make an access fail. The reader cannot write,
because it has only a read-only descriptor.

A mapping outlives its owner. What was copied counts only if, after the copy, the identity page is right and
the owner's pidfd reports a living process.
"""

import ctypes
import mmap
import os
import select
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from baton.core.errors import PeerError, TransferError
from baton.core.layout import Region
from baton.core.sealed_memory import SEALS, seals_of
from baton.transport.base.host_identity import require_same_host, this_process
from baton.transport.base.identity_page import IDENTITY_BYTES, HostEndpoint
from baton.transport.base.spans import ADDRESS_MAX, check_regions

_MEMFD = "/memfd:"  # How the kernel names such files in /proc/PID/maps.
_MADV_POPULATE_READ = 22  # Linux 5.14. Not in Python's `mmap`.
_MAP_FAILED = ctypes.c_void_p(-1).value
_STAT_BLOCK_BYTES = 512
_POPULATE_STEP_BYTES = 16 << 20  # About 1 ms.

# Call libc through ctypes, because Python's `mmap` holds the interpreter's lock while it unmaps gigabytes.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class SharedMapping(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the owner's address space that is a mapping of a sealed file."""

    address: int
    nbytes: int
    fd: int  # File descriptor in the owner's process.
    inode: int
    offset: int  # Offset of the mapping in the file.

    def covers(self, region: Region) -> bool:
        return self.address <= region.address and region.address + region.nbytes <= self.address + self.nbytes


def find_shared(regions: Sequence[Region]) -> tuple[SharedMapping, ...]:
    """The sealed mappings of this process that hold at least one of these regions."""
    try:
        mappings = _sealed_mappings()
    except OSError:
        return ()
    return tuple(m for m in mappings if any(m.covers(region) for region in regions))


def _sealed_mappings() -> list[SharedMapping]:
    """proc_pid_maps(5): "start-end perms offset dev inode path"."""
    found = []
    fds: dict[int, int] | None = None
    for line in Path("/proc/self/maps").read_bytes().split(b"\n"):
        fields = os.fsdecode(line).split(maxsplit=5)  # A path may have any bytes.
        if len(fields) < 6 or not fields[5].startswith(_MEMFD) or not fields[1].endswith("s"):
            continue
        if fds is None:
            fds = _sealed_fds()
        if (fd := fds.get(inode := int(fields[4]))) is not None:
            start, end = (int(number, 16) for number in fields[0].split("-"))
            found.append(SharedMapping(start, end - start, fd, inode, int(fields[2], 16)))
    return found


def _sealed_fds() -> dict[int, int]:
    """Descriptors of this process by the inode of their sealed file."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if (
                os.readlink(f"/proc/self/fd/{name}").startswith(_MEMFD)
                and seals_of(int(name)) & SEALS == SEALS
            ):
                found[os.fstat(int(name)).st_ino] = int(name)
        except OSError:
            continue  # Closed meanwhile, or of a kind without seals.
    return found


def check_shared(mappings: Sequence[SharedMapping]) -> None:
    """Raises PeerError for mappings that no process can have."""
    check_regions([Region(m.address, m.nbytes) for m in mappings])
    for m in mappings:
        pages = (m.address | m.nbytes | m.offset) % mmap.PAGESIZE == 0
        if not pages or not 0 <= m.offset < ADDRESS_MAX or not 0 <= m.fd < 2**31 or m.inode <= 0:
            raise PeerError(f"malformed local endpoint: {m} is not a mapping")


@dataclass(eq=False)
class MappedOwner:
    """An owner's memory in this process. `close` it when no thread reads it any more."""

    endpoint: HostEndpoint
    pidfd: int
    mapped: dict[SharedMapping, int]  # Addresses of the mappings in this process.
    _populated: dict[SharedMapping, int] = field(default_factory=dict)  # Bytes from each mapping's start.

    def here(self, region: Region) -> Region:
        """The owner's region by its address in this process. Without any bytes if it is not mapped, because
        its file is not allocated: no span fits into it."""
        for mapping, address in self.mapped.items():
            if mapping.covers(region):
                return Region(address + region.address - mapping.address, region.nbytes)
        return Region(0, 0)

    @property
    def identity(self) -> bytes:
        page = self.here(Region(self.endpoint.identity_address, IDENTITY_BYTES))
        if page.nbytes == 0:
            return b""
        return ctypes.string_at(page.address, page.nbytes)

    def reason_lost(self) -> str | None:
        """Why what was copied until now does not count; None if it does."""
        if self.identity != self.endpoint.identity:
            return f"{self.endpoint.engine_id} has withdrawn its memory"
        if has_ended(self.pidfd):
            return f"process {self.endpoint.process.pid} has ended"
        return None

    def populate_step(self) -> bool:
        """Enters some pages into this process's page table. Returns whether pages are left.

        Others are entered when they are first read, which makes that read slower.
        """
        for mapping, address in self.mapped.items():
            done = self._populated.get(mapping, 0)
            if step := min(_POPULATE_STEP_BYTES, mapping.nbytes - done):
                is_refused = _libc.madvise(address + done, step, _MADV_POPULATE_READ) != 0  # An older kernel.
                self._populated[mapping] = mapping.nbytes if is_refused else done + step
                return True
        return False

    def close(self) -> None:
        """Unmaps. Idempotent."""
        while self.mapped:
            mapping, address = self.mapped.popitem()
            _libc.munmap(address, mapping.nbytes)
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def open_owner(
    endpoint: HostEndpoint, regions: Sequence[Region], shared: Sequence[SharedMapping]
) -> MappedOwner:
    """Maps everything that holds `regions` and the identity page.

    Raises TransferError with the reason why the memory cannot be mapped, PeerError if the process is not the
    owner.
    """
    needed: dict[SharedMapping, None] = {}
    for number, region in enumerate((*regions, Region(endpoint.identity_address, IDENTITY_BYTES))):
        holder = next((m for m in shared if m.covers(region)), None)
        if holder is None:
            what = f"region {number}" if number < len(regions) else "its identity page"
            raise TransferError(f"{what} of {endpoint.engine_id} is not in sealed shared memory")
        needed[holder] = None
    try:
        pidfd = os.pidfd_open(endpoint.process.pid)
    except OSError as error:
        raise TransferError(f"cannot watch process {endpoint.process.pid}: {error.strerror}") from error
    owner = MappedOwner(endpoint, pidfd, {})
    try:
        # Check again: the descriptor holds the process now, but its pid could have been reused before.
        require_same_host(this_process(), endpoint.process)
        for mapping in needed:
            if (address := _map(endpoint.process.pid, mapping)) is not None:
                owner.mapped[mapping] = address
        if owner.identity != endpoint.identity:
            raise PeerError(
                f"process {endpoint.process.pid} is not {endpoint.engine_id}: its memory does not hold the "
                "nonce"
            )
        if has_ended(pidfd):
            raise TransferError(f"process {endpoint.process.pid} has ended")
        return owner
    except BaseException:
        owner.close()
        raise


def _map(pid: int, mapping: SharedMapping) -> int | None:
    """None if the file is not allocated whole. A staging buffer is not; peers do not read it."""
    path = f"/proc/{pid}/fd/{mapping.fd}"
    try:
        # First without opening it: a pipe or a device may do anything when it is opened.
        if not _is_same(os.stat(path), mapping):
            raise TransferError(f"descriptor {mapping.fd} of process {pid} is another file than announced")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise TransferError(f"cannot open the memory of process {pid}: {error.strerror}") from error
    try:
        if not _is_allocated(fd, pid, mapping):
            return None
        address: int = _libc.mmap(None, mapping.nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, mapping.offset)
        if address == _MAP_FAILED:
            raise TransferError(
                f"cannot map {mapping.nbytes} bytes of process {pid}: {os.strerror(ctypes.get_errno())}"
            )
        return address
    finally:
        os.close(fd)


def _is_allocated(fd: int, pid: int, mapping: SharedMapping) -> bool:
    """Whether every access to this mapping must succeed, now and later. Raises TransferError if that cannot
    be known."""
    status = os.fstat(fd)
    try:
        seals = seals_of(fd)
    except OSError:
        seals = 0
    if not _is_same(status, mapping):
        raise TransferError(f"descriptor {mapping.fd} of process {pid} is another file than announced")
    if seals & SEALS != SEALS:
        raise TransferError(f"the memory of process {pid} is not sealed: it could shrink or get holes")
    if mapping.offset + mapping.nbytes > status.st_size:
        raise TransferError(
            f"process {pid} announces {mapping.offset + mapping.nbytes} bytes of a file of {status.st_size}"
        )
    return status.st_blocks * _STAT_BLOCK_BYTES >= status.st_size


def _is_same(status: os.stat_result, mapping: SharedMapping) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_ino == mapping.inode
