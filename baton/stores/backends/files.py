"""Values in files under a folder: a local disk, or a folder that several hosts share.

    <folder>/<name>                        a value
    <folder>/.../.writing-<name>-<random>  one that is being written; left over if its writer is killed

    <folder>/.../.foreign-<name>-<random>  what had the place of a value or of its folder, and was neither

A file appears under its name complete or not at all (written under another name, synchronised, renamed, the
folder synchronised). Files are read, never mapped: if a mapped file is truncated, the process is killed.

Direct I/O (`direct`) goes around the page cache, where the file system allows it; `check` finds out.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar

from baton.core.errors import ConfigError
from baton.stores.backends.whole_file import TEMPORARY_PREFIX, make_folder, write_files
from baton.stores.base.aligned import PAGE_BYTES, AlignedMemory, whole_pages
from baton.stores.base.chunk_name import is_of_a_store
from baton.stores.base.dates import age_s, is_ahead
from baton.stores.base.store import Parts, Promise, Store, Stored, StoreError, Unusable

logger = logging.getLogger(__name__)

FOREIGN_PREFIX = ".foreign-"
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
ABANDONED_S = 900.0  # Longer than a file takes to write; a slower writer fails with an error.


class FileStore(Store):
    kind: ClassVar[str] = "files"

    def __init__(
        self,
        folder: Path,
        *,
        fsync: bool = True,
        for_group: bool = False,
        direct: bool = False,
        field: str = "path",
    ) -> None:
        """`fsync`: values survive a crash of the machine. `for_group`: the owner's group may read and write
        too.

        `field`: setting of the folder, for errors.
        """
        self.folder = folder
        self.where = str(folder)
        self._fsync = fsync
        self._for_group = for_group
        self.is_direct = direct  # False after `check` if the file system has no direct I/O.
        self._field = field
        self._staging = AlignedMemory()  # Memory of threads that write with direct I/O.

    @property
    def promise(self) -> Promise:
        return Promise(
            survives_process=True,
            survives_power_loss=self._fsync,
            has_time_of_use=True,
            evicts_itself=False,
            several_hosts=True,
        )

    def check(self, *, is_written: bool = True) -> None:
        try:
            make_folder(self.folder, fsync=self._fsync, for_group=self._for_group)
        except OSError as error:
            raise ConfigError(f"cannot be created or used: {error}", field=self._field) from error
        if self.is_direct and not _allows_direct_io(self.folder):
            logger.info("the file system of %s has no direct I/O; reads and writes are cached", self.folder)
            self.is_direct = False

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        return [self._size(name) for name in names]

    def read(self, name: str, into: memoryview) -> int:
        with self._opened(name, is_direct=self.is_direct and len(into) % PAGE_BYTES == 0) as opened:
            return _read_whole(*opened, into)

    def read_part(self, name: str, into: memoryview, start: int, nbytes: int) -> None:
        pages = whole_pages(nbytes)
        is_direct = self.is_direct and start % PAGE_BYTES == 0 and len(into) >= pages
        into, done = into[: pages if is_direct else nbytes], 0
        with self._opened(name, is_direct=is_direct) as (fileno, _):
            while done < nbytes:
                count = os.preadv(fileno, [into[done:]], start + done)
                if count == 0:
                    raise Unusable("corrupt", f"it ends before byte {start + nbytes}")
                done += count

    @contextmanager
    def _opened(self, name: str, *, is_direct: bool) -> Iterator[tuple[int, os.stat_result]]:
        """A regular file. Raises Unusable, also for errors in the body."""
        # Does not block on a FIFO, and fails on a symbolic link.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | (os.O_DIRECT if is_direct else 0)
        try:
            fileno = os.open(self.folder / name, flags)
            try:
                status = os.fstat(fileno)
                if not stat.S_ISREG(status.st_mode):
                    raise Unusable("foreign", "it is not a regular file")
                yield fileno, status
            finally:
                os.close(fileno)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                raise Unusable("gone") from error
            with suppress(StoreError):  # A socket, or with direct I/O a folder, cannot even be opened.
                if self._size(name) is None:
                    raise Unusable("foreign", "it is not a regular file") from error
            raise Unusable("io", str(error)) from error

    def write(self, name: str, parts: Parts) -> None:
        (error,) = self.write_all([(name, parts)])
        if error is not None:
            raise error

    def write_all(self, values: Sequence[tuple[str, Parts]]) -> list[StoreError | None]:
        """Synchronises all of them together."""
        write = partial(
            write_files,
            fsync=self._fsync,
            for_group=self._for_group,
            stage=self._stage if self.is_direct else None,
        )
        files = [(parts, self.folder / name) for name, parts in values]
        errors = write(files)
        for number, (name, _) in enumerate(values):
            if isinstance(errors[number], (FileExistsError, IsADirectoryError)) and self._make_way(name):
                (errors[number],) = write([files[number]])
        return [None if error is None else StoreError(str(error)) for error in errors]

    def remove(self, names: Sequence[str]) -> None:
        errors = [error for name in names if (error := _unlink(str(self.folder / name)))]
        if errors:
            raise StoreError(errors[0])

    def touch(self, name: str, used_s: float) -> None:
        try:
            os.utime(self.folder / name, (used_s, used_s))
        except OSError as error:  # The file is gone, or the folder is not writable.
            logger.debug("could not renew %s: %s", name, error)

    def scan(self) -> Iterator[Stored]:
        prefix = os.path.join(self.folder, "")
        for entry in self._entries():
            name = entry.path.removeprefix(prefix)
            if is_of_a_store(name) and (found := _status(entry)) is not None:
                yield Stored(name, found.st_size, found.st_mtime)

    def collect(self, now_s: float) -> None:
        for entry in self._entries():
            if entry.name.startswith(TEMPORARY_PREFIX):
                if (found := _status(entry)) is None:
                    continue
                if is_ahead(found.st_mtime, now_s):
                    self.touch(os.path.relpath(entry.path, self.folder), now_s)
                elif age_s(found.st_mtime, now_s) > ABANDONED_S:
                    _unlink(entry.path)

    def close(self) -> None:
        return

    def _size(self, name: str) -> int | None:
        try:
            found = os.stat(self.folder / name, follow_symlinks=False)
        except OSError as error:
            if error.errno in NOT_THERE:
                return None
            raise StoreError(str(error)) from error
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def _make_way(self, name: str) -> bool:
        """Renames a folder that has the place of the value, or a file that has that of its folder."""
        value = self.folder / name
        for place in (*[self.folder / parent for parent in reversed(Path(name).parents)], value):
            if os.path.lexists(place) and place.is_dir() == (place is value):
                aside = place.with_name(f"{FOREIGN_PREFIX}{place.name}-{secrets.token_hex(8)}")
                logger.warning("%s has the place of a chunk; it is renamed to %s", place, aside.name)
                with suppress(OSError):  # The write then fails again.
                    place.rename(aside)
                return True
        return False

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        """Files two folders deep. Everything else in the folder is not ours, and stays."""
        try:
            yield from _files(str(self.folder), depth=2)
        except OSError as error:
            raise StoreError(str(error)) from error

    def _stage(self, parts: Parts) -> tuple[memoryview, int]:
        """The parts in aligned memory, filled up to whole pages; and their bytes."""
        nbytes = sum(map(len, parts))
        view, at = self._staging.take(nbytes), 0
        for part in parts:
            view[at : at + len(part)] = part
            at += len(part)
        return view[: whole_pages(nbytes)], nbytes


def _read_whole(fileno: int, status: os.stat_result, into: memoryview) -> int:
    if status.st_size > len(into):
        raise Unusable("corrupt", f"it has {status.st_size} bytes, at most {len(into)} are expected")
    done = 0
    while done < status.st_size:
        count = os.readv(fileno, [into[done:]])
        if count == 0:
            raise Unusable("corrupt", "it became shorter while it was read")
        done += count
    if done > status.st_size:
        raise Unusable("corrupt", "it became longer while it was read")
    return done


def _files(folder: str, depth: int) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if depth and entry.is_dir(follow_symlinks=False):
                try:
                    yield from _files(entry.path, depth - 1)
                except OSError as error:  # The folder was removed meanwhile, or is another user's.
                    logger.debug("could not look into %s: %s", entry.path, error)
            elif not depth and entry.is_file(follow_symlinks=False):
                yield entry


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat()
    except OSError as error:  # Another engine has removed it, or the disk cannot read it.
        logger.debug("could not look at %s: %s", entry.path, error)
        return None


def _unlink(path: str) -> str:
    """Returns the error, or ""."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return str(error)
    return ""


def _allows_direct_io(folder: Path) -> bool:
    """Writes one block. Some file systems accept the flag and refuse the write."""
    path = folder / f"{TEMPORARY_PREFIX}direct-{os.getpid()}-{threading.get_ident()}"
    try:
        fileno = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        try:
            os.write(fileno, AlignedMemory().take(PAGE_BYTES))
        finally:
            os.close(fileno)
    except OSError:
        return False
    finally:
        _unlink(str(path))
    return True
