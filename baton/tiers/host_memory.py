"""How much memory of this host can be taken still, and the taking of it.

What a machine has free is not what a process may have: in a container the control group's limit is nearer,
and whoever crosses it is killed. And several ranks take their shares at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from baton.core.errors import ConfigError

GIB = 1 << 30
PART_BYTES = 256 << 20  # Taken at once: so much may be there for one of several that ask.


def available_bytes(root: Path = Path("/")) -> int:
    """Of the machine, or of the control groups that this process is in, if that is less."""
    return max(0, min([int(psutil.virtual_memory().available), *_rooms(root)]))


def _rooms(root: Path) -> Iterator[int]:
    """What each memory limit leaves. See cgroups(7): lines are "number:controllers:path", v2 has no names."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # Another system than Linux.
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _rooms_up(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            folder = root / "sys/fs/cgroup/memory"
            yield from _rooms_up(folder, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _rooms_up(top: Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[int]:
    """Of the group and of all above it. In a container its path may not be there: the top is its own."""
    folder = top / path.lstrip("/")
    for group in (folder, *folder.parents):
        try:
            said, used = (group / limit).read_text().strip(), int((group / usage).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except OSError:
            said, used, stat = "max", 0, {}
        if said != "max":
            # Pages of files that nobody uses make room.
            yield int(said) - used + int(stat.get(f"{prefix}inactive_file", 0))
        if group == top:
            return


def take(num_bytes: int, field: str, available: Callable[[], int] = available_bytes) -> NDArray[np.uint8]:
    """Memory with all pages touched. Raises ConfigError as `touch`."""
    memory = np.empty(num_bytes, np.uint8)
    touch(memory, field, available)
    return memory


def touch(memory: NDArray[np.uint8], field: str, available: Callable[[], int] = available_bytes) -> None:
    """Write zeros to all pages, which costs ten copies the first time. Raises ConfigError.

    Part by part, since others take theirs meanwhile: there has to be room for each when it is its turn.
    """
    for start in range(0, memory.nbytes, PART_BYTES):
        part = memory[start : start + PART_BYTES]
        if part.nbytes > (room := available()):
            raise ConfigError(
                f"this rank's share is {memory.nbytes / GIB:.2f} GiB; with {start / GIB:.2f} of them taken "
                f"only {room / GIB:.2f} GiB of memory are free",
                field=field,
            )
        part.fill(0)
