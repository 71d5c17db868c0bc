"""Notices changes of files that a running server reads again: certificates, keys, tenants."""

import os
from collections.abc import Sequence
from typing import ClassVar

LOOK_EVERY_S = 10.0  # Shortest time between two looks; no event of the file system is awaited.


class WatchedFiles:
    _num_calls: ClassVar[int] = 0  # Calls of `look_now`.

    @classmethod
    def look_now(cls) -> None:
        """Let all watchers of this process look at their files when they are used next: for SIGHUP."""
        cls._num_calls += 1

    def __init__(self, paths: Sequence[str], *, are_read: bool = True) -> None:
        """`are_read`: this process reads the files now. False: it uses contents that may be older, as in
        a worker that is started later; then the first look finds a change.
        """
        self._paths = paths
        self._seen = self._look() if are_read else []
        self._look_at_s = 0.0
        self._num_calls_seen = self._num_calls

    def have_changed(self, now_s: float) -> bool:
        """Whether a file has changed since the last call that returned True. A removed file counts, too."""
        is_due = now_s >= self._look_at_s or self._num_calls_seen != self._num_calls
        if not is_due or not self._paths:
            return False
        self._num_calls_seen = self._num_calls
        self._look_at_s = now_s + LOOK_EVERY_S
        before, self._seen = self._seen, self._look()
        return before != self._seen

    def _look(self) -> Sequence[tuple[int, int, int]]:
        return [_state_of(path) for path in self._paths]


def _state_of(path: str) -> tuple[int, int, int]:
    """State of the file. A rename or a change of permissions changes it. Symbolic links are followed."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns
