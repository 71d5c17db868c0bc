"""Access log: a line of JSON for each request that has ended, its `RequestTimeline`. No prompts, no answers.

Several processes append to one file, each line with one write, so lines stay whole.
"""

import logging
import os
import sys

import msgspec

from baton.router.request.timeline import RequestTimeline

logger = logging.getLogger(__name__)

STDOUT = "-"
_MODE = 0o640


class AccessLog:
    def __init__(self, path: str) -> None:
        """`path`: a file, or "-" for standard output. Raises OSError."""
        self._path = path
        self._descriptor = sys.stdout.fileno() if path == STDOUT else _opened(path)
        self._has_failed = False

    def write(self, timeline: RequestTimeline) -> None:
        """A line that cannot be written is lost; the log reports it once."""
        try:
            os.write(self._descriptor, msgspec.json.encode(timeline) + b"\n")
        except OSError as error:
            if not self._has_failed:
                logger.error("the access log %s cannot be written: %s", self._path, error)
            self._has_failed = True
        else:
            self._has_failed = False

    def close(self) -> None:
        if self._path != STDOUT:
            os.close(self._descriptor)


def _opened(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)
