"""One chunk's file: after any damage it gives the requested KV or nothing."""

import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.connectors.storage.stores.form import SECTION_BYTES_MIN, SECTIONS_MAX, FileForm, LayerShape
from baton.core.errors import ConfigError
from baton.stores.backends.files import ABANDONED_S, FileStore
from baton.stores.backends.sweep import LOW_WATER, Limits, sweep
from baton.stores.backends.whole_file import TEMPORARY_PREFIX, write_files
from baton.stores.base.aligned import AlignedMemory
from baton.stores.base.chunk_name import ChunkName
from baton.stores.base.store import Unusable
from baton.stores.chunks.chunk import (
    HEADER_BYTES_MAX,
    SealedHeader,
    check_sealed,
    header_nbytes,
    open_sealed,
    seal,
    sections_of,
)

KEY = b"k" * 32
MEMORY = AlignedMemory()
NAME = ChunkName("n" * 32, bytes(range(32)), 0)
SHAPES = {
    f"model.layers.{layer}.self_attn.attn": LayerShape((2, 2, 4, 6), dtype)
    for layer, dtype in ((2, torch.float32), (10, torch.bfloat16))
}


def layers_of(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape.shape, generator=draw).to(shape.dtype) for name, shape in SHAPES.items()}


FORM = FileForm(SHAPES)


def body_of(layers: Mapping[str, torch.Tensor], form: FileForm = FORM) -> torch.Tensor:
    body = form.new_body()
    for name, layer in form.layers_of(body).items():
        layer.copy_(layers[name])
    return body


def write(
    path: Path,
    name: ChunkName,
    form: FileForm,
    body: torch.Tensor,
    key: bytes,
    *,
    fsync: bool = False,
    encrypts: bool = False,
) -> None:
    header, sealed = seal(name, form.entries, body.numpy().data, key, encrypts=encrypts)
    FileStore(path.parent, fsync=fsync).write(path.name, (header, sealed))


def read(path: Path, name: ChunkName, form: FileForm, key: bytes) -> torch.Tensor:
    memory = MEMORY.take(form.nbytes + HEADER_BYTES_MAX)
    nbytes = FileStore(path.parent).read(path.name, memory)
    return form.body_in(open_sealed(memory[:nbytes], name, form.entries, form.nbytes, key))


def written(path: Path, name: ChunkName = NAME, key: bytes = KEY, seed: int = 0) -> bytes:
    write(path, name, FORM, body_of(layers_of(seed)), key)
    return path.read_bytes()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a file that each test rewrites."""
    return tmp_path_factory.mktemp("kv") / "file"


@pytest.fixture(scope="module")
def whole(path: Path) -> bytes:
    return written(path)


def assert_right_or_unusable(path: Path, content: bytes) -> bool:
    """Returns whether it was accepted; asserts that an accepted file is right."""
    path.write_bytes(content)
    try:
        body = read(path, NAME, FORM, KEY)
    except Unusable:
        return False
    got = FORM.layers_of(body)
    assert got.keys() == SHAPES.keys()
    for layer, tensor in layers_of().items():
        assert torch.equal(got[layer], tensor)
    return True


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = NAME.path_in(tmp_path)
    write(path, NAME, FORM, body_of(layers_of()), KEY, fsync=True)
    assert assert_right_or_unusable(path, path.read_bytes())
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "no other file may be left"


def test_files_can_be_read_as_safetensors(whole: bytes) -> None:
    read = safetensors.torch.load(whole)
    assert read.keys() == SHAPES.keys()
    assert all(torch.equal(read[layer], tensor) for layer, tensor in layers_of().items())


def test_each_layer_is_aligned() -> None:
    shapes = {"a": LayerShape((3,), torch.uint8), "b": LayerShape((5,), torch.float32)}
    form = FileForm(shapes)
    body = form.new_body()
    for name, layer in form.layers_of(body).items():
        assert layer.dtype == shapes[name].dtype
        layer.fill_(7)
    assert form.nbytes == 23
    assert body.tolist().count(7) == 3


def test_a_dtype_that_files_cannot_hold_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"kv_caches\.a: has dtype torch\.complex64"):
        FileForm({"a": LayerShape((3,), torch.complex64)})


def test_sections_are_successive_layers_in_their_order() -> None:
    layer = LayerShape((SECTION_BYTES_MIN // 4,), torch.int16)  # Half of a section.
    form = FileForm({f"layer {number}": layer for number in range(3 * SECTIONS_MAX)})
    places = sections_of(form.section_ends)
    assert len(places) == SECTIONS_MAX
    memory = torch.arange(form.nbytes, dtype=torch.int64).to(torch.uint8)
    of_sections = [form.layers_of(memory[place], place) for place in places]
    assert [[*layers] for layers in of_sections] == [
        [f"layer {number}" for number in range(first, first + 3)] for first in range(0, 24, 3)
    ]
    whole = form.layers_of(memory)
    assert all(torch.equal(whole[name], part[name]) for part in of_sections for name in part)


@pytest.mark.parametrize(
    "layers",
    [
        {},
        {"small": LayerShape((SECTION_BYTES_MIN,), torch.uint8)},
        {"one": LayerShape((9 * SECTION_BYTES_MIN,), torch.uint8)},
        {"odd": LayerShape((SECTION_BYTES_MIN * 2 + 1,), torch.uint8), "b": LayerShape((8,), torch.float32)},
    ],
)
def test_a_small_body_or_one_that_is_not_aligned_is_one_section(layers: dict[str, LayerShape]) -> None:
    form = FileForm(layers)
    assert form.section_ends == (form.nbytes,)


@pytest.mark.parametrize("encrypts", [False, True])
def test_each_section_proves_itself_and_no_other(encrypts: bool) -> None:
    ends, bodies = (3, 70, 70, 100), [os.urandom(100), bytes(100)]
    writes = [seal(NAME, {}, memoryview(body), KEY, encrypts=encrypts, ends=ends) for body in bodies]
    places = sections_of(ends)
    for header, _ in writes:
        assert len(header) == header_nbytes(NAME, {}, ends)
        opener = SealedHeader(memoryview(header), NAME, {}, KEY, ends)
        for number in range(len(ends)):
            for other, (other_header, sealed) in enumerate(writes):
                for place in places:
                    section = memoryview(bytearray(sealed[place]))
                    is_right = other_header is header and place == places[number]
                    is_empty = place == places[number] == slice(70, 70)
                    if is_right:
                        opener.open(number, section)
                        assert section == bodies[other][place]
                    elif not is_empty or other_header is header:
                        with pytest.raises(Unusable, match="checksum"):
                            opener.open(number, section)
    header, sealed = writes[0]
    for wrong in ((3, 70, 100), (100,), (3, 71, 71, 100)):
        with pytest.raises(Unusable, match="do not match"):
            SealedHeader(memoryview(header), NAME, {}, KEY, wrong)


@pytest.mark.parametrize("encrypts", [False, True])
def test_a_chunk_of_any_model_is_verified_by_its_sections(encrypts: bool) -> None:
    form, ends = FORM, (8, FORM.nbytes)
    body = body_of(layers_of()).numpy().data
    stored = bytearray(b"".join(seal(NAME, form.entries, body, KEY, encrypts=encrypts, ends=ends)))
    check_sealed(memoryview(bytearray(stored)), NAME, KEY)
    for position in (-1, len(stored) - FORM.nbytes):  # One byte of each section.
        changed = bytearray(stored)
        changed[position] ^= 1
        with pytest.raises(Unusable, match="checksum"):
            check_sealed(memoryview(changed), NAME, KEY)
    for told in (b"9,%d" % form.nbytes, b"8,%d" % (form.nbytes - 1), b"-8,8", b"8, 8", b"x", b""):
        with pytest.raises(Unusable, match="corrupt"):
            check_sealed(memoryview(stored.replace(b"8,%d" % form.nbytes, told)), NAME, KEY)


@pytest.mark.slow
def test_any_changed_byte_is_noticed(path: Path, whole: bytes) -> None:
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1 << position % 8
        assert not assert_right_or_unusable(path, bytes(changed))


# Share of the file's length, which is not known yet; more often its beginning, its body and its end.
shares = st.floats(0, 1) | st.sampled_from([0.0, FORM.nbytes, 1.0])


def test_a_header_without_end_is_never_used(path: Path) -> None:
    header = b'{"x":' + b"[" * 100_000
    assert not assert_right_or_unusable(path, len(header).to_bytes(8, "little") + header + bytes(FORM.nbytes))


@given(before=shares, junk=st.binary(max_size=600), after=shares)
def test_a_truncated_or_mixed_file_is_never_used(
    path: Path, whole: bytes, before: float, junk: bytes, after: float
) -> None:
    """The beginning of the file, arbitrary bytes, and its end."""
    first, last = (
        len(whole) - FORM.nbytes if share == FORM.nbytes else int(share * len(whole))
        for share in (before, after)
    )
    content = whole[:first] + junk + whole[last:]
    assert assert_right_or_unusable(path, content) == (content == whole)


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
def test_a_whole_file_under_another_name_is_foreign(path: Path, other: ChunkName) -> None:
    written(path)
    with pytest.raises(Unusable, match="foreign"):
        read(path, other, FORM, KEY)


def test_a_forged_name_in_the_metadata_is_noticed(path: Path, whole: bytes) -> None:
    other = ChunkName(NAME.namespace, bytes(32), 0)
    path.write_bytes(whole.replace(NAME.key.hex().encode(), other.key.hex().encode()))
    with pytest.raises(Unusable, match="checksum"):
        read(path, other, FORM, KEY)


def test_files_cannot_be_signed_without_the_secret(path: Path) -> None:
    written(path, key=b"another key of thirty-two bytes!")
    with pytest.raises(Unusable, match="checksum"):
        read(path, NAME, FORM, KEY)


def test_another_caches_shape_is_refused(path: Path) -> None:
    """The other cache's file has equally many bytes, and is signed."""
    turned = {name: LayerShape(shape.shape[::-1], shape.dtype) for name, shape in SHAPES.items()}
    form = FileForm(turned)
    write(path, NAME, form, form.new_body().zero_(), KEY, fsync=False)
    with pytest.raises(Unusable, match="do not match this cache"):
        read(path, NAME, FORM, KEY)


@pytest.mark.parametrize("num_bytes", [0, 7, FORM.nbytes - 1, FORM.nbytes + HEADER_BYTES_MAX + 1])
def test_a_file_of_an_impossible_size_is_not_read(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "file"
    with open(path, "wb") as file:
        file.truncate(num_bytes)
    with pytest.raises(Unusable, match=f"it has {num_bytes} bytes"):
        read(path, NAME, FORM, KEY)


def test_an_unreadable_file_gives_a_reason(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="gone"):
        read(tmp_path / "nothing", NAME, FORM, KEY)
    with pytest.raises(Unusable, match="foreign: it is not a regular file"):
        read(tmp_path, NAME, FORM, KEY)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    (path / "by a folder").mkdir(parents=True)
    (error,) = write_files([([b"content"], path)], fsync=False)
    assert "taken" in str(error)
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("for_group", "file_mode", "folder_mode"), [(False, 0o600, 0o700), (True, 0o660, 0o770)]
)
def test_only_the_owner_or_its_group_can_read(
    tmp_path: Path, for_group: bool, file_mode: int, folder_mode: int
) -> None:
    path = tmp_path / "new" / "folder" / "file"
    assert write_files([([b"content"], path)], fsync=False, for_group=for_group) == [None]
    assert stat.S_IMODE(path.stat().st_mode) == file_mode
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in path.parents[:2]] == [folder_mode] * 2


def test_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    """The disk becomes full during the write; here this process's file size limit is reached instead."""
    path = NAME.path_in(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        (error,) = write_files([((bytes(150), bytes(150)), path)], fsync=False)
        assert "File too large" in str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(path.parent.iterdir()) == []


WRITER = """
import sys, threading
from pathlib import Path
from tests.connectors.test_shared_storage_files import NAME, written
from baton.stores.base.chunk_name import ChunkName
def write():
    for number in range(1_000_000):
        name = ChunkName(NAME.namespace, (number % 50).to_bytes(32, "big"), 0)
        written(name.path_in(Path(sys.argv[1])), name, seed=number % 50)
print("writing", flush=True)
threads = [threading.Thread(target=write) for _ in range(2)]
for thread in threads:
    thread.start()
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_writer_leaves_complete_files_only(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        deadline_s = time.monotonic() + 60
        while len(list(tmp_path.glob("*/*/*.safetensors"))) < 20:
            assert time.monotonic() < deadline_s
        writer.send_signal(signal.SIGKILL)
    found = list(tmp_path.glob("*/*/*.safetensors"))
    for path in found:
        key = bytes.fromhex(path.name.partition(".")[0])
        got = FORM.layers_of(read(path, ChunkName(NAME.namespace, key, 0), FORM, KEY))
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
def test_a_sweep_follows_the_rules(
    tmp_path_factory: pytest.TempPathFactory,
    chunks: list[tuple[int, int]],
    max_bytes: int | None,
    max_age_s: int | None,
) -> None:
    folder = tmp_path_factory.mktemp("kv")
    now_s = 1000.0
    # No two files are equally old, because their order would be undefined.
    aged = [(age + number / 100, nbytes) for number, (age, nbytes) in enumerate(chunks)]
    paths = {
        number: put(folder, number, used_s=now_s - age, nbytes=nbytes, num_ranks=2)
        for number, (age, nbytes) in enumerate(aged)
    }
    swept = sweep(FileStore(folder), Limits(max_bytes, max_age_s), now_s=now_s)

    stays = {n for n, (age, _) in enumerate(aged) if max_age_s is None or age <= max_age_s + 1e-9}
    if max_bytes is not None and sum(2 * aged[n][1] for n in stays) > max_bytes:
        for number in sorted(stays, key=lambda n: -aged[n][0]):
            if sum(2 * aged[n][1] for n in stays) <= int(LOW_WATER * max_bytes):
                break
            stays.remove(number)
    assert {number for number, of in paths.items() if all(p.exists() for p in of)} == stays
    assert not any(p.exists() for number, of in paths.items() if number not in stays for p in of)
    assert (swept.num_kept, swept.num_evicted) == (len(stays), len(aged) - len(stays))


def test_a_sweep_removes_abandoned_files_and_no_foreign_ones(tmp_path: Path) -> None:
    (kept,) = put(tmp_path, 1, used_s=1000.0)
    left, fresh = kept.with_name(TEMPORARY_PREFIX + "a"), kept.with_name(TEMPORARY_PREFIX + "b")
    strangers = [tmp_path / "README", kept.with_name("notes.txt")]
    for path, used_s in [(left, 999.0 - ABANDONED_S), (fresh, 990.0), *((s, 0.0) for s in strangers)]:
        path.write_bytes(b"...")
        os.utime(path, (used_s, used_s))
    sweep(FileStore(tmp_path), Limits(10_000, None), now_s=1000.0)
    assert not left.exists()
    assert all(path.exists() for path in (kept, fresh, *strangers))


def test_a_file_that_cannot_be_removed_does_not_stop_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest file is such a file, for example another user's in a shared folder."""
    paths = [put(tmp_path, number, used_s=100.0 + number)[0] for number in range(4)]
    unlink = os.unlink

    def refuse(path: str) -> None:
        if path == str(paths[0]):
            raise PermissionError(1, "Operation not permitted", path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", refuse)
    swept = sweep(FileStore(tmp_path), Limits(300, None), now_s=1000.0)
    assert [path.exists() for path in paths] == [True, False, False, True]
    assert (swept.num_kept, swept.num_evicted, swept.kept_bytes) == (2, 2, 200)
    assert "Operation not permitted" in swept.error
