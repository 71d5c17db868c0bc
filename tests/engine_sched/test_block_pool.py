"""Block pool and free queue: order of eviction, reference counts.

The prefix cache compared with a dictionary.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.config import CacheConfig
from baton.engine.cache.block_pool import Block, BlockPool, FreeQueue
from baton.engine.cache.kv_cache import KVCache
from baton.engine.request import Request
from tests.engine_sched.world import engine_request

SIZE = 2


def request(request_id: str, tokens: list[int], salt: str | None = None) -> Request:
    return Request(engine_request(request_id, tokens, salt=salt), block_size=SIZE)


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def cached_pool(num_blocks: int, tokens: list[int]) -> tuple[BlockPool, list[Block]]:
    """A pool in which one request holds cached blocks of `tokens`."""
    pool = BlockPool(num_blocks, SIZE)
    blocks = pool.get_new_blocks(len(tokens) // SIZE)
    pool.cache_full_blocks(request("a", tokens), blocks, 0, len(blocks))
    return pool, blocks


@settings(deadline=None)
@given(st.data())
def test_blocks_can_leave_the_free_queue_from_any_position(data: st.DataObject) -> None:
    blocks = [Block(i) for i in range(6)]
    queue, model = FreeQueue(blocks), list(range(6))
    for _ in range(data.draw(st.integers(0, 30))):
        outside = [i for i in range(6) if i not in model]
        actions = ["pop", "remove"] * bool(model) + ["append", "prepend"] * bool(outside)
        match data.draw(st.sampled_from(actions)):
            case "pop":
                assert queue.pop_first().block_id == model.pop(0)
            case "remove":
                index = data.draw(st.sampled_from(model))
                queue.remove(blocks[index])
                model.remove(index)
            case "append":
                index = data.draw(st.sampled_from(outside))
                queue.append(blocks[index])
                model.append(index)
            case "prepend":
                index = data.draw(st.sampled_from(outside))
                queue.prepend(blocks[index])
                model.insert(0, index)
        assert ids(queue.in_order()) == model
        assert queue.num_free == len(model)


def test_uncached_blocks_are_evicted_first_then_the_tail_of_a_request_then_its_head() -> None:
    pool, blocks = cached_pool(4, [1, 2, 3, 4])
    partial = pool.get_new_blocks(1)
    pool.free_blocks(reversed(blocks + partial))
    taken = ids(pool.get_new_blocks(4))
    assert taken == [partial[0].block_id, 3, blocks[1].block_id, blocks[0].block_id]
    pool.assert_consistent()


def test_a_block_that_is_hit_leaves_the_free_queue_and_is_not_evicted() -> None:
    pool, blocks = cached_pool(3, [1, 2, 3, 4])
    pool.free_blocks(reversed(blocks))
    pool.touch(blocks[:1])
    assert ids(pool.get_new_blocks(2)) == [2, blocks[1].block_id]
    assert blocks[0].block_hash is not None
    assert pool.get_cached_block(blocks[0].block_hash) is blocks[0]
    assert pool.num_free_blocks == 0
    assert pool.usage == 1.0
    pool.assert_consistent()


def test_of_two_equal_blocks_the_newer_stays_cached() -> None:
    pool, older = cached_pool(4, [1, 2])
    newer = pool.get_new_blocks(1)
    same = request("b", [1, 2])
    pool.cache_full_blocks(same, newer, 0, 1)
    assert pool.get_cached_block(same.block_hashes[0]) is newer[0]
    assert older[0].block_hash is None
    pool.free_blocks(older)
    assert pool.get_cached_block(same.block_hashes[0]) is newer[0]
    pool.assert_consistent()


def test_freeing_twice_is_an_assertion_error() -> None:
    pool, blocks = cached_pool(4, [1, 2])
    pool.free_blocks(blocks)
    with pytest.raises(AssertionError, match="twice"):
        pool.free_blocks(blocks)


def test_evicted_blocks_cannot_be_found_whether_held_or_free() -> None:
    pool, blocks = cached_pool(4, [1, 2, 3, 4])
    hashes = [block.block_hash for block in blocks]
    pool.free_blocks(blocks[1:])
    pool.evict_blocks([-1, 10_000])  # A connector may report what is no block.
    pool.evict_blocks([*ids(blocks), 3])
    assert [pool.get_cached_block(h) for h in hashes if h] == [None, None]
    assert ids(pool.get_new_blocks(1)) == [blocks[1].block_id], "not cached, so taken first"
    pool.assert_consistent()


def test_events_name_each_hash_once_for_any_number_of_blocks() -> None:
    pool = BlockPool(8, SIZE, enable_events=True)
    first, second = pool.get_new_blocks(1), pool.get_new_blocks(2)
    pool.cache_full_blocks(request("a", [1, 2]), first, 0, 1)
    pool.cache_full_blocks(request("b", [1, 2, 3, 4]), second, 0, 2)
    stored, more = pool.take_events()
    assert stored.token_ids == [1, 2]
    assert (more.token_ids, more.parent_block_hash) == ([3, 4], stored.block_hashes[0])
    pool.free_blocks(first)
    pool.evict_blocks(ids(first))
    assert pool.take_events() == []
    pool.evict_blocks(ids(second))
    assert [event.block_hashes for event in pool.take_events()] == [stored.block_hashes, more.block_hashes]
    pool.free_blocks(second)
    assert pool.reset_prefix_cache()
    assert [type(event).__name__ for event in pool.take_events()] == ["AllBlocksCleared"]


PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(PROMPTS, st.sampled_from([None, "s"])), min_size=1, max_size=12), st.data())
def test_hits_equal_those_of_a_dictionary_of_prefixes(
    prompts: list[tuple[list[int], str | None]], data: st.DataObject
) -> None:
    """A pool that is so large that nothing is evicted."""
    cache = KVCache(CacheConfig(block_size=SIZE, num_gpu_blocks=200))
    seen: set[tuple[str | None, tuple[int, ...]]] = set()
    live: list[Request] = []
    for number, (tokens, salt) in enumerate(prompts):
        asked = request(f"r{number}", tokens, salt)
        expected = 0
        while expected + SIZE < len(tokens) and (salt, tuple(tokens[: expected + SIZE])) in seen:
            expected += SIZE
        hits, num_hit = cache.get_computed_blocks(asked)
        assert num_hit == expected == len(hits) * SIZE
        assert cache.allocate_slots(asked, len(tokens) - num_hit, num_hit, hits) is not None
        seen |= {(salt, tuple(tokens[:end])) for end in range(SIZE, len(tokens) + 1, SIZE)}
        live.append(asked)
        if data.draw(st.booleans()):
            cache.free(live.pop(data.draw(st.integers(0, len(live) - 1))))
        cache.assert_consistent()
    for asked in live:
        cache.free(asked)
    cache.assert_empty()


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    cache = KVCache(CacheConfig(block_size=SIZE, num_gpu_blocks=4))
    first = request("a", [1, 2, 3, 4])
    assert cache.allocate_slots(first, 4) is not None
    cache.free(first)
    big = request("b", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    hits, num_hit = cache.get_computed_blocks(big)
    assert num_hit == 4
    # Two of the four free blocks are the hits themselves.
    assert cache.allocate_slots(big, 5, num_hit, hits) is None
    assert not cache.has_blocks(big)
    cache.assert_empty()


def test_hashes_are_kept_up_while_tokens_are_appended() -> None:
    grown, whole = request("a", [1, 2, 3]), request("b", [1, 2, 3, 4, 5, 6])
    for token in (4, 5, 6):
        grown.append_output_token(token)
    assert grown.block_hashes == whole.block_hashes
    assert request("c", [1, 2, 3, 4, 5, 6], "salt").block_hashes != whole.block_hashes
