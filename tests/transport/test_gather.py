"""The compiled copy, at each level of instructions that this CPU has."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.errors import TransferError
from baton.transport.base.gather import LEVELS, Gather
from baton.transport.base.spans import Copies
from tests.transport.copy_library import built

BUFFER_BYTES = 1 << 16


@pytest.fixture(params=range(len(LEVELS)), ids=LEVELS)
def gather(request: pytest.FixtureRequest) -> Gather:
    if request.param > LEVELS.index(Gather(built()).instructions):
        pytest.skip("this CPU does not have it")
    return Gather(built(), request.param)


@st.composite
def copies(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(to, from, nbytes), with gaps of any size between destinations, in any order."""
    made, to = [], draw(st.integers(0, 70))
    lengths = st.integers(0, 300) | st.sampled_from((1023, 1024, 1025, 4096, 5000))
    for nbytes in draw(st.lists(lengths, max_size=12)):
        made.append((to, draw(st.integers(0, BUFFER_BYTES - nbytes)), nbytes))
        to += nbytes + draw(st.just(0) | st.integers(1, 70))
    return draw(st.permutations(made))


@given(copies())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_exactly_the_named_bytes_are_copied(gather: Gather, copies: list[tuple[int, int, int]]) -> None:
    source = np.random.default_rng(1).integers(0, 256, BUFFER_BYTES, dtype=np.uint8)
    target, expected = np.full(BUFFER_BYTES, 7, np.uint8), np.full(BUFFER_BYTES, 7, np.uint8)
    for to, start, nbytes in copies:
        expected[to : to + nbytes] = source[start : start + nbytes]
    table = np.array(copies, dtype=np.int64).reshape(-1, 3)  # Columns, so that no array is contiguous.
    table += (target.ctypes.data, source.ctypes.data, 0)
    gather(Copies(table[:, 0], table[:, 1], table[:, 2]))
    assert np.array_equal(target, expected)


def test_a_library_that_was_not_built_is_named(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="not built: run scripts/build-library gather"):
        Gather(tmp_path / "_gather.so")


def test_a_library_of_another_version_is_not_used(tmp_path: Path) -> None:
    other = tmp_path / "_gather.so"
    other.write_bytes(built().read_bytes().replace(b"baton_gather_1", b"baton_gather_0"))
    with pytest.raises(TransferError, match="another version"):
        Gather(other)
