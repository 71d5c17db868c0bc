"""Kills processes inside a write to real files, at a chosen byte, and checks what others find.

    python -m tests.stores.kills 1000      prints a histogram of the offsets, and every problem

A writer is a forked process that stores values until, in one of its writes, it has written up to the chosen
byte of the file; it then sends SIGKILL to itself. After each kill all values that are found are verified.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.stores.backends import whole_file
from baton.stores.backends.files import ABANDONED_S, FileStore
from baton.stores.base.aligned import AlignedMemory
from baton.stores.base.chunk_name import ChunkName
from baton.stores.base.store import Unusable
from baton.stores.chunks.chunk import HEADER_BYTES_MAX, open_sealed, seal

KEY = b"k" * 32
NUM_NAMES = 20
BODY_BYTES = 200_000
BIN_BYTES = 16_384


@dataclass(slots=True)
class Killed:
    offsets: list[int] = field(default_factory=list)  # Bytes of the file that were written at the kill.
    num_found: int = 0  # Values found and proven, over all checks.
    problems: list[str] = field(default_factory=list)


class _FatalFile:
    """Ends this process when `limit` bytes are written to the file."""

    def __init__(self, file: Any, limit: int, report: int) -> None:
        self._file, self._left, self._report, self._limit = file, limit, report, limit

    def __enter__(self) -> _FatalFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def fileno(self) -> int:
        return int(self._file.fileno())

    def write(self, data: memoryview) -> int:
        if len(data) > self._left:
            self._file.write(data[: self._left])
            os.write(self._report, self._limit.to_bytes(8, "little"))
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= len(data)
        return int(self._file.write(data))


def kill_writers(folder: Path, *, num_kills: int, seed: int) -> Killed:
    draw, killed = random.Random(seed), Killed()
    for number in range(num_kills):
        offset = draw.randrange(BODY_BYTES + 4096)
        killed.offsets += _kill_one(folder, draw.randrange(6), offset, seed=number)
        _check(folder, killed)
    store = FileStore(folder)
    store.collect(time.time() + ABANDONED_S + 1)
    left = [path.name for path in folder.rglob(".*") if path.is_file()]
    killed.problems += [f"{name} would stay for ever" for name in left]
    return killed


def _kill_one(folder: Path, num_whole: int, offset: int, *, seed: int) -> list[int]:
    """A writer that stores `num_whole` values, and is killed in the next one. Returns the offset."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _write_until_killed(folder, num_whole, offset, writer, random.Random(seed))
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader, "rb") as pipe:
        reported = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "it ended by itself"
    assert os.WTERMSIG(status) == signal.SIGKILL, "it ended by itself"
    return [int.from_bytes(reported, "little")] if reported else []


def _write_until_killed(folder: Path, num_whole: int, offset: int, report: int, draw: random.Random) -> None:
    store, count = FileStore(folder, fsync=False), 0

    def open_file(path: Any, mode: str, **options: Any) -> Any:
        nonlocal count
        count += 1
        file = open(path, mode, **options)  # noqa: SIM115 - the store closes it.
        return file if count <= num_whole else _FatalFile(file, offset, report)

    whole_file.open = open_file  # type: ignore[attr-defined]
    while True:
        number = draw.randrange(NUM_NAMES)
        name = _name(number)
        header, body = seal(name, {}, memoryview(_body(number)), KEY)
        store.write(str(name), (header, body))


def _check(folder: Path, killed: Killed) -> None:
    store, memory = FileStore(folder), AlignedMemory().take(HEADER_BYTES_MAX + BODY_BYTES)
    names = [_name(number) for number in range(NUM_NAMES)]
    for number, (name, size) in enumerate(zip(names, store.sizes([str(n) for n in names]), strict=True)):
        if size is None:
            continue
        try:
            stored = memory[: store.read(str(name), memory)]
            if open_sealed(stored, name, {}, BODY_BYTES, KEY) != _body(number):
                killed.problems.append(f"{name}: a wrong value is proven")
        except Unusable as error:
            killed.problems.append(f"{name}: is found and not whole: {error}")
        killed.num_found += 1


def _name(number: int) -> ChunkName:
    return ChunkName("n" * 32, number.to_bytes(32, "big"), 0)


def _body(number: int) -> bytes:
    return random.Random(number).randbytes(BODY_BYTES)


def main(num_kills: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        killed = kill_writers(Path(folder), num_kills=num_kills, seed=0)
    bins = Counter(offset // BIN_BYTES for offset in killed.offsets)
    print(f"{len(killed.offsets)} kills inside a write; {killed.num_found} values found and proven")
    for number in sorted(bins):
        print(f"{number * BIN_BYTES // 1024:5d} KiB {bins[number]:4d} {'#' * bins[number]}")
    print("\n".join(killed.problems) or "no problem")
    sys.exit(bool(killed.problems))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
