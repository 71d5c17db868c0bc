"""Memory in a sealed anonymous file (memfd_create(2)): other processes can map it, and cannot change it.

F_SEAL_SHRINK         the file cannot be truncated, so that no access to a mapping raises SIGBUS
F_SEAL_FUTURE_WRITE   no further writable mapping, no write(2), no holes; the mapping made here stays writable
"""

import fcntl
import mmap
import os

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1. Not in Python's `fcntl`.
SEALS = fcntl.F_SEAL_SHRINK | _F_SEAL_FUTURE_WRITE


def allocate_sealed(nbytes: int, name: str) -> mmap.mmap:
    """Returns `nbytes` of shared memory; its pages are allocated when they are first written.

    It exists as long as the object, and as long as another process maps it. Raises OSError if the kernel or
    its limits have no such memory.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        memory = mmap.mmap(fd, nbytes)  # Keeps a descriptor of its own.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        return memory
    finally:
        os.close(fd)


def seals_of(fd: int) -> int:
    """The seals of a file. Raises OSError if it is of a kind that has none."""
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
