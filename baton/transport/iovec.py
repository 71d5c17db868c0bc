"""Scatter-gather system calls on address arrays: no Python object per block, no GIL while bytes move."""

import ctypes
import os
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
