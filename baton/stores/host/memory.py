"""Free memory of this host, and its allocation.

The free memory of the machine is not what a process may use: in a container the limit of the control group is
lower, and a process that exceeds it is killed. Also, several ranks allocate their shares at the same time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from baton.core.errors import ConfigError
from baton.core.sealed_memory import allocate_sealed

logger = logging.getLogger(__name__)

GIB = 1 << 30
PART_BYTES = 256 << 20  # Allocation step; free memory is checked before each.


def available_bytes(root: Path = Path("/")) -> int:
    """Free bytes of the machine, or of this process's control groups if they have less."""
    return max(0, min([int(psutil.virtual_memory().available), *_memory_left(root)]))


def _memory_left(root: Path) -> Iterator[int]:
    """Free bytes under each limit. cgroups(7): lines are "number:controllers:path"; v2 has no controllers."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # Not Linux.
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left_under(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            folder = root / "sys/fs/cgroup/memory"
            yield from _left_under(folder, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _left_under(top: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[int]:
    """Free bytes of the group and of all its ancestors, up to `top`.

    In a container the path may not exist; `top` is then the container's own group.
    """
    folder = top / path.lstrip("/")
    for group in (folder, *folder.parents):
        try:
            limit_text, used = (group / limit).read_text().strip(), int((group / usage).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except OSError:
            limit_text, used, stat = "max", 0, {}
        if limit_text != "max":
            # Inactive file pages are reclaimed when memory is needed.
            yield int(limit_text) - used + int(stat.get(f"{prefix}inactive_file", 0))
        if group == top:
            return


def allocate_shareable(num_bytes: int) -> NDArray[np.uint8]:
    """Memory that engines of this host can map (the transport `local`), not touched yet.

    Ordinary memory where the system has no other; the transport then reads it in another way.
    """
    try:
        return np.frombuffer(allocate_sealed(num_bytes, "baton-kv"), dtype=np.uint8)
    except OSError as error:
        logger.info("no shared memory for %d bytes of KV: %s", num_bytes, error)
        return np.empty(num_bytes, np.uint8)


def touch(memory: NDArray[np.uint8], field: str, available: Callable[[], int] = available_bytes) -> None:
    """Writes zeros to all pages. The first time costs ten copies. Raises ConfigError if memory is short.

    It goes step by step, because other ranks allocate meanwhile: free memory is checked before each step.
    """
    for start in range(0, memory.nbytes, PART_BYTES):
        part = memory[start : start + PART_BYTES]
        if part.nbytes > (room := available()):
            raise ConfigError(
                f"this rank's share is {memory.nbytes / GIB:.2f} GiB; {start / GIB:.2f} GiB of it are taken, "
                f"and only {room / GIB:.2f} GiB of memory are free; configure less, or free memory",
                field=field,
            )
        part.fill(0)
