"""Stores after a crash of the machine or kill -9: what is found is whole, and what was stored is found."""

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.stores.backends import whole_file
from baton.stores.backends.files import ABANDONED_S, FileStore
from baton.stores.base.aligned import AlignedMemory
from baton.stores.base.chunk_name import ChunkName
from baton.stores.base.store import Unusable
from baton.stores.chunks.chunk import HEADER_BYTES_MAX, open_sealed, seal
from tests.stores.crashing_disk import Call, build, images, recorded
from tests.stores.kills import kill_writers

KEY = b"k" * 32
NUM_VALUES, BODY_BYTES = 4, 3000
NUM_CRASHES = 100
MEMORY = AlignedMemory()


def name_of(number: int) -> ChunkName:
    return ChunkName("n" * 32, (number * 7).to_bytes(1, "big") * 32, 0)


def body_of(number: int) -> bytes:
    return random.Random(number).randbytes(BODY_BYTES)


def write_all(store: FileStore, calls: list[Call]) -> None:
    """Some values are written twice, and so replaced by equally good ones."""
    for number in (*range(NUM_VALUES), 0):
        name = name_of(number)
        header, body = seal(name, {}, memoryview(body_of(number)), KEY)
        store.write(str(name), (header, body))
        calls.append(Call("done", str(name)))


def problem_of(folder: Path, done: list[str], *, is_durable: bool) -> str:
    store = FileStore(folder)
    for number in range(NUM_VALUES):
        name = name_of(number)
        memory = MEMORY.take(HEADER_BYTES_MAX + BODY_BYTES)
        try:
            stored = memory[: store.read(str(name), memory)]
            if open_sealed(stored, name, {}, BODY_BYTES, KEY) != body_of(number):
                return "a wrong value is proven"
        except Unusable as error:
            if is_durable and str(name) in done:
                return f"a value that was stored is {error.reason}"
            if is_durable and error.reason != "gone":
                return f"a value is found that is not whole: {error}"
    store.collect(time.time() + ABANDONED_S + 1)
    left = [path for path in folder.rglob("*") if path.is_file() and path.name.startswith(".")]
    return f"{left} would stay for ever" if left else ""


class OsWithout:
    """The module `os`, with an fsync that leaves some files out."""

    def __init__(self, is_left_out: Callable[[int], bool]) -> None:
        self._is_left_out = is_left_out

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def fsync(self, fileno: int) -> None:
        if not self._is_left_out(fileno):
            os.fsync(fileno)


def problems(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    fsync: bool = True,
    is_left_out: Callable[[int], bool] = lambda fileno: False,
) -> Counter[str]:
    folder = tmp_path / "recorded"
    folder.mkdir()
    monkeypatch.setattr(whole_file, "os", OsWithout(is_left_out))
    with recorded(folder, monkeypatch) as calls:
        write_all(FileStore(folder, fsync=fsync), calls)
    found: Counter[str] = Counter()
    for seed in range(NUM_CRASHES):
        image, done = images(calls, random.Random(seed))
        after = tmp_path / str(seed)
        after.mkdir()
        build(image, after)
        found[problem_of(after, done, is_durable=fsync)] += 1
    return found


def test_a_crash_loses_nothing_that_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(tmp_path, monkeypatch) == {"": NUM_CRASHES}


def test_a_system_that_cannot_write_early_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_file, "_begin_writing", None)
    assert problems(tmp_path, monkeypatch) == {"": NUM_CRASHES}


def test_without_fsync_a_crash_loses_values_and_never_gives_a_wrong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert problems(tmp_path, monkeypatch, fsync=False) == {"": NUM_CRASHES}


def is_folder(fileno: int) -> bool:
    return os.path.isdir(f"/proc/self/fd/{fileno}")


def is_new_parent(fileno: int) -> bool:
    """Whether this is the parent of a folder that the store created; the parent has no files."""
    path = os.readlink(f"/proc/self/fd/{fileno}")
    return os.path.isdir(path) and not any(file.is_file() for file in Path(path).iterdir())


@pytest.mark.parametrize(
    ("is_left_out", "noticed"),
    [
        (lambda fileno: not is_folder(fileno), "a value is found that is not whole"),
        (is_folder, "a value that was stored is gone"),
        (is_new_parent, "a value that was stored is gone"),
    ],
    ids=["of files", "of folders", "of the parents of new folders"],
)
def test_a_missing_fsync_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_left_out: Callable[[int], bool], noticed: str
) -> None:
    found = problems(tmp_path, monkeypatch, is_left_out=is_left_out)
    assert any(problem.startswith(noticed) for problem in found), found


def test_a_write_in_place_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_file, "TEMPORARY_PREFIX", "")
    monkeypatch.setattr(whole_file.secrets, "token_hex", lambda nbytes: "")
    monkeypatch.setattr(Path, "with_name", lambda path, name: path.parent / name.rstrip("-"))
    monkeypatch.setattr(whole_file, "_open_private", lambda path, flags: os.open(path, flags & ~os.O_EXCL))
    found = problems(tmp_path, monkeypatch)
    assert any(problem.startswith("a value is found that is not whole") for problem in found), found


@pytest.mark.processes
def test_writers_that_are_killed_inside_a_write_leave_whole_values_only(tmp_path: Path) -> None:
    killed = kill_writers(tmp_path, num_kills=12, seed=1)
    assert killed.problems == []
    assert len(killed.offsets) == 12, "each was killed inside a write"
    assert killed.num_found > 0
    assert len({offset // 4096 for offset in killed.offsets}) > 6, "at many places"
