"""Files that appear under their name whole or not at all, whoever is killed meanwhile."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

TEMPORARY_PREFIX = ".writing-"


def write_whole(content: bytes, path: Path, *, fsync: bool) -> None:
    """Raises OSError; then nothing is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{secrets.token_hex(8)}")
    try:
        with open(aside, "xb", buffering=0) as file:
            written = 0
            view = memoryview(content)
            while written < len(content):
                written += file.write(view[written:])
            if fsync:
                os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    if fsync:
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """So that the new name survives a crash of the machine. Some file systems cannot, and need not."""
    with contextlib.suppress(OSError):
        fileno = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fileno)
        finally:
            os.close(fileno)
