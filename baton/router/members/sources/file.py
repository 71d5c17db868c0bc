"""Members in the configuration file, which is read again when it changes."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from math import inf
from pathlib import Path

from baton.router.members.reader import SourceFailed
from baton.router.values.members import Listing

LOOK_S = 1.0


class FileSource:
    """Implements `Source`."""

    silent_after_s = inf

    def __init__(self, path: Path, read: Callable[[], Listing]) -> None:
        """`read`: raises UserError for a file that cannot be used."""
        self.name = "file"
        self._path, self._read = path, read

    async def members(self) -> AsyncGenerator[Listing, None]:
        seen = None
        while True:
            if (now := self._stamp()) != seen:
                seen = now
                yield self._read()
            await asyncio.sleep(LOOK_S)

    def _stamp(self) -> tuple[int, int, int]:
        """Differs after a change, also if a link to another file takes its place, as in a ConfigMap."""
        try:
            found = os.stat(self._path)
        except OSError as error:
            raise SourceFailed(f"{self._path} cannot be read: {error.strerror}") from error
        return found.st_ino, found.st_mtime_ns, found.st_size
