"""Reading of files that other programs wrote: regular files only, and small ones bounded."""

import os
import stat
from io import BufferedReader, FileIO
from pathlib import Path

from baton.core.errors import ConfigError


class NotRegular(OSError):
    """The path names a directory, a FIFO, a socket or a device."""


def open_regular(path: Path) -> FileIO:
    """Opens a file for reading, unbuffered. Raises NotRegular, or OSError as `open` does; never waits."""
    # Without O_NONBLOCK, opening a FIFO waits for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegular(f"{path} is not a regular file")
    return FileIO(descriptor, "rb")


def read_limited(path: Path, max_bytes: int, *, field: str) -> bytes:
    """Raises ConfigError, in the name of `field`, for a file that cannot be read or has more bytes.

    Symbolic links are followed: orchestrators mount secrets as links.
    """
    try:
        with BufferedReader(open_regular(path)) as file:
            content = file.read(max_bytes + 1)
    except NotRegular as error:
        raise ConfigError(str(error), field=field) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {os.strerror(error.errno or 0)}", field=field) from error
    if len(content) > max_bytes:
        raise ConfigError(f"{path} has more than {max_bytes} bytes", field=field)
    return content
