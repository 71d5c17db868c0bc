"""Files that a prefix needs, compared with a reference that checks single tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.connectors.storage.stores.layer_kinds import LayerKind, kinds_of, num_served
from baton.core.kv_groups import KVCacheGroup

windows = st.lists(st.none() | st.integers(1, 40), min_size=1, max_size=4)


def kinds_with(windows: list[int | None], chunk_blocks: int, block_tokens: int) -> tuple[LayerKind, ...]:
    groups = [KVCacheGroup((layer,), window) for layer, window in enumerate(windows)]
    return kinds_of(groups, chunk_blocks=chunk_blocks, block_tokens=block_tokens)


def chunks_seen(kind: LayerKind, num_chunks: int) -> set[int]:
    """Chunks needed by the token after `num_chunks` chunks, and by their last token."""
    chunk_tokens = kind.chunk_blocks * kind.block_tokens
    end = num_chunks * chunk_tokens
    first = 0 if kind.window is None else max(0, end - kind.window)
    return {token // chunk_tokens for token in range(first, end)}


@given(windows, st.integers(1, 5), st.integers(1, 6), st.integers(0, 8), st.data())
def test_a_prefix_is_served_if_and_only_if_its_needed_files_are_stored(
    windows: list[int | None], chunk_blocks: int, block_tokens: int, num_chunks: int, data: st.DataObject
) -> None:
    kinds = kinds_with(windows, chunk_blocks, block_tokens)
    all_files = [(kind, chunk) for kind in kinds for chunk in range(num_chunks)]
    missing = data.draw(st.sets(st.sampled_from(all_files), max_size=4) if all_files else st.just(set()))

    def is_served(num: int) -> bool:
        return all((kind, chunk) not in missing for kind in kinds for chunk in chunks_seen(kind, num))

    longest = max(num for num in range(num_chunks + 1) if is_served(num))
    assert num_served(kinds, num_chunks, lambda kind, chunk: (kind, chunk) not in missing) == longest


@given(windows, st.integers(1, 5), st.integers(1, 6), st.integers(1, 8))
def test_files_hold_exactly_the_blocks_that_a_prefix_can_need(
    windows: list[int | None], chunk_blocks: int, block_tokens: int, num_chunks: int
) -> None:
    for kind in kinds_with(windows, chunk_blocks, block_tokens):
        stored = set(range(kind.first_stored, chunk_blocks))
        seen = {
            block % chunk_blocks
            for end in range(1, num_chunks + 1)
            for block in range(kind.first_held(end * chunk_blocks * block_tokens), end * chunk_blocks)
        }
        assert seen <= stored
        assert kind.first_stored in seen
        assert len(stored) == kind.num_stored


@given(windows, st.integers(1, 5), st.integers(1, 6), st.integers(0, 200), st.integers(1, 100))
def test_the_step_that_completes_a_chunk_holds_the_blocks_of_its_files(
    windows: list[int | None], chunk_blocks: int, block_tokens: int, num_before: int, num_scheduled: int
) -> None:
    chunk_tokens = chunk_blocks * block_tokens
    for kind in kinds_with(windows, chunk_blocks, block_tokens):
        for chunk in range(num_before // chunk_tokens, (num_before + num_scheduled) // chunk_tokens):
            assert chunk * chunk_blocks + kind.first_stored >= kind.first_held(num_before)


@pytest.mark.parametrize(
    ("windows", "expected"),
    [([None], [(None, (0,))]), ([7, None, 7, 3], [(None, (1,)), (3, (3,)), (7, (0, 2))])],
)
def test_layers_with_equal_windows_are_one_kind(windows: list[int | None], expected: object) -> None:
    assert [(kind.window, kind.groups) for kind in kinds_with(windows, 2, 4)] == expected
