"""Notices changes of files that a running server reads again: certificates, keys."""

import os
from collections.abc import Sequence

LOOK_EVERY_S = 10.0  # At most; no event of the file system is awaited.


class WatchedFiles:
    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._seen = self._look()
        self._look_at_s = 0.0

    def have_changed(self, now_s: float) -> bool:
        """Since the last call that returned True. A file that is gone has changed, too."""
        if now_s < self._look_at_s or not self._paths:
            return False
        self._look_at_s = now_s + LOOK_EVERY_S
        before, self._seen = self._seen, self._look()
        return before != self._seen

    def _look(self) -> Sequence[tuple[int, int, int]]:
        return [_state_of(path) for path in self._paths]


def _state_of(path: str) -> tuple[int, int, int]:
    """Also other after a rename or a change of permissions. Symbolic links are followed."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns
