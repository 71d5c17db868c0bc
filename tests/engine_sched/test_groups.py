"""Layers with a window in their own block tables: freed blocks, prefix hits, and failures."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.config import CacheConfig
from baton.core.errors import UserError
from baton.core.kv_groups import KVCacheGroup, group_layers, is_hybrid, num_places, places_of
from baton.engine.cache.kv_cache import KVCache
from baton.engine.request import Request
from tests.engine_sched.world import BLOCK, World, engine_request

LONG = list(range(1, 41))  # Ten blocks.
ALTERNATING = (8, None, 8, None)  # Two blocks before the one that is written.


def test_layers_are_grouped_by_window_in_groups_of_one_size() -> None:
    assert group_layers((None,) * 3) == (KVCacheGroup((0, 1, 2)),)
    assert group_layers(ALTERNATING) == (KVCacheGroup((1, 3)), KVCacheGroup((0, 2), 8))
    five_to_one = group_layers(((8,) * 5 + (None,)) * 2)
    assert [group.window for group in five_to_one] == [None] + [8] * 5
    assert {len(group.layers) for group in five_to_one} == {2}
    assert num_places(five_to_one) == 2
    assert sorted(places_of(five_to_one)) == list(range(12))
    # Nearly equal numbers: one group with a hole is cheaper than twice the groups.
    assert [len(group.layers) for group in group_layers((None,) * 5 + (8,) * 4)] == [5, 4]


@given(
    windows=st.lists(st.sampled_from([None, 1, 3, 8]), min_size=1, max_size=3),
    missing=st.lists(st.sets(st.integers(0, 8), max_size=3), min_size=3, max_size=3),
    num_blocks=st.integers(0, 8),
)
def test_a_prefix_hits_up_to_where_every_group_has_its_blocks(
    windows: Sequence[int | None], missing: list[set[int]], num_blocks: int
) -> None:
    if not any(windows):
        windows = windows[:1]  # Layers of one kind are divided into groups only if there is another kind.
    groups = tuple(KVCacheGroup((layer,), window) for layer, window in enumerate(windows))
    kv_cache = KVCache(CacheConfig(block_size=BLOCK, num_gpu_blocks=64), groups=groups, chunk=64)
    pool = kv_cache.block_pool
    request = Request(engine_request("a", LONG[: num_blocks * BLOCK + 1]), block_size=BLOCK)
    for index in range(len(groups)):
        for place in set(range(num_blocks)) - missing[index]:
            row = [pool.blocks[0]] * place + pool.get_new_blocks(1)
            pool.cache_full_blocks(request, row, place, place + 1, index)
    hits, num_tokens = kv_cache.get_computed_blocks(request)

    def can_end_at(num_hits: int) -> bool:
        return all(
            place not in missing[index]
            for index, group in enumerate(groups)
            for place in range(group.first_kept(num_hits * BLOCK, BLOCK), num_hits)
        )

    assert num_tokens == BLOCK * max(num for num in range(num_blocks + 1) if can_end_at(num))
    for index, (group, blocks) in enumerate(zip(groups, hits.blocks, strict=True)):
        first = group.first_kept(num_tokens, BLOCK)
        assert [block.is_null for block in blocks] == [place < first for place in range(len(blocks))]
        assert all(block.group == index for block in blocks[first:])


def test_blocks_outside_a_window_are_freed_while_tokens_are_computed() -> None:
    world = World(windows=ALTERNATING, budget=8, num_blocks=64)
    world.add("a", LONG, max_tokens=20)
    most = 0
    while world.scheduler.has_requests():
        world.step()
        everything, window = world.scheduler.kv_cache.get_block_ids("a")
        assert len(everything) == len(window)
        most = max(most, sum(block_id > 0 for block_id in window))
    world.end("a")
    assert most == 4, "two in the window, two that are computed"
    assert world.scheduler.kv_cache.groups[1].blocks_at_most(60, block_size=BLOCK, chunk=8) == 5


def test_a_prompt_that_fits_only_because_of_its_windows_runs() -> None:
    # 41 tokens need 11 blocks in the group with full attention, and at most 5 in the group with a window.
    world = World(windows=ALTERNATING, budget=8, num_blocks=17)
    world.add("a", LONG, max_tokens=1)
    world.end("a")
    with pytest.raises(UserError, match="the 16 KV blocks of this engine hold: ask for at most 1"):
        World(windows=ALTERNATING, budget=8, num_blocks=16).add("a", LONG)


def test_a_window_hits_although_only_its_last_blocks_are_left() -> None:
    world = World(windows=ALTERNATING, budget=8)
    world.add("a", LONG, max_tokens=1)
    world.run()
    world.add("b", [*LONG, 3, 4], max_tokens=4)
    world.end("b")
    assert world.answers["b"].last is not None
    assert world.answers["b"].last.num_cached_tokens == len(LONG)


def test_a_connector_is_told_the_blocks_of_every_group() -> None:
    world = World(windows=ALTERNATING, budget=8)
    told: list[tuple[list[int], ...]] = []
    half = world.half
    half.lends = lambda request, block_ids: (told.append(block_ids), (False, None))[1]
    world.add("a", LONG, max_tokens=1)
    for _ in range(4):
        world.step()
    everything = world.scheduler.kv_cache.get_block_ids("a")[0]
    world.run()
    (of_both,) = told
    assert set(everything) <= set(of_both)
    assert len(of_both) == 10 + 2, "blocks before the window are free"


def test_a_loan_holds_no_block_outside_a_window() -> None:
    """The last chunk may have any length: other requests can use the rest while the loan lasts."""
    world = World(windows=ALTERNATING)
    world.half.lends = lambda request, block_ids: (True, {})
    world.add("a", LONG, max_tokens=1)
    world.step()
    everything, window = world.scheduler.kv_cache.get_block_ids("a")
    assert [block_id > 0 for block_id in window] == [False] * 8 + [True] * 2
    assert all(everything)
    world.report.finished_sending = {"a"}
    world.end()


def test_one_table_where_the_switch_is_off() -> None:
    world = World(windows=ALTERNATING)
    assert is_hybrid(world.config.kv_cache_groups)
    cache = CacheConfig(block_size=BLOCK, num_gpu_blocks=8, hybrid_kv_cache="off")
    off = msgspec.structs.replace(world.config, cache_config=cache)
    assert off.kv_cache_groups == (KVCacheGroup((0, 1, 2, 3)),)
