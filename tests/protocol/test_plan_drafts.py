"""Layers of draft models in plans: read from a producer with the same draft, and from no other."""

import msgspec
import pytest

from baton.core.errors import PeerError
from baton.core.layout import KEYS_AND_VALUES, CacheSpec, LayerLayout, RankLayout, Region
from baton.protocol.grouped_prompt import plan_group_routes
from baton.protocol.layout_checks import check_layout
from baton.protocol.plan import (
    GroupPair,
    PlanError,
    pair_groups,
    plan_pairs_of_layouts,
    plan_shares,
    unfilled_drafts,
)

SPEC = CacheSpec(KEYS_AND_VALUES, "float32", 1)
OURS, OTHER = "digest of a draft", "digest of another"


def rank(model: str, drafts: str = "", draft: str = "", *, draft_group: int = 0, **pp: int) -> RankLayout:
    """Each letter of `model` and `drafts` is a layer; `draft`: the digest."""
    layers = [LayerLayout(name, SPEC, 0, 0, 8, 8, 8) for name in model]
    layers += [LayerLayout(name, SPEC, 0, 0, 8, 8, 8, group=draft_group, is_draft=True) for name in drafts]
    layout = RankLayout(0, 1, 8, 1, (Region(4096, 64),), tuple(layers), draft=draft)
    layout = msgspec.structs.replace(layout, **pp)
    check_layout(layout)
    return layout


@pytest.mark.parametrize(
    ("theirs", "read", "left_out"),
    [
        (rank("ab"), "ab", "x"),  # No draft.
        (rank("ab", "x", OURS), "abx", ""),
        (rank("ab", "x", OTHER), "ab", "x"),  # A layer of the same name, with other weights.
        (rank("ab", "xy", OURS), "abx", ""),
    ],
)
def test_only_the_same_draft_is_read(theirs: RankLayout, read: str, left_out: str) -> None:
    ours = rank("ab", "x", OURS)
    assert unfilled_drafts([theirs], [ours]) == {*left_out}
    assert plan_shares(ours, {0: theirs})[0].keys() == {*read}
    assert len(plan_pairs_of_layouts([theirs], [ours])) == 1
    [route] = plan_group_routes([theirs], [ours], [None])
    assert route.layers is not None
    assert {theirs.layers[position].name for position in route.layers} == {*read}


def test_a_consumer_without_a_draft_leaves_the_producers_out() -> None:
    assert plan_shares(rank("ab"), {0: rank("ab", "x", OURS)})[0].keys() == {"a", "b"}


def test_a_group_of_unfilled_drafts_has_no_route() -> None:
    ours = rank("ab", "x", OURS, draft_group=1)
    assert pair_groups([rank("ab")], [ours]) == (GroupPair(0, 0),)
    assert pair_groups([rank("ab", "x", OURS)], [ours]) == (GroupPair(0, 0), GroupPair(1, 0))


def test_the_last_stage_may_have_nothing_but_a_draft_to_leave_out() -> None:
    ours = [rank("ab", pp_size=2), rank("", "x", OURS, pp_rank=1, pp_size=2)]
    assert len(plan_pairs_of_layouts([rank("ab")], ours)) == 1


@pytest.mark.parametrize("left_out", ["b", "x"])
def test_a_layer_of_the_model_is_never_left_out(left_out: str) -> None:
    """Also if the consumer takes it for its draft's, and the producer knows better."""
    theirs = rank("abx".replace(left_out, "" if left_out == "b" else "x"))
    ours = rank("ab", "x", OURS)
    for plan in (
        lambda: plan_pairs_of_layouts([theirs], [ours]),
        lambda: pair_groups([theirs], [ours]),
        lambda: plan_shares(ours, {0: theirs}),
    ):
        with pytest.raises(PlanError, match="layers differ"):
            plan()


def test_a_draft_without_a_digest_is_unsound() -> None:
    with pytest.raises(PeerError, match="draft model"):
        rank("a", "x")
