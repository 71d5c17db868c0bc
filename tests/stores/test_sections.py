"""A chunk that is read section by section while its value changes."""

import os
from pathlib import Path

import pytest

from baton.stores.backends.files import FileStore
from baton.stores.backends.tiers import Tiers
from baton.stores.base.aligned import AlignedMemory
from baton.stores.base.chunk_name import ChunkName
from baton.stores.base.store import Unusable
from baton.stores.chunks.chunk import seal
from baton.stores.chunks.sections import SectionReader

ENDS = (4096, 9000)
ENTRIES = {"layer": {"dtype": "U8", "shape": [9000], "data_offsets": [0, 9000]}}
KEY = bytes(32)
NAME = ChunkName("aaaa", b"\1" * 32, 0)


@pytest.fixture(params=["cached", "direct"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FileStore:
    store = FileStore(tmp_path, fsync=False, direct=request.param == "direct")
    store.check()
    return store


def put(store: FileStore) -> list[bytes]:
    """Returns the sections."""
    body = os.urandom(ENDS[-1])
    header, sealed = seal(NAME, ENTRIES, memoryview(body), KEY, ends=ENDS)
    store.write(str(NAME), (header, sealed))
    return [body[: ENDS[0]], body[ENDS[0] :]]


class Reader:
    def __init__(self, store: FileStore) -> None:
        self._reader = SectionReader(Tiers([store]), [(NAME, KEY)], ENTRIES, ENDS)
        self._memory = AlignedMemory()

    def read(self, section: int) -> bytes:
        return bytes(self._reader.read(section, self._memory).proven)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_sections_of_two_writes_are_not_mixed(store: FileStore, order: tuple[int, int]) -> None:
    first, second = order
    before, reader = put(store), Reader(store)
    assert reader.read(first) == before[first]
    after = put(store)
    with pytest.raises(Unusable, match="gone: it was replaced"):
        reader.read(second)
    again = Reader(store)
    assert [again.read(first), again.read(second)] == [after[first], after[second]]


def test_a_damaged_section_is_corrupt_and_its_chunk_is_removed(store: FileStore) -> None:
    sections, reader = put(store), Reader(store)
    assert reader.read(0) == sections[0]
    path = NAME.path_in(store.folder)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(Unusable, match="corrupt"):
        reader.read(1)
    assert store.sizes([str(NAME)]) == [None]
