"""Copies of a rank's blocks out of its cache and into it, with the copy library and without."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.connectors.storage import row_copies
from baton.connectors.storage.stores.cache_blocks import CacheBlocks
from baton.connectors.storage.stores.layer_kinds import LayerKind
from baton.stores.base.aligned import AlignedPool
from baton.transport.base.gather import copy_library

NUM_BLOCKS, CHUNK_BLOCKS, BLOCK_TOKENS = 12, 4, 2
POOL = AlignedPool(1)


def caches(seed: int) -> dict[str, torch.Tensor]:
    """Caches of layers with blocks in one piece, with unused memory between them, and in no piece."""
    draw = torch.Generator().manual_seed(seed)
    padded = torch.rand(NUM_BLOCKS, 3, BLOCK_TOKENS, generator=draw)[:, :2]
    apart = torch.rand(2, NUM_BLOCKS, BLOCK_TOKENS, generator=draw).transpose(0, 1)
    return {"whole": torch.rand(NUM_BLOCKS, 5, generator=draw), "padded": padded, "apart": apart}


def blocks_of(layers: dict[str, torch.Tensor]) -> CacheBlocks:
    return CacheBlocks(LayerKind(None, (0,), CHUNK_BLOCKS, BLOCK_TOKENS), [layers])


@pytest.mark.parametrize("has_library", [False, True])
@given(
    st.permutations(range(NUM_BLOCKS)), st.permutations(range(NUM_BLOCKS)), st.integers(0, CHUNK_BLOCKS - 1)
)
def test_blocks_come_back_at_other_places(
    has_library: bool, from_ids: list[int], to_ids: list[int], num_present: int
) -> None:
    if has_library and copy_library() is None:
        pytest.skip("the copy library is not built: scripts/build-library gather")
    source, target = caches(1), caches(2)
    expected = {name: cache.clone() for name, cache in target.items()}
    with pytest.MonkeyPatch.context() as patch:
        if not has_library:
            patch.setattr(row_copies, "copy_library", lambda: None)
        ours, theirs = blocks_of(source), blocks_of(target)
    memory = POOL.take(ours.form.nbytes)
    body = ours.form.body_in(memory)
    ours.copy_out(from_ids[:CHUNK_BLOCKS], body)
    theirs.copy_in(body, to_ids[num_present:CHUNK_BLOCKS])
    del body
    POOL.give_back(memory)
    for name, cache in expected.items():
        cache[to_ids[num_present:CHUNK_BLOCKS]] = source[name][from_ids[num_present:CHUNK_BLOCKS]]
        assert torch.equal(target[name], cache), name


def test_a_block_beyond_the_cache_is_a_defect_of_ours() -> None:
    """The library would write anywhere."""
    blocks = blocks_of(caches(1))
    with pytest.raises(AssertionError, match="not all in"):
        blocks.copy_in(blocks.form.new_body(), [0, 1, 2, NUM_BLOCKS])
