"""Memory that a step frees stays with the process, for the next step.

A prompt's chunk needs tens of megabytes for each intermediate result. glibc maps pieces of this size anew
each time and gives them back at once, so that every layer pays for the first touch of fresh pages: a sixth of
the time of a chunk of 2,048 tokens, and more where the system reclaims memory eagerly.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # From glibc's malloc.h; see mallopt(3).
_LARGEST_MMAP_THRESHOLD = 32 << 20  # Bytes: what glibc accepts at most on 64 bits.
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> bool:
    """For the rest of this process's life. False where malloc is not glibc's: nothing has changed then."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none.
    if mallopt is None:
        return False
    kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)
    return bool(kept)
