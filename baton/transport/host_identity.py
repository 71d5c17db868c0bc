"""Who a process is on this host: enough to find it again, and to notice that it is another one.

A pid alone says little: in containers nearly every engine is pid 1 of its own namespace, and pids repeat.
"""

import os
from pathlib import Path

import msgspec

from baton.core.errors import TransferError


class HostProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process as its own host and pid namespace name it."""

    boot_id: str  # Of the running kernel: equal for every container of one machine.
    pid_namespace: int
    pid: int
    start_ticks: int  # When the process was started, since boot.


def this_process() -> HostProcess:
    """Raises TransferError where /proc does not say."""
    pid = os.getpid()
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pid_namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError as error:
        raise TransferError(f"cannot tell this host and pid namespace: {error}") from error
    return HostProcess(boot_id, pid_namespace, pid, _start_ticks(pid))


def require_same_host(ours: HostProcess, theirs: HostProcess) -> None:
    """Raises TransferError unless `theirs` can be a living process that we can name.

    Only a first sieve: what it lets through still has to prove itself by its memory.
    """
    if theirs.boot_id != ours.boot_id:
        raise TransferError("the peer is on another host")
    if theirs.pid_namespace != ours.pid_namespace:
        raise TransferError(
            "the peer is in another pid namespace of this host; share one (docker --pid, "
            "Kubernetes shareProcessNamespace) to copy between the processes' memories"
        )
    if theirs.pid <= 0:
        raise TransferError(f"{theirs.pid} is no process id")
    if _start_ticks(theirs.pid) != theirs.start_ticks:
        raise TransferError(f"process {theirs.pid} has ended, and another one has its number")


def _start_ticks(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError as error:
        raise TransferError(f"process {pid} does not exist: {error.strerror}") from error
    # The second field, the command in parentheses, may contain anything; the last ")" ends it.
    return int(stat.rpartition(")")[2].split()[19])
