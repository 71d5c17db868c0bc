"""Faults of the shared folder, and the fault layer inside a process."""

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab.chaos.disk import Disk, Layer, build_layer

CONTENT = bytes(range(256))
TIMEOUT_S = 60.0
HOUR_S = 3600
DELAY_S = 0.2


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    disk = Disk(tmp_path / "kv", may_mount=False)
    for index in range(40):
        (disk.folder / f"{index}.safetensors").write_bytes(CONTENT)
    return disk


def test_corruption_flips_one_bit_truncates_or_changes_nothing(disk: Disk) -> None:
    disk.corrupt(random.Random(0))
    contents = [path.read_bytes() for path in disk.files()]
    unchanged = sum(content == CONTENT for content in contents)
    shorter = sum(len(content) < len(CONTENT) for content in contents)
    flipped = sum(
        sum((x ^ y).bit_count() for x, y in zip(content, CONTENT, strict=True)) == 1
        for content in contents
        if len(content) == len(CONTENT)
    )
    assert min(unchanged, shorter, flipped) > 0
    assert unchanged + shorter + flipped == len(contents) == 40


def test_fifos_replace_files_and_are_removed(disk: Disk) -> None:
    disk.put_fifos(random.Random(0))
    fifos = [path for path in disk.folder.iterdir() if path.is_fifo()]
    assert 5 < len(fifos) < 35
    assert len(disk.files()) == 40 - len(fifos)
    disk.remove_fifos()
    assert not any(path.is_fifo() for path in disk.folder.iterdir())
    disk.remove_files()
    assert disk.files() == []


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_layer_steps_the_clock_and_hangs_calls_on_files_in_its_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    layer = Layer(tmp_path / "control", library=build_layer(tmp_path), folder=folder)
    program = """
import sys, time
for path in sys.argv[1:]:
    began = time.monotonic()
    with open(path, "wb", buffering=0) as file:
        file.write(b"x")
    print(time.monotonic() - began, time.time(), flush=True)
"""
    outside, inside = tmp_path / "out", folder / "in"
    layer.set(clock_offset_s=HOUR_S, is_hung=True)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(outside), str(inside)],
        env={**os.environ, **layer.env},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        _, now = process.stdout.readline().split()
        assert abs(float(now) - time.time() - HOUR_S) < TIMEOUT_S
        assert not inside.exists()
        layer.set(delay_s=DELAY_S)  # Also for the call that hung.
        took_s, now = process.stdout.readline().split()
    assert float(took_s) >= DELAY_S
    assert abs(float(now) - time.time()) < TIMEOUT_S
    assert inside.exists()
