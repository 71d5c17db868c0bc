"""Reading of small files that other programs wrote: regular files only, and bounded."""

import os
import stat
from pathlib import Path

from baton.core.errors import ConfigError


def read_limited(path: Path, max_bytes: int, *, field: str) -> bytes:
    """Raises ConfigError, in the name of `field`, for a file that cannot be read or has more bytes.

    Symbolic links are followed: orchestrators mount secrets as links.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO waits for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"{path} is not a regular file", field=field)
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {os.strerror(error.errno or 0)}", field=field) from error
    if len(content) > max_bytes:
        raise ConfigError(f"{path} has more than {max_bytes} bytes", field=field)
    return content
