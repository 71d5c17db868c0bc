"""Pairs of block tables for engines that group the layers of one model differently."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import PeerError
from baton.core.kv_groups import MAX_GROUPS, group_layers
from baton.core.layout import KEYS_AND_VALUES, CacheSpec, LayerLayout, RankLayout, Region
from baton.protocol.layout_checks import check_layout
from baton.protocol.plan import GroupPair, PlanError, pair_groups

SPEC = CacheSpec(KEYS_AND_VALUES, "float32", 1)


def rank(groups: dict[str, int], **changes: int) -> RankLayout:
    """`groups`: each layer's group, by layer name."""
    layers = tuple(LayerLayout(name, SPEC, 0, 0, 8, 8, 8, group=group) for name, group in groups.items())
    layout = RankLayout(0, 1, 8, 1, (Region(4096, 64),), layers)
    return msgspec.structs.replace(layout, **changes)


def test_groups_of_a_small_gemma_pair_between_vllm_and_the_embedded_engine() -> None:
    ours = {
        str(layer): index
        for index, group in enumerate(group_layers([8, 8, None, 8, 8, None]))
        for layer in group.layers
    }
    theirs = {"0": 0, "3": 0, "1": 1, "4": 1, "2": 2, "5": 2}  # Groups of vLLM 0.32, by layer.
    assert ours == {"2": 0, "5": 0, "0": 1, "1": 1, "3": 2, "4": 2}
    assert pair_groups([rank(theirs)], [rank(ours)]) == (
        GroupPair(local=0, remote=2),
        GroupPair(local=1, remote=0),
        GroupPair(local=1, remote=1),
        GroupPair(local=2, remote=0),
        GroupPair(local=2, remote=1),
    )


names = st.sampled_from("abcdef")


@given(theirs=st.dictionaries(names, st.integers(0, 3)), ours=st.dictionaries(names, st.integers(0, 3)))
def test_every_layer_belongs_to_exactly_one_pair(theirs: dict[str, int], ours: dict[str, int]) -> None:
    if missing := ours.keys() - theirs.keys():
        with pytest.raises(PlanError, match=min(missing)):
            pair_groups([rank(theirs)], [rank(ours)])
        return
    pairs = pair_groups([rank(theirs)], [rank(ours)])
    moved = [
        name for pair in pairs for name in ours if (ours[name], theirs[name]) == (pair.local, pair.remote)
    ]
    assert sorted(moved) == sorted(ours)
    assert len({*pairs}) == len(pairs)


def test_pipeline_stages_have_parts_of_the_groups() -> None:
    stages = [rank({"a": 0, "b": 1}, pp_size=2), rank({"c": 0, "d": 1}, pp_rank=1, pp_size=2)]
    assert pair_groups(stages, [rank({"a": 0, "b": 0, "c": 0, "d": 0})]) == (GroupPair(0, 0), GroupPair(0, 1))


def test_ranks_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(PlanError, match="different cache groups"):
        pair_groups([rank({"a": 0}), rank({"a": 1})], [rank({"a": 0})])


@pytest.mark.parametrize("group", [-1, MAX_GROUPS])
def test_a_group_index_beyond_the_tickets_limit_is_unsound(group: int) -> None:
    check_layout(rank({"a": MAX_GROUPS - 1}))
    with pytest.raises(PeerError, match="group"):
        check_layout(rank({"a": group}))
