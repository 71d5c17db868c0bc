"""`python with_parent.py PARENT_PID COMMAND...`: become COMMAND, a process that does not outlive its parent.

The kernel sends SIGKILL when the parent ends in whatever way, and the wish survives the exec. A script of its
own instead of a hook between fork and exec: such hooks may deadlock in a program that has threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PARENT_IS_GONE = 70  # EX_SOFTWARE; nobody is left to read it.


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        sys.exit(PARENT_IS_GONE)  # It ended before the kernel knew of our wish.
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
