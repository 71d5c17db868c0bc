"""Scatter-gather system calls on address arrays: no Python object per block, no GIL while bytes move."""

import ctypes
import errno
import os
import socket
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IOV_MAX = 1024  # Entries in one call (UIO_MAXIOV).

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
for _function in (_libc.sendmsg, _libc.recvmsg):
    _function.restype = ctypes.c_ssize_t
    _function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


def iovec_array(addresses: NDArray[np.int64], nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """An array with the memory layout of `struct iovec[]`."""
    return np.stack((addresses, nbytes), axis=1)


def read_process_memory(pid: int, local: NDArray[np.int64], remote: NDArray[np.int64]) -> int:
    """process_vm_readv(2). Returns the number of bytes read, in order; may be short. Raises OSError."""
    assert len(local) <= IOV_MAX
    assert len(remote) <= IOV_MAX
    count = _libc.process_vm_readv(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    if count < 0:
        raise os_error(ctypes.get_errno())
    return int(count)


def send_segments(fd: int, segments: NDArray[np.int64]) -> int:
    """sendmsg(2) of the first IOV_MAX segments (`iovec_array`), without waiting. Returns the number of bytes.

    Raises OSError; BlockingIOError if it would wait.
    """
    return _move_message(_libc.sendmsg, fd, segments, socket.MSG_NOSIGNAL)


def receive_segments(fd: int, segments: NDArray[np.int64]) -> int:
    """recvmsg(2), as `send_segments`. 0: the other end has closed the connection."""
    return _move_message(_libc.recvmsg, fd, segments, 0)


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


def _move_message(
    function: "ctypes._NamedFuncPointer", fd: int, segments: NDArray[np.int64], flags: int
) -> int:
    header = _MessageHeader(iov=segments.ctypes.data, iov_count=min(IOV_MAX, len(segments)))
    while (moved := function(fd, ctypes.byref(header), flags | socket.MSG_DONTWAIT)) < 0:
        if (number := ctypes.get_errno()) != errno.EINTR:
            raise os_error(number)
    return int(moved)


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


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
