"""A disk that loses, tears and reorders what was not synchronised, for every call that a store makes.

`recorded` runs a store on a real folder and records its calls to the file system. `images` then builds what a
disk may hold after a crash at any of these calls. The rules, after POSIX and what file systems do (Pillai et
al., "All File Systems Are Not Created Equal", OSDI 2014):

    data       of a file that was not synchronised since: each sector of 512 bytes is there, or is zeros; its
               length is that of any of these writes, or 0
    names      that were created, renamed or removed and not synchronised since, by an fsync of their folder:
               each is there or not, whatever happened to the others; a rename is atomic
    fsync      of a file makes its data durable, and of a folder the names in it; nothing else
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from baton.stores.backends import whole_file

SECTOR_BYTES = 512


@dataclass(frozen=True, slots=True)
class Call:
    kind: str  # "mkdir", "create", "write", "fsync", "rename", "unlink", or "done": a store's write returned.
    path: str
    to: str = ""
    data: bytes = b""
    offset: int = 0


@dataclass(slots=True)
class _File:
    durable: bytes = b""
    pending: list[Call] = field(default_factory=list)


@dataclass(slots=True)
class _Disk:
    files: dict[int, _File] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)  # Durable names: path -> file, or -1 for a folder.
    # Changes that are not durable yet, by folder.
    pending: dict[str, list[tuple[tuple[str, int | None], ...]]] = field(default_factory=dict)
    open_as: dict[str, int] = field(default_factory=dict)  # Files by path, as the running program sees them.

    def apply(self, call: Call) -> None:
        match call.kind:
            case "mkdir":
                self._name(call.path, -1)
            case "create":
                number = len(self.files)
                self.files[number] = _File()
                self.open_as[call.path] = number
                self._name(call.path, number)
            case "write":
                self.files[self.open_as[call.path]].pending.append(call)
            case "rename":
                number = self.open_as.pop(call.path)
                self.open_as[call.to] = number
                self._change(call.path, ((call.path, None), (call.to, number)))
            case "unlink":
                self.open_as.pop(call.path)
                self._name(call.path, None)
            case "fsync" if call.path in self.open_as:
                file = self.files[self.open_as[call.path]]
                file.durable, file.pending = _written(file.durable, file.pending), []
            case "fsync":
                for change in self.pending.pop(call.path, []):
                    self._make_durable(change)

    def crash(self, draw: random.Random) -> dict[str, bytes | None]:
        """Content by path; None for a folder. A name whose folder is lost is lost with it."""
        for changes in self.pending.values():
            for change in changes:
                if draw.random() < 0.5:
                    self._make_durable(change)
        found = {path: None if n < 0 else _torn(self.files[n], draw) for path, n in self.names.items()}
        return {path: content for path, content in sorted(found.items()) if self._is_reachable(path, found)}

    def _is_reachable(self, path: str, found: dict[str, bytes | None]) -> bool:
        return all(parent in found for parent in map(str, list(Path(path).parents)[:-1]))

    def _name(self, path: str, number: int | None) -> None:
        self._change(path, ((path, number),))

    def _change(self, path: str, change: tuple[tuple[str, int | None], ...]) -> None:
        self.pending.setdefault(str(Path(path).parent), []).append(change)

    def _make_durable(self, change: tuple[tuple[str, int | None], ...]) -> None:
        for path, number in change:
            if number is None:
                self.names.pop(path, None)
            else:
                self.names[path] = number


def images(calls: list[Call], draw: random.Random) -> tuple[dict[str, bytes | None], list[str]]:
    """What is there after a crash at one of the calls, and the values whose write had returned."""
    disk, done = _Disk(), []
    for call in calls[: draw.randint(0, len(calls))]:
        if call.kind == "done":
            done.append(call.path)
        else:
            disk.apply(call)
    return disk.crash(draw), done


def build(image: dict[str, bytes | None], folder: Path) -> None:
    for path, content in image.items():
        if content is None:
            (folder / path).mkdir(exist_ok=True)
        else:
            (folder / path).write_bytes(content)


def _written(content: bytes, calls: list[Call]) -> bytes:
    result = bytearray(content)
    for call in calls:
        result[len(result) :] = bytes(max(0, call.offset + len(call.data) - len(result)))
        result[call.offset : call.offset + len(call.data)] = call.data
    return bytes(result)


def _torn(file: _File, draw: random.Random) -> bytes:
    whole = bytearray(_written(file.durable, file.pending))
    for call in file.pending:
        for start in range(call.offset, call.offset + len(call.data), SECTOR_BYTES):
            if draw.random() < 0.3:
                end = min(start + SECTOR_BYTES, call.offset + len(call.data))
                whole[start:end] = bytes(end - start)
    lengths = [len(file.durable), *(call.offset + len(call.data) for call in file.pending)]
    return bytes(whole[: draw.choice(lengths)])


# --- Recording --------------------------------------------------------------------------------------


class _RecordedFile:
    def __init__(self, file: BinaryIO, path: str, record: Callable[[Call], None]) -> None:
        self._file, self._path, self._record = file, path, record

    def __enter__(self) -> _RecordedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, data: memoryview) -> int:
        offset = self._file.tell()
        count = self._file.write(data)
        self._record(Call("write", self._path, data=bytes(data[:count]), offset=offset))
        return count


@contextmanager
def recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """Records the calls of `baton.stores.backends.whole_file` below `folder`, with paths relative to it."""
    calls: list[Call] = []
    real = {name: getattr(os, name) for name in ("fsync", "replace", "mkdir")}

    def relative(path: Any) -> str:
        return os.path.relpath(path, folder)

    def open_file(path: Any, mode: str, **options: Any) -> Any:
        file = open(path, mode, **options)  # noqa: SIM115 - the store closes it.
        calls.append(Call("create", relative(path)))
        return _RecordedFile(file, relative(path), calls.append)

    def fsync(fileno: int) -> None:
        real["fsync"](fileno)
        calls.append(Call("fsync", relative(os.readlink(f"/proc/self/fd/{fileno}"))))

    def replace(path: Any, to: Any) -> None:
        real["replace"](path, to)
        calls.append(Call("rename", relative(path), relative(to)))

    def mkdir(path: Any, *rest: Any, **options: Any) -> None:
        real["mkdir"](path, *rest, **options)
        calls.append(Call("mkdir", relative(path)))

    with monkeypatch.context() as patch:
        patch.setattr(whole_file, "open", open_file, raising=False)
        for name, replacement in (("fsync", fsync), ("replace", replace), ("mkdir", mkdir)):
            patch.setattr(os, name, replacement)
        yield calls
