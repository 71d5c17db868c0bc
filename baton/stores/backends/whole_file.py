"""Files that appear under their name complete or not at all, even if the writer is killed.

Their content is computed from prompts, so only the owner can read them. `for_group` allows the owner's group
to read and write them too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path

TEMPORARY_PREFIX = ".writing-"

_begin_writing = getattr(ctypes.CDLL(None), "sync_file_range", None)  # None: not Linux.
_SYNC_FILE_RANGE_WRITE = 2


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


Parts = Sequence[bytes | memoryview]


def write_files(
    files: Sequence[tuple[Parts, Path]],
    *,
    fsync: bool,
    for_group: bool = False,
    stage: Callable[[Parts], tuple[memoryview, int]] | None = None,
) -> list[OSError | None]:
    """Writes each file's parts, one after the other, with mode 0600 or 0660. Returns the error of each file.

    A file with an error leaves nothing. The files are synchronised together: a file system commits its
    journal for the first, and has little left to do for the others. The disk writes one while the next is
    filled. `stage` returns a file's content in whole
    pages of aligned memory, and its length; it is then written with direct I/O.
    """
    errors: list[OSError | None] = [None] * len(files)
    asides: dict[int, Path] = {}
    try:
        with contextlib.ExitStack() as stack:
            opened: dict[int, FileIO] = {}
            for number, (parts, path) in enumerate(files):
                with _noted(errors, number):
                    make_folder(path.parent, fsync=fsync, for_group=for_group)
                    aside = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{secrets.token_hex(8)}")
                    opener = _open_private if stage is None else _open_direct
                    opened[number] = stack.enter_context(open(aside, "xb", buffering=0, opener=opener))
                    asides[number] = aside
                    _fill(opened[number], parts, for_group=for_group, stage=stage)
                    if fsync and _begin_writing is not None:  # An error comes back from the fsync.
                        everything = ctypes.c_int64(0), ctypes.c_int64(0)
                        _begin_writing(opened[number].fileno(), *everything, _SYNC_FILE_RANGE_WRITE)
            for number, file in opened.items():
                if fsync and errors[number] is None:
                    with _noted(errors, number):
                        os.fsync(file.fileno())
        folders: dict[Path, None] = {}
        for number in opened:
            if errors[number] is None:
                with _noted(errors, number):
                    os.replace(asides[number], files[number][1])
                    del asides[number]
                    folders[files[number][1].parent] = None
        if fsync:
            for folder in folders:
                _sync_folder(folder)
    finally:
        for aside in asides.values():
            with contextlib.suppress(OSError):
                aside.unlink()
    return errors


@contextlib.contextmanager
def _noted(errors: list[OSError | None], number: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        errors[number] = error


def _fill(
    file: FileIO,
    parts: Parts,
    *,
    for_group: bool,
    stage: Callable[[Parts], tuple[memoryview, int]] | None,
) -> None:
    if for_group:
        os.fchmod(file.fileno(), 0o660)
    length = None
    if stage is not None:
        staged, length = stage(parts)
        parts = (staged,)
    for part in parts:
        written = 0
        while written < len(part):
            written += file.write(memoryview(part)[written:])
    if length is not None:
        file.truncate(length)


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
