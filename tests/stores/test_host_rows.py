"""Rows of host memory compared with the caches they were copied from."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import ConfigError
from baton.stores.host.rows import HostRows, block_rows, runs

NUM_BLOCKS, HEADS, TOKENS, CONTENT = 6, 2, 4, 8


def cache_of(order: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """`[blocks, heads, tokens, content]`, with the bytes in the given order."""
    if order == "heads first":
        return torch.randn(NUM_BLOCKS, HEADS, TOKENS, CONTENT).to(dtype)
    if order == "tokens first":
        return torch.randn(NUM_BLOCKS, TOKENS, HEADS, CONTENT).to(dtype).permute(0, 2, 1, 3)
    assert order == "layers within a block"
    return torch.randn(NUM_BLOCKS, 3, HEADS, TOKENS, CONTENT).to(dtype)[:, 1]


@pytest.mark.parametrize("order", ["heads first", "tokens first", "layers within a block"])
@given(data=st.data())
def test_what_was_stored_comes_back_into_other_blocks(order: str, data: st.DataObject) -> None:
    caches = {name: cache_of(order) for name in ("a", "b")}
    before = {name: cache.clone() for name, cache in caches.items()}
    rows = HostRows(caches, 9)
    blocks = data.draw(st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True))
    places = data.draw(st.permutations(range(9)))[: len(blocks)]
    targets = data.draw(st.permutations(range(NUM_BLOCKS)))[: len(blocks)]
    rows.store(blocks, places)
    for cache in caches.values():
        cache.zero_()
    rows.load(targets, places)
    for name, cache in caches.items():
        expected = torch.zeros_like(cache)
        for block, target in zip(blocks, targets, strict=True):
            expected[target] = before[name][block]
        assert torch.equal(cache, expected)


def test_blocks_that_are_not_contiguous_are_refused() -> None:
    planes = torch.zeros(2, NUM_BLOCKS, HEADS, TOKENS, CONTENT).transpose(0, 1)
    with pytest.raises(ConfigError, match=r"kv_caches\.layer: .*not contiguous"):
        block_rows("layer", planes)


@given(st.lists(st.integers(0, 9), unique=True))
def test_runs_are_the_same_pairs(sources: list[int]) -> None:
    targets = sorted(sources) if len(sources) % 2 else sources
    found = [(s + i, t + i) for s, t, count in runs(sources, targets) for i in range(count)]
    assert found == list(zip(sources, targets, strict=True))
    assert list(runs([4, 5, 9], [0, 1, 2])) == [(4, 0, 2), (9, 2, 1)]


@pytest.mark.parametrize(("blocks", "rows"), [([NUM_BLOCKS], [0]), ([0], [9]), ([0, 1], [8, 9]), ([-1], [0])])
def test_ids_out_of_range_fail_an_assertion(blocks: list[int], rows: list[int]) -> None:
    host_rows = HostRows({"a": cache_of("heads first")}, 9)
    with pytest.raises(AssertionError):
        host_rows.store(blocks, rows)
    with pytest.raises(AssertionError):
        host_rows.load(blocks, rows)
