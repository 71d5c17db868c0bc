"""The index of engines' blocks beside a brute-force twin that remembers every block of every engine."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from baton.router.fleet import block_index
from baton.router.fleet.block_index import (
    HOME_TOKENS,
    BlockIndex,
    Match,
    blocks_per_chunk,
    home_key,
    prefix_keys,
    root_key,
)

SIZES = {"p0": 128, "p1": 128, "d0": 256}
NAMES = sorted(SIZES)
ROOTS: Sequence[tuple[str | None, str | None]] = [(None, None), (None, "salt"), ("adapter", None)]
PLAIN = root_key(None, None)
MEDIA = ["GPU", "CPU", "FS"]


def ids_of(prompt: Sequence[int]) -> list[int]:
    """Each number stands for 64 equal tokens."""
    return [number for number in prompt for _ in range(64)]


class Twin:
    """The blocks of one engine, as the tokens up to each one's end, with the tiers that have them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: dict[tuple[Any, ...], set[str]] = {}

    def match(self, root: Any, ids: list[int]) -> Match:
        per_chunk = blocks_per_chunk(self.size)
        counts: list[int] = []
        for media in ({"GPU"}, {"GPU", "CPU"}, set(MEDIA)):
            num_chunks = 0
            for chunk in range(len(ids) // (self.size * per_chunk)):
                last = (root, tuple(ids[: (chunk + 1) * per_chunk * self.size]))
                if media.isdisjoint(self.blocks.get(last, set())):
                    break
                num_chunks += 1
            counts.append(num_chunks * per_chunk * self.size)
        return Match(*counts)


def name_of(block: tuple[Any, ...]) -> bytes:
    return repr(hash(block)).encode()


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=24)
STEPS = st.one_of(
    st.tuples(
        st.just("store"),
        st.sampled_from(NAMES),
        PROMPTS,
        st.sampled_from(ROOTS),
        st.sampled_from(MEDIA),
    ),
    st.tuples(
        st.just("remove"),
        st.sampled_from(NAMES),
        PROMPTS,
        st.sampled_from(ROOTS),
        st.sampled_from(MEDIA),
    ),
    st.tuples(st.sampled_from(["clear", "forget"]), st.sampled_from(NAMES)),
)


def carry_out(index: BlockIndex, twins: dict[str, Twin], step: tuple[Any, ...]) -> None:
    what, name, *rest = step
    twin = twins[name]
    if what in ("clear", "forget"):
        twin.blocks.clear()
        index.forget(name) if what == "forget" else index.apply(name, [AllBlocksCleared()])
        return
    prompt, root, medium = rest
    ids, size = ids_of(prompt), twin.size
    blocks = [(root, tuple(ids[:end])) for end in range(size, len(ids) + 1, size)]
    if not blocks:
        return
    if what == "remove":
        last = blocks[-1]
        if medium in twin.blocks.get(last, set()):
            twin.blocks[last].remove(medium)
            if not twin.blocks[last]:
                del twin.blocks[last]
        index.apply(name, [BlockRemoved(block_hashes=[name_of(last)], medium=medium)])
        return
    known = next((number for number, block in enumerate(blocks) if block not in twin.blocks), len(blocks))
    new = blocks[known:] if medium == "GPU" else blocks
    if not new:
        return
    begin = len(blocks) - len(new)
    adapter, salt = root
    index.apply(
        name,
        [
            BlockStored(
                block_hashes=[name_of(block) for block in new],
                parent_block_hash=name_of(blocks[begin - 1]) if begin else None,
                token_ids=ids[begin * size : len(blocks) * size],
                block_size=size,
                medium=medium,
                lora_name=adapter,
                extra_keys=None if begin or salt is None else [(salt,), *[None] * (len(new) - 1)],
            )
        ],
    )
    for block in new:
        twin.blocks.setdefault(block, set()).add(medium)


@settings(max_examples=200)
@given(steps=st.lists(STEPS, max_size=30), asked=st.lists(st.tuples(PROMPTS, st.sampled_from(ROOTS))))
def test_it_finds_what_the_engines_have(steps: list[tuple[Any, ...]], asked: list[Any]) -> None:
    index, twins = BlockIndex(), {name: Twin(size) for name, size in SIZES.items()}
    for step in steps:
        carry_out(index, twins, step)
        if step[0] == "store":
            asked.append((step[2], step[3]))
    for prompt, root in asked:
        ids, found = ids_of(prompt), {}
        for size in set(SIZES.values()):
            found |= index.match(prefix_keys(ids, size, root_key(*root)), size)
        wanted = {name: twin.match(root, ids) for name, twin in twins.items()}
        assert found == {name: match for name, match in wanted.items() if match.num_tokens}
    for name in NAMES:
        index.forget(name)
    assert [index.num_blocks(name) for name in NAMES] == [0] * len(NAMES)
    assert index._holders == {}
    assert index._all_bits == 0


def stored(ids: list[int], size: int = 16, **fields: Any) -> BlockStored:
    names: list[Any] = [f"{number} {ids[:1]}".encode() for number in range(len(ids) // size)]
    how = {"parent_block_hash": None, "medium": "GPU", **fields}
    return BlockStored(block_hashes=names, token_ids=ids, block_size=size, **how)


LONG = list(range(1024))


def matched(index: BlockIndex, ids: list[int], root: int = PLAIN) -> dict[str, Match]:
    return index.match(prefix_keys(ids, 16, root), 16)


@pytest.mark.parametrize(
    "event",
    [
        stored(LONG, parent_block_hash=b"unknown"),
        stored(LONG[:-1]),
        stored(LONG, kv_cache_spec_kind="sliding_window"),
        stored([*LONG[:-1], 2**40]),
        BlockRemoved(block_hashes=[b"unknown"], medium="GPU"),
    ],
)
def test_an_event_that_makes_no_sense_changes_nothing(event: KVCacheEvent) -> None:
    index = BlockIndex()
    index.apply("p0", [event])
    assert matched(index, LONG) == {}
    index.apply("p0", [stored(LONG)])
    assert matched(index, LONG) == {"p0": Match(1024, 1024, 1024)}
    index.apply("p0", [event])
    assert matched(index, LONG) == {"p0": Match(1024, 1024, 1024)}


def test_a_block_that_leaves_the_cache_is_found_in_a_slower_tier() -> None:
    index, half = BlockIndex(), stored(LONG[:512])
    for medium in MEDIA:
        index.apply("p0", [stored(LONG if medium == "FS" else LONG[:768], medium=medium)])
    removed = [BlockRemoved(block_hashes=half.block_hashes[16:], medium=medium) for medium in MEDIA]
    index.apply("p0", removed[:1])
    assert matched(index, LONG) == {"p0": Match(256, 768, 1024)}
    index.apply("p0", removed[1:2])
    assert matched(index, LONG) == {"p0": Match(256, 256, 1024)}
    index.apply("p0", removed[2:])
    assert matched(index, LONG) == {"p0": Match(256, 256, 256)}


@pytest.mark.parametrize("has_cleared", [False, True])
def test_at_an_update_what_an_engine_stored_before_is_forgotten(has_cleared: bool) -> None:
    index, ids = BlockIndex(), list(range(512))
    index.apply("e", [stored(ids)])
    index.apply("other", [stored(ids)])
    if has_cleared:  # The engine reports it before the router learns of the new weights.
        index.apply("e", [AllBlocksCleared(), stored(ids[:256])])
    index.forget_old("e")
    assert matched(index, ids).get("e") == (Match.in_cache(256) if has_cleared else None)
    assert matched(index, ids)["other"] == Match.in_cache(512)
    index.apply("e", [stored(ids)])
    index.forget_old("e")
    assert set(matched(index, ids)) == {"other"}, "the next update"


def test_a_picture_in_the_prompt_is_not_its_placeholder_tokens() -> None:
    index = BlockIndex()
    extra: list[Any] = [None] * 64
    extra[20] = (["picture", 0],)
    index.apply("p0", [stored(LONG, extra_keys=extra)])
    assert matched(index, LONG) == {"p0": Match(256, 256, 256)}


def test_only_whole_chunks_count() -> None:
    index = BlockIndex()
    index.apply("p0", [stored(LONG[:496])])
    assert matched(index, LONG) == {"p0": Match(256, 256, 256)}
    assert matched(index, LONG[:255]) == {}


def test_blocks_of_a_window_do_not_count_in_a_hybrid_model() -> None:
    index = BlockIndex()
    index.apply("p0", [stored(LONG, group_idx=1, kv_cache_spec_kind="full_attention")])
    index.apply("p0", [stored(LONG, group_idx=0, kv_cache_spec_kind="sliding_window")])
    index.apply("p0", [BlockRemoved(block_hashes=stored(LONG).block_hashes, medium="GPU", group_idx=0)])
    assert matched(index, LONG) == {"p0": Match(1024, 1024, 1024)}


def test_prompts_of_two_tenants_do_not_match() -> None:
    index = BlockIndex()
    index.apply("p0", [stored(LONG, extra_keys=[("theirs",), *[None] * 63])])
    assert matched(index, LONG) == {}
    assert matched(index, LONG, root=root_key(None, "ours")) == {}
    assert matched(index, LONG, root=root_key(None, "theirs")) == {"p0": Match(1024, 1024, 1024)}


def test_engines_beyond_the_limit_are_not_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_index, "ENGINES_MAX", 2)
    index = BlockIndex()
    for number in range(3):
        index.apply(f"p{number}", [stored(LONG)])
    assert sorted(matched(index, LONG)) == ["p0", "p1"]


@pytest.mark.parametrize("size", [16, 512])
def test_prompts_with_the_same_first_tokens_have_one_home(size: int) -> None:
    def home(ids: list[int]) -> int:
        return home_key(prefix_keys(ids, size, root_key(None, None)), size)

    first = list(range(1, HOME_TOKENS + 1))
    assert home(first) == home([*first, *[1] * 5000]) != 0
    assert home(first) != home([*first[:-1], 7])
    assert home([1] * 100) == 0
    assert home([1] * 600) not in (0, home([2] * 600))
