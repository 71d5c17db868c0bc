"""Sets of processor instructions that Baton's compiled code may use."""

import os
from collections.abc import Sequence


def most_level(levels: Sequence[str]) -> int:
    """Return the index of the best allowed set of `levels`, worst first; the CPU may have less.

    Torch's own limit, ATEN_CPU_CAPABILITY, holds for Baton too: the suite can then run as on an older CPU.
    """
    allowed = {"default": levels[0], "avx2": "AVX2"}.get(
        os.environ.get("ATEN_CPU_CAPABILITY", ""), levels[-1]
    )
    return levels.index(allowed)
