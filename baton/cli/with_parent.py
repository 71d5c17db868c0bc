"""Becomes COMMAND in a process that ends with its parent: `python with_parent.py PARENT_PID COMMAND...`.

The kernel sends SIGKILL when the parent ends in any way, and this setting survives the exec. It is a
script instead of a hook between fork and exec, because such hooks may deadlock in a program with threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PARENT_IS_GONE = 70  # EX_SOFTWARE; no process reads it.


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        sys.exit(PARENT_IS_GONE)  # The parent ended before prctl took effect.
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
