"""Copy of scattered blocks within this process by compiled code (`gather.c`), without the interpreter's lock.

The library is optional: it is built when Baton is installed on a machine with a C compiler, or by
`scripts/build-gather`. It is an ordinary shared library, which ctypes calls without the interpreter's lock.
An extension module with the stable ABI (abi3) would also serve every Python, but needs Python's headers to
build, and more code.
"""

import contextlib
import ctypes
from functools import cache
from pathlib import Path

import numpy as np

from baton.core.errors import TransferError
from baton.transport.spans import Copies, Int64s

LIBRARY = Path(__file__).with_name("_gather.so")
STAGED_BYTES_MAX = 3 << 10  # Mean length of copies that are staged: longer ones gain nothing.
LEVELS = ("memcpy", "AVX2", "AVX-512")  # Sets of instructions, as `gather.c` numbers them.


class Gather:
    """Thread-safe: threads copy at the same time."""

    def __init__(self, library: Path = LIBRARY, level: int | None = None) -> None:
        """`level`: index of LEVELS, at most that of this CPU; None: the best one.

        Raises TransferError if the library was not built, or for another version of Baton.
        """
        try:
            loaded = ctypes.CDLL(str(library))
            self._gather = loaded.baton_gather_1
            best: int = loaded.baton_gather_level()
        except (OSError, AttributeError) as error:
            state = "of another version" if isinstance(error, AttributeError) else "not built"
            raise TransferError(
                f"the copy library is {state}: run scripts/build-gather, or install Baton on a machine with "
                "a C compiler"
            ) from error
        assert level is None or 0 <= level <= best, f"this CPU has no {LEVELS[level]}"
        self._level = best if level is None else level
        self._gather.restype = None
        self._gather.argtypes = (*[ctypes.c_void_p] * 3, ctypes.c_size_t, ctypes.c_int)

    @property
    def instructions(self) -> str:
        return LEVELS[self._level]

    def __call__(self, copies: Copies) -> None:
        """Sources and destinations must be mapped, and not overlap: a wrong address ends this process.

        What this thread reads after it was read after the copies, in memory order.
        """
        local, remote, nbytes = (_packed(a) for a in (copies.local, copies.remote, copies.nbytes))
        self._gather(local.ctypes.data, remote.ctypes.data, nbytes.ctypes.data, len(copies), self._level)


@cache
def copy_library() -> Gather | None:
    """The library, or None without it; `baton doctor` reports that."""
    with contextlib.suppress(TransferError):
        return Gather()
    return None


class Staging:
    """Buffer between a socket and blocks whose copies are short: one long segment instead of many.

    The kernel and the tag take less time for it. Without the copy library no copies are staged. Used by one
    thread; the kernel allocates its pages on first use.
    """

    def __init__(self, nbytes: int) -> None:
        self.buffer = np.empty(nbytes, dtype=np.uint8)
        self._gather: tuple[Gather, Gather] | None = None
        with contextlib.suppress(TransferError):  # `baton doctor` reports it.
            # What is collected is read next, so it is stored through the processor's caches.
            self._gather = Gather(LIBRARY, LEVELS.index("memcpy")), Gather(LIBRARY)

    def suits(self, copies: Copies) -> bool:
        return self._gather is not None and copies.total_bytes <= STAGED_BYTES_MAX * len(copies)

    def collect(self, copies: Copies) -> None:
        """Fills the buffer from the remote addresses, which are of this process."""
        assert self._gather is not None
        self._gather[0](Copies(self._addresses(copies), copies.remote, copies.nbytes))

    def distribute(self, copies: Copies) -> None:
        """Fills the local addresses from the buffer."""
        assert self._gather is not None
        self._gather[1](Copies(copies.local, self._addresses(copies), copies.nbytes))

    def _addresses(self, copies: Copies) -> Int64s:
        ends = np.cumsum(copies.nbytes)
        assert len(ends) == 0 or ends[-1] <= len(self.buffer)
        addresses: Int64s = self.buffer.ctypes.data + ends - copies.nbytes
        return addresses


def _packed(array: Int64s) -> Int64s:
    return array if array.flags.c_contiguous else array.copy()
