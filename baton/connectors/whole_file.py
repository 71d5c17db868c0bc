"""Files that appear under their name whole or not at all, whoever is killed meanwhile."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

TEMPORARY_PREFIX = ".writing-"


def write_whole(pieces: Sequence[bytes | memoryview], path: Path, *, fsync: bool) -> None:
    """`pieces`: the content, one after the other. Raises OSError; then nothing is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{secrets.token_hex(8)}")
    try:
        with open(aside, "xb", buffering=0) as file:
            for piece in pieces:
                written = 0
                while written < len(piece):
                    written += file.write(memoryview(piece)[written:])
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
