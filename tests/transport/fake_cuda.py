"""The library of `fake_cuda.c`, and memory on its device.

build(folder)              compiles it; needs a C compiler
place(library, content)    puts bytes into its memory, which both it and numpy can access
make(library, ...)         a `cuda_ipc` transport with the real CudaDriver on top of it
"""

import ctypes
import shutil
import subprocess
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.core.ids import Address
from baton.core.layout import Region
from baton.testing.transport_producers import Placed
from baton.transport.base.interface import Transport
from baton.transport.cuda_ipc.driver import CudaDriver
from baton.transport.cuda_ipc.transport import CudaIpcTransport

COMPILER = shutil.which("cc") or shutil.which("gcc")
BUILD_TIMEOUT_S = 120.0
PAGE = 4096


def build(folder: Path) -> str:
    """Returns the library's path."""
    assert COMPILER is not None
    library = folder / "libfakecuda.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(
        [
            COMPILER,
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-shared",
            "-fPIC",
            "-pthread",
            "-o",
            library,
            source,
        ],
        check=True,
        timeout=BUILD_TIMEOUT_S,
    )
    return str(library)


class FakeDevice:
    """Controls of the fake device. One per process, because the library is loaded once."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self._library.fakeAllocate.restype = ctypes.c_uint64

    def allocate(self, nbytes: int) -> int:
        address: int = self._library.fakeAllocate(ctypes.c_size_t(nbytes))
        assert address, "no more memory on the fake device"
        return address

    def free(self, address: int) -> None:
        self._library.fakeFree(ctypes.c_uint64(address))

    @property
    def num_opened(self) -> int:
        """Number of handles opened and not closed, counting each open."""
        count: int = self._library.fakeNumOpened()
        return count

    def fail_copy_in(self, number: int) -> None:
        """Refuses the `number`-th copy from now, without launching it."""
        self._library.fakeFailCopyIn(number)


class FakeDeviceMemory:
    """Rows of bytes in one allocation that begins a page before them."""

    def __init__(self, device: FakeDevice, content: NDArray[np.uint8]) -> None:
        base = device.allocate(PAGE + content.nbytes)
        weakref.finalize(self, device.free, base)
        buffer = (ctypes.c_uint8 * content.nbytes).from_address(base + PAGE)
        self._rows = np.frombuffer(buffer, dtype=np.uint8).reshape(content.shape)
        self._rows[:] = content
        self.regions = [Region(row.ctypes.data, row.nbytes, "cuda:0") for row in self._rows]

    def __getitem__(self, key: Any) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = self._rows[key]
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        self._rows[key] = value


def place(library: str, content: NDArray[np.uint8]) -> Placed:
    memory = FakeDeviceMemory(FakeDevice(library), content)
    return Placed(memory, memory.regions)


def make(
    library: str, address: Address, port: int = 0, on_completion: Callable[[], None] | None = None
) -> Transport:
    return CudaIpcTransport(address, driver=CudaDriver(library), on_completion=on_completion)
