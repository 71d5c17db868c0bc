"""Settings of malloc, of pages and of oneDNN's caches for processes that compute.

The process keeps freed memory for the next step. A prompt's chunk needs tens of megabytes for each
intermediate result. By default glibc maps allocations of this size anew and unmaps them when they are freed,
so every layer pays for the first touch of new pages: a sixth of the time of a chunk of 2,048 tokens, and more
if the system reclaims memory early.

Tensors of over 2 MiB get pages of 2 MiB where the kernel leaves that to programs ("madvise", the default of
most distributions). A decode step reads every weight once. With these pages the products of all weights take
6 to 14 % less time (docs/log.md).

The caches of generated code are bounded. oneDNN generates a primitive of about 0.6 MiB for each matrix and
each number of rows, so for each length of a prompt. By default oneDNN keeps 1,024 of them, and so does torch.
"""

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # Constants of glibc's malloc.h; see mallopt(3).
_LARGEST_MMAP_THRESHOLD = 32 << 20  # Bytes: the maximum that glibc accepts on 64 bits.
_LARGEST_INT = 2**31 - 1

# Entries of each cache. A model has about five shapes of matrices, so decode steps of 25 different sizes fit.
# A new length of a chunk costs about a millisecond per shape (docs/log.md).
_PRIMITIVES_MAX = "128"
_CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


def keep_freed_memory() -> bool:
    """Make malloc keep freed memory in this process. False if malloc is not glibc's: nothing changes then."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl does not have it.
    if mallopt is None:
        return False
    kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)
    return bool(kept)


def compute_environment() -> dict[str, str]:
    """Environment variables. Torch reads them at its first tensor and at its first primitive.

    The user's own values take precedence.
    """
    ours = {_HUGE_PAGES: "1", **dict.fromkeys(_CAPACITIES, _PRIMITIVES_MAX)}
    return {name: os.environ.get(name, value) for name, value in ours.items()}
