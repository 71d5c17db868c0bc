"""Identity of a process on this host: enough to find it again, and to notice that it is another process.

A pid alone is not enough: in containers nearly every engine is pid 1 of its own namespace, and pids repeat.
"""

import os
from pathlib import Path

import msgspec

from baton.core.errors import TransferError


class HostProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process, as its own host and pid namespace identify it."""

    boot_id: str  # Boot id of the running kernel: equal in every container of one machine.
    pid_namespace: int
    pid: int
    start_ticks: int  # Start time of the process, in clock ticks since boot.


def this_process() -> HostProcess:
    """Raises TransferError if /proc does not have it."""
    pid = os.getpid()
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pid_namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError as error:
        raise TransferError(f"cannot read this host's boot id and pid namespace: {error}") from error
    return HostProcess(boot_id, pid_namespace, pid, _start_ticks(pid))


def require_same_host(ours: HostProcess, theirs: HostProcess) -> None:
    """Raises TransferError unless `theirs` can be a living process in our pid namespace.

    Only a first check: a process that passes must still prove itself by its memory.
    """
    if theirs.boot_id != ours.boot_id:
        raise TransferError("the peer is on another host")
    if theirs.pid_namespace != ours.pid_namespace:
        raise TransferError(
            "the peer is in another pid namespace of this host; share one (docker --pid, "
            "Kubernetes shareProcessNamespace) to copy between the processes' memories"
        )
    if theirs.pid <= 0:
        raise TransferError(f"{theirs.pid} is not a process id")
    if _start_ticks(theirs.pid) != theirs.start_ticks:
        raise TransferError(f"process {theirs.pid} has ended, and another process has its pid")


def _start_ticks(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError as error:
        raise TransferError(f"process {pid} does not exist: {error.strerror}") from error
    # The second field, the command in parentheses, may contain any bytes; the last ")" ends it.
    return int(stat.rpartition(b")")[2].split()[19])
