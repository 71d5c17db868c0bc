"""Reading a small file that somebody else wrote: never more of it than was asked for."""

import os
from pathlib import Path

from baton.core.errors import ConfigError


def read_limited(path: Path, max_bytes: int, *, field: str) -> bytes:
    """Raises ConfigError, in the name of `field`, for a file that cannot be read or has more bytes."""
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {os.strerror(error.errno or 0)}", field=field) from error
    if len(content) > max_bytes:
        raise ConfigError(f"{path} has more than {max_bytes} bytes", field=field)
    return content
