"""Parts and tables of a prompt with cache groups, compared with a walk over every token and layer."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.ids import BlockId
from baton.core.kv_groups import KVCacheGroup, group_layers
from baton.core.layout import KEYS_AND_VALUES, CacheSpec, LayerLayout, RankLayout, Region
from baton.protocol.effects import Part
from baton.protocol.grouped_prompt import GroupedPrompt, GroupRoute, plan_group_routes
from baton.protocol.plan import GroupPair
from baton.protocol.progress_frontier import ProgressFrontier, num_tokens_in, parts_between

MAX_TOKENS = 40
Groups = tuple[KVCacheGroup, ...]


@dataclass(frozen=True)
class World:
    """Two engines with one model, each with its own groups; one prompt."""

    windows: tuple[int | None, ...]  # Each layer's window, in tokens.
    ours: Groups
    theirs: Groups
    prompt: GroupedPrompt

    def moves(self, token: int, layer: int) -> bool:
        """Whether the last token, or the next one, sees anything of the token's block."""
        window = self.ours[group_of(self.ours, layer)].window
        if window is None:
            return True
        first_seen = max(0, self.prompt.num_tokens - window)
        return token // self.prompt.block_tokens >= first_seen // self.prompt.block_tokens

    def cells_of(self, part: Part) -> list[tuple[int, int]]:
        """Tokens and layers that a driver would read for this part."""
        layers = range(len(self.windows))
        if part.groups is not None:
            ours, theirs = self.ours[part.groups.local], self.theirs[part.groups.remote]
            layers = [layer for layer in layers if layer in ours.layers and layer in theirs.layers]  # type: ignore[assignment]
        named = range(*part.layers) if part.layers is not None else range(len(self.windows))
        tokens = range(part.first_token, part.first_token + part.num_tokens)
        return [(token, layer) for token in tokens for layer in layers if layer in named]


def group_of(groups: Groups, layer: int) -> int:
    [index] = [index for index, group in enumerate(groups) if layer in group.layers]
    return index


def layout_of(groups: Groups, num_layers: int) -> RankLayout:
    spec = CacheSpec(KEYS_AND_VALUES, "float32", 1)
    layers = tuple(
        LayerLayout(f"layer.{i}", spec, 0, i, 64, 8, 8, group=group_of(groups, i)) for i in range(num_layers)
    )
    return RankLayout(
        tp_rank=0,
        tp_size=1,
        num_blocks=1,
        block_tokens=1,
        regions=(Region(0, 4096, "cpu"),),
        layers=layers,
    )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    window = draw(st.integers(1, 12))
    windows = tuple(draw(st.lists(st.sampled_from([None, window]), min_size=1, max_size=6)))
    ours = group_layers(windows)
    # The same groups in another order, layers dealt out one by one, or one table that keeps everything.
    theirs = draw(
        st.sampled_from(
            [
                ours,
                ours[::-1],
                tuple(KVCacheGroup((layer,), seen) for layer, seen in enumerate(windows)),
                (KVCacheGroup(tuple(range(len(windows)))),),
            ]
        )
    )
    layouts = [layout_of(groups, len(windows)) for groups in (theirs, ours)]
    group_routes = plan_group_routes(layouts[:1], layouts[1:], [group.window for group in ours])
    prompt = GroupedPrompt(group_routes, draw(st.integers(1, MAX_TOKENS)), draw(st.integers(1, 8)))
    return World(windows, ours, theirs, prompt)


fronts = st.builds(
    ProgressFrontier, st.integers(0, MAX_TOKENS), st.integers(0, MAX_TOKENS), st.integers(0, 6)
)


@given(worlds(), fronts, fronts)
def test_each_moving_cell_is_in_exactly_one_part(
    world: World, old: ProgressFrontier, new: ProgressFrontier
) -> None:
    num_layers, num_tokens = len(world.windows), world.prompt.num_tokens
    new = new.between(0, num_tokens)
    parts = world.prompt.cut(parts_between(old, new, num_layers))
    cells = [cell for part in parts for cell in world.cells_of(part)]
    assert all(world.cells_of(part) for part in parts), "a part that moves nothing"
    assert len(set(cells)) == len(cells), "a cell is read twice"
    assert set(cells) == {
        (token, layer)
        for token in range(num_tokens)
        for layer in range(num_layers)
        if old.layers_at(token, num_layers) <= layer < new.layers_at(token, num_layers)
        and world.moves(token, layer)
    }


@given(worlds(), st.integers(0, MAX_TOKENS))
def test_each_moving_token_is_in_its_own_block(world: World, num_ready: int) -> None:
    """P names whole blocks, from the first one of each group that it keeps."""
    prompt = world.prompt
    size = prompt.block_tokens
    num_ready = min(num_ready, prompt.num_tokens) // size * size
    firsts = [group.first_kept(prompt.num_tokens, size) for group in world.theirs]
    named = tuple(
        tuple(BlockId(1 + index * 100 + place) for place in range(first, num_ready // size))
        for index, first in enumerate(firsts)
    )
    needed = prompt.needed(named, firsts, num_ready)
    assert needed is not None
    for part in prompt.cut([Part(0, num_ready)] if num_ready else []):
        table = prompt.table_of(part, needed)
        for token, layer in world.cells_of(part):
            assert table[token // size] == 1 + group_of(world.theirs, layer) * 100 + token // size


PROMPT = GroupedPrompt(
    (GroupRoute(GroupPair(0, 0), frozenset({2})), GroupRoute(GroupPair(1, 1), frozenset({0, 1}), 6)), 18, 4
)


def blocks(*tables: tuple[int, ...]) -> tuple[tuple[BlockId, ...], ...]:
    return tuple(tuple(map(BlockId, table)) for table in tables)


def test_the_example_in_the_module_docstring_holds() -> None:
    needed = PROMPT.needed(blocks((7, 3, 9, 4), (8,)), (0, 3), 16)
    assert needed == blocks((7, 3, 9, 4), (8,))
    assert PROMPT.needed(blocks((7, 3, 9, 4), (0, 0, 0, 8)), (), 16) == needed, "P keeps all blocks"
    parts = PROMPT.cut([Part(8, 8), Part(16, 2, (0, 1))])
    assert parts == (
        Part(8, 8, None, GroupPair(0, 0)),
        Part(12, 4, None, GroupPair(1, 1)),
        Part(16, 2, (0, 1), GroupPair(1, 1)),
    )
    assert [PROMPT.table_of(part, needed) for part in parts[:2]] == [(7, 3, 9, 4), (0, 0, 0, 8)]


@pytest.mark.parametrize(
    ("tables", "first_blocks", "end_token", "is_covered"),
    [
        (blocks((7, 3, 9), ()), (0, 3), 12, True),
        (blocks((7, 3, 9, 4), (8,)), (0, 3), 16, True),
        (blocks((7, 3, 9, 4), (6, 8)), (0, 2), 16, True),
        (blocks((7, 3, 9, 4), ()), (0, 3), 16, False),
        (blocks((7, 3, 9), (8,)), (0, 3), 16, False),
        (blocks((3, 9, 4), (8,)), (1, 3), 16, False),
        (blocks((7, 3, 9, 4), (8,)), (0, 4), 16, False),
        (blocks((7, 3, 9, 4), (8,)), (), 16, False),
        (blocks((7, 3, 9, 4)), (), 16, False),
        ((), (), 16, False),
        ((), (), 0, True),
    ],
)
def test_tokens_without_a_block_are_detected(
    tables: tuple[tuple[BlockId, ...], ...], first_blocks: tuple[int, ...], end_token: int, is_covered: bool
) -> None:
    assert (PROMPT.needed(tables, first_blocks, end_token) is not None) == is_covered


def test_tokens_are_counted_once_over_all_groups() -> None:
    one, other = GroupPair(0, 0), GroupPair(1, 1)
    assert num_tokens_in([]) == 0
    parts = [Part(4, 8, None, one), Part(8, 4, None, other), Part(16, 2), Part(4, 2, (0, 1))]
    assert num_tokens_in(parts) == 10
