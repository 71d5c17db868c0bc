"""Bounded reading of regular files that other programs wrote."""

import os
import stat
from io import BufferedReader, FileIO
from pathlib import Path

from baton.core.errors import ConfigError


class NotRegular(OSError):
    """The path names a directory, a FIFO, a socket or a device."""


def open_regular(path: Path) -> FileIO:
    """Opens a file, unbuffered and without blocking. Raises NotRegular, or OSError as `open` does."""
    # Opening a FIFO without O_NONBLOCK blocks until it has a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegular(f"{path} is not a regular file")
    return FileIO(descriptor, "rb")


def read_limited(path: Path, max_bytes: int, *, field: str) -> bytes:
    """Content of a file. Raises ConfigError for `field` if it is unreadable or longer than `max_bytes`.

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
