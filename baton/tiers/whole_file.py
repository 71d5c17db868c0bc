"""Files that appear under their name complete or not at all, even if the writer is killed.

Their content is computed from prompts, so only the owner can read them. `for_group` allows the owner's group
to read and write them too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

TEMPORARY_PREFIX = ".writing-"


def make_folder(folder: Path, *, fsync: bool = False, for_group: bool = False) -> None:
    """Creates `folder` and its missing parents with mode 0700, or 0770. Raises OSError.

    `fsync`: they survive a crash of the machine.
    """
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_folder(folder.parent, fsync=fsync, for_group=for_group)
    folder.mkdir(mode=0o700, exist_ok=True)
    if for_group:
        folder.chmod(0o770)  # The process's umask removes the group's bits from mkdir's.
    if fsync:
        _sync_folder(folder.parent)


def write_whole(
    parts: Sequence[bytes | memoryview],
    path: Path,
    *,
    fsync: bool,
    for_group: bool = False,
    direct_bytes: int | None = None,
) -> None:
    """Writes `parts`, one after the other, with mode 0600 or 0660. If it raises OSError, no file is left.

    `direct_bytes`: writes with direct I/O, for which the parts must be whole pages of aligned memory; the
    file is then cut to this length.
    """
    make_folder(path.parent, fsync=fsync, for_group=for_group)
    aside = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{secrets.token_hex(8)}")
    try:
        with open(
            aside, "xb", buffering=0, opener=_open_private if direct_bytes is None else _open_direct
        ) as file:
            if for_group:
                os.fchmod(file.fileno(), 0o660)
            for part in parts:
                written = 0
                while written < len(part):
                    written += file.write(memoryview(part)[written:])
            if direct_bytes is not None:
                file.truncate(direct_bytes)
            if fsync:
                os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    if fsync:
        _sync_folder(path.parent)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)


def _open_direct(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_DIRECT, mode=0o600)


def _sync_folder(folder: Path) -> None:
    """Makes the new name survive a crash of the machine. Some file systems cannot, and need not."""
    with contextlib.suppress(OSError):
        fileno = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fileno)
        finally:
            os.close(fileno)
