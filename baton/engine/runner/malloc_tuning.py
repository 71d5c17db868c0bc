"""Memory that a step frees stays with the process, for the next step.

A prompt's chunk needs tens of megabytes for each intermediate result. glibc maps pieces of this size anew
each time and gives them back at once, so that every layer pays for the first touch of fresh pages: a sixth of
the time of a chunk of 2,048 tokens, and more where the system reclaims memory eagerly.

Code that oneDNN has generated does not stay for ever. oneDNN makes a primitive of about 0.6 MiB for each
matrix and each number of rows, so for each length of a prompt. It keeps 1,024 of them, and so does torch.
"""

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # From glibc's malloc.h; see mallopt(3).
_LARGEST_MMAP_THRESHOLD = 32 << 20  # Bytes: what glibc accepts at most on 64 bits.
_LARGEST_INT = 2**31 - 1

# Entries of each cache. A model has about five shapes of matrices, so decode steps of 25 different sizes find
# their primitives. A new length of a chunk costs about a millisecond for each shape (docs/log.md).
_PRIMITIVES_MAX = "128"
_CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def keep_freed_memory() -> bool:
    """For the rest of this process's life. False where malloc is not glibc's: nothing has changed then."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none.
    if mallopt is None:
        return False
    kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)
    return bool(kept)


def primitive_limits() -> dict[str, str]:
    """Environment for a process that computes. Torch reads it at its first primitive; the user's own wins."""
    return {name: os.environ.get(name, _PRIMITIVES_MAX) for name in _CAPACITIES}
