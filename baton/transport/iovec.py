"""Scatter-gather system calls on address arrays: no Python object per block, no GIL while bytes move."""

import ctypes
import errno
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IOV_MAX = 1024  # Entries in one call (UIO_MAXIOV).
_ENTRY_BYTES = 16  # struct iovec: address, length.

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)
_libc.sendmsg.restype = ctypes.c_ssize_t
_libc.sendmsg.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_libc.recvmsg.restype = ctypes.c_ssize_t
_libc.recvmsg.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


class _MessageHeader(ctypes.Structure):
    """struct msghdr."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iov_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


def iovec_array(addresses: NDArray[np.int64], nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """An array with the memory layout of `struct iovec[]`."""
    return np.stack((addresses, nbytes), axis=1)


def read_process_memory(pid: int, local: NDArray[np.int64], remote: NDArray[np.int64]) -> int:
    """process_vm_readv(2). Returns the number of bytes read, in order; may be short. Raises OSError."""
    assert len(local) <= IOV_MAX
    assert len(remote) <= IOV_MAX
    count = _libc.process_vm_readv(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    if count < 0:
        raise _os_error()
    return int(count)


class ScatteredMemory:
    """Memory segments that a socket fills or drains from front to back.

    |== done ==|== done ==|===.......|..........|
                           ^ the next call continues here: entry `_index`, shortened in place
    """

    def __init__(
        self, addresses: NDArray[np.int64], nbytes: NDArray[np.int64], *, done_before: int = 0
    ) -> None:
        """`done_before`: bytes that were transferred elsewhere and count as done."""
        self._entries = iovec_array(addresses, nbytes)
        self._ends = np.cumsum(nbytes) + done_before
        self._index = 0
        self._done = done_before
        self.total_bytes = int(self._ends[-1]) if len(nbytes) else done_before
        self._header = _MessageHeader()

    @property
    def done_bytes(self) -> int:
        return self._done

    @property
    def rest_bytes(self) -> int:
        return self.total_bytes - self._done

    def send_to(self, fd: int, flags: int) -> int:
        return self._transfer(_libc.sendmsg, fd, flags)

    def receive_from(self, fd: int, flags: int) -> int:
        """Number of bytes received; 0 if the other side has closed. Raises OSError and BlockingIOError."""
        return self._transfer(_libc.recvmsg, fd, flags)

    def _transfer(self, call: "ctypes._NamedFuncPointer", fd: int, flags: int) -> int:
        self._header.iov = self._entries.ctypes.data + self._index * _ENTRY_BYTES
        self._header.iov_count = min(IOV_MAX, len(self._entries) - self._index)
        while (count := call(fd, ctypes.byref(self._header), flags)) < 0:
            error = _os_error()
            if error.errno != errno.EINTR:
                raise error
        self._advance(count)
        return int(count)

    def _advance(self, count: int) -> None:
        self._done += count
        self._index = int(np.searchsorted(self._ends, self._done, side="right"))
        if self._index < len(self._entries):
            tail = int(self._ends[self._index]) - self._done
            entry = self._entries[self._index]
            entry[0] += entry[1] - tail
            entry[1] = tail


@dataclass(frozen=True, slots=True)
class Scratch:
    """A small buffer with a fixed address, valid as long as this object."""

    buffer: "ctypes.Array[ctypes.c_char]"

    @classmethod
    def of(cls, nbytes: int) -> "Scratch":
        return cls(ctypes.create_string_buffer(nbytes))

    @property
    def address(self) -> int:
        return ctypes.addressof(self.buffer)

    @property
    def nbytes(self) -> int:
        return ctypes.sizeof(self.buffer)

    def write(self, content: bytes) -> None:
        assert len(content) <= self.nbytes
        ctypes.memmove(self.buffer, content, len(content))

    def read(self) -> bytes:
        return self.buffer.raw

    def clear(self) -> None:
        ctypes.memset(self.buffer, 0, self.nbytes)


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
