"""Copy of scattered blocks within this process by compiled code (`gather.c`), without the interpreter's lock.

The library is optional: it is built when Baton is installed on a machine with a C compiler, or by
`scripts/build-library gather`. It is an ordinary shared library: an extension module with the stable ABI
(abi3) would also serve every Python, but needs Python's headers to build, and more code.
"""

import contextlib
import ctypes
from functools import cache
from pathlib import Path

from baton.core.errors import TransferError
from baton.core.instructions import most_level
from baton.transport.base.spans import Copies, Int64s

LIBRARY = Path(__file__).with_name("_gather.so")
LEVELS = ("memcpy", "AVX2", "AVX-512")  # Sets of instructions, as `gather.c` numbers them.


def load(library: Path) -> ctypes.CDLL:
    """Raises TransferError if the library was not built."""
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise unusable("not built") from error


def unusable(state: str) -> TransferError:
    return TransferError(
        f"the copy library is {state}: run scripts/build-library gather, or install Baton on a "
        "machine with a C compiler"
    )


class Gather:
    """Thread-safe: threads copy at the same time."""

    def __init__(self, library: Path = LIBRARY, level: int | None = None) -> None:
        """`level`: index of LEVELS, at most that of this CPU; None: the best one.

        Raises TransferError if the library was not built, or for another version of Baton.
        """
        loaded = load(library)
        try:
            self._gather = loaded.baton_gather_1
            best: int = min(loaded.baton_gather_level(), most_level(LEVELS))
        except AttributeError as error:
            raise unusable("of another version") from error
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


def _packed(array: Int64s) -> Int64s:
    return array if array.flags.c_contiguous else array.copy()
