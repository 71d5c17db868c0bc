"""One chunk's file: whatever has happened to it, it gives the KV that was asked for, or none."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.connectors.shared_storage import files
from baton.connectors.shared_storage.files import ChunkName, LayerShape, Unusable
from baton.connectors.shared_storage.sweep import ABANDONED_S, LOW_WATER, sweep
from baton.connectors.whole_file import TEMPORARY_PREFIX, write_whole

KEY = b"k" * 32
NAME = ChunkName("n" * 32, bytes(range(32)), 0)
SHAPES = {
    f"model.layers.{layer}.self_attn.attn": LayerShape((2, 2, 4, 6), dtype)
    for layer, dtype in ((2, torch.float32), (10, torch.bfloat16))
}


def layers_of(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape.shape, generator=draw).to(shape.dtype) for name, shape in SHAPES.items()}


WHOLE = files.encode(NAME, layers_of(), KEY)


def assert_right_or_unusable(content: bytes, name: ChunkName = NAME, key: bytes = KEY) -> bool:
    """True: it was believed, and is right."""
    try:
        got = files.decode(content, name, SHAPES, key)
    except Unusable:
        return False
    assert got.keys() == SHAPES.keys()
    for layer, tensor in layers_of().items():
        assert torch.equal(got[layer], tensor)
    return True


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = NAME.path_in(tmp_path)
    write_whole(WHOLE, path, fsync=True)
    assert assert_right_or_unusable(files.read(path, SHAPES))
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "nothing is left beside it"


def test_any_changed_byte_is_noticed_or_changes_nothing() -> None:
    believed = 0
    for position in range(len(WHOLE)):
        for flip in (1, 0x80):
            changed = bytearray(WHOLE)
            changed[position] ^= flip
            believed += assert_right_or_unusable(bytes(changed))
    assert believed < 64, "only the header has bytes that mean nothing"


@given(length=st.integers(0, len(WHOLE) - 1))
def test_a_truncated_file_is_never_believed(length: int) -> None:
    assert not assert_right_or_unusable(WHOLE[:length])


@given(junk=st.binary(max_size=400), position=st.integers(0, len(WHOLE)))
def test_bytes_between_are_never_believed_wrongly(junk: bytes, position: int) -> None:
    assert_right_or_unusable(WHOLE[:position] + junk + WHOLE[position:])


@given(st.binary(max_size=600))
def test_arbitrary_bytes_are_unusable(content: bytes) -> None:
    assert not assert_right_or_unusable(content)


@pytest.mark.parametrize(
    "other",
    [
        ChunkName("m" * 32, NAME.key, 0),
        ChunkName(NAME.namespace, bytes(32), 0),
        ChunkName(NAME.namespace, NAME.key, 1),
        ChunkName(NAME.namespace, NAME.key, 0, 10),
    ],
    ids=["another model's", "another prefix's", "another rank's", "another window's"],
)
def test_a_whole_file_under_another_name_is_foreign(other: ChunkName) -> None:
    with pytest.raises(Unusable, match="foreign"):
        files.decode(WHOLE, other, SHAPES, KEY)


def test_a_name_that_is_forged_in_the_metadata_is_noticed() -> None:
    other = ChunkName(NAME.namespace, bytes(32), 0)
    forged = WHOLE.replace(NAME.key.hex().encode(), other.key.hex().encode())
    with pytest.raises(Unusable, match="checksum"):
        files.decode(forged, other, SHAPES, KEY)


def test_without_the_secret_nobody_signs() -> None:
    with pytest.raises(Unusable, match="checksum"):
        files.decode(files.encode(NAME, layers_of(), b"another key of thirty-two bytes!"), NAME, SHAPES, KEY)


def test_another_caches_shape_is_refused() -> None:
    smaller = {name: tensor[:1].contiguous() for name, tensor in layers_of().items()}
    with pytest.raises(Unusable, match="not this cache's"):
        files.decode(files.encode(NAME, smaller, KEY), NAME, SHAPES, KEY)


@pytest.mark.parametrize("num_bytes", [0, 7, len(WHOLE) + files.HEADER_BYTES_MAX + 1])
def test_a_file_of_an_impossible_size_is_not_even_read(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "file"
    with open(path, "wb") as file:
        file.truncate(num_bytes)
    with pytest.raises(Unusable, match="corrupt"):
        files.read(path, SHAPES)


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="gone"):
        files.read(tmp_path / "nothing", SHAPES)
    with pytest.raises(Unusable, match="io"):
        files.read(tmp_path, SHAPES)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    (path / "by a folder").mkdir(parents=True)
    with pytest.raises(OSError, match="taken"):
        write_whole(WHOLE, path, fsync=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]


WRITER = """
import sys
from pathlib import Path
from tests.connectors.test_shared_storage_files import NAME, KEY, layers_of
from baton.connectors.shared_storage import files
from baton.connectors.shared_storage.files import ChunkName
from baton.connectors.whole_file import write_whole
print("writing", flush=True)
for number in range(1_000_000):
    name = ChunkName(NAME.namespace, (number % 50).to_bytes(32, "big"), 0)
    write_whole(files.encode(name, layers_of(number % 50), KEY), name.path_in(Path(sys.argv[1])), fsync=False)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_writer_that_is_killed_leaves_whole_files_only(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    for writer in writers:
        with writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            deadline_s = time.monotonic() + 60
            while len(list(tmp_path.glob("*/*/*.safetensors"))) < 20:
                assert time.monotonic() < deadline_s
            writer.send_signal(signal.SIGKILL)
    found = list(tmp_path.glob("*/*/*.safetensors"))
    for path in found:
        key = bytes.fromhex(path.name.partition(".")[0])
        got = files.decode(files.read(path, SHAPES), ChunkName(NAME.namespace, key, 0), SHAPES, KEY)
        expected = layers_of(int.from_bytes(key, "big"))
        assert all(torch.equal(got[layer], expected[layer]) for layer in SHAPES)


# --- Eviction ----------------------------------------------------------------------------------------


def put(folder: Path, number: int, *, used_s: float, nbytes: int = 100, num_ranks: int = 1) -> list[Path]:
    paths = []
    for rank in range(num_ranks):
        path = ChunkName("a" * 32, number.to_bytes(32, "big"), rank).path_in(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(nbytes))
        os.utime(path, (used_s, used_s))
        paths.append(path)
    return paths


@settings(deadline=None)
@given(
    chunks=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 200)), max_size=12),
    max_bytes=st.none() | st.integers(1, 1500),
    max_age_s=st.none() | st.integers(1, 50),
)
def test_a_sweep_evicts_what_a_plain_reading_of_the_rules_evicts(
    tmp_path_factory: pytest.TempPathFactory,
    chunks: list[tuple[int, int]],
    max_bytes: int | None,
    max_age_s: int | None,
) -> None:
    folder = tmp_path_factory.mktemp("kv")
    now_s = 1000.0
    # No two equally old, or the order among them would be anybody's choice.
    aged = [(age + number / 100, nbytes) for number, (age, nbytes) in enumerate(chunks)]
    paths = {
        number: put(folder, number, used_s=now_s - age, nbytes=nbytes, num_ranks=2)
        for number, (age, nbytes) in enumerate(aged)
    }
    swept = sweep(folder, max_bytes=max_bytes, max_age_s=max_age_s, now_s=now_s)

    stays = {n for n, (age, _) in enumerate(aged) if max_age_s is None or age <= max_age_s + 1e-9}
    if max_bytes is not None and sum(2 * nbytes for _, nbytes in aged) > max_bytes:
        for number in sorted(stays, key=lambda n: -aged[n][0]):
            if sum(2 * aged[n][1] for n in stays) <= int(LOW_WATER * max_bytes):
                break
            stays.remove(number)
    assert {number for number, of in paths.items() if all(p.exists() for p in of)} == stays
    assert not any(p.exists() for number, of in paths.items() if number not in stays for p in of)
    assert (swept.num_kept, swept.num_evicted) == (len(stays), len(aged) - len(stays))


def test_what_a_dead_writer_has_left_is_removed_and_strangers_files_are_not(tmp_path: Path) -> None:
    (kept,) = put(tmp_path, 1, used_s=1000.0)
    left, fresh = kept.with_name(TEMPORARY_PREFIX + "a"), kept.with_name(TEMPORARY_PREFIX + "b")
    strangers = [tmp_path / "README", kept.with_name("notes.txt")]
    for path, used_s in [(left, 999.0 - ABANDONED_S), (fresh, 990.0), *((s, 0.0) for s in strangers)]:
        path.write_bytes(b"...")
        os.utime(path, (used_s, used_s))
    sweep(tmp_path, max_bytes=10_000, max_age_s=None, now_s=1000.0)
    assert not left.exists()
    assert all(path.exists() for path in (kept, fresh, *strangers))
