"""Plans for any two engines: everything wanted is read once, and replicas are read evenly."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import PeerError
from baton.core.ids import Pair
from baton.core.layout import (
    INDEX_KEYS,
    KEYS_AND_VALUES,
    LATENT,
    SCALES,
    CacheSpec,
    LayerLayout,
    RankLayout,
    Region,
    kv_heads_of,
)
from baton.protocol.layout_checks import check_layout, heads_of
from baton.protocol.plan import PlanError, plan_pairs_of_layouts, plan_shares
from tests.protocol.simple_plans import plan_pairs

LAYERS = ("a", "b", "c", "d")


def engine(
    tp: int,
    num_heads: int,
    stages: tuple[int, ...] = (4,),
    *,
    kinds: str = "",
    reverse: bool = False,
) -> list[RankLayout]:
    """All ranks, in order of index; `stages`: number of layers of each stage; `kinds`: a letter for each."""
    ranks = []
    for pp_rank, size in enumerate(stages):
        first = sum(stages[:pp_rank])
        names = LAYERS[first : first + size]
        for tp_rank in range(tp):
            specs = [spec_of(LAYERS.index(name), kinds, num_heads) for name in names]
            count = len(kv_heads_of(tp_rank, tp_size=tp, num_kv_heads=num_heads))
            layers = [
                LayerLayout(name, spec, 0, 8 * count * i, count, 1, 1)
                for i, (name, spec) in enumerate(zip(names, specs, strict=True))
            ]
            ranks.append(
                RankLayout(
                    tp_rank=tp_rank,
                    tp_size=tp,
                    num_blocks=8,
                    block_tokens=1,
                    regions=(Region(4096, 8 * count * size),),
                    layers=tuple(reversed(layers) if reverse else layers),
                    pp_rank=pp_rank,
                    pp_size=len(stages),
                )
            )
    for rank in ranks:
        check_layout(rank)
    return ranks


def spec_of(layer: int, kinds: str, num_heads: int) -> CacheSpec:
    match kinds[layer : layer + 1]:
        case "l":
            return CacheSpec(LATENT, "float32", 1)
        case "i":
            return CacheSpec(INDEX_KEYS, "bfloat16", 1)
        case "s":
            return CacheSpec(SCALES, "float32", num_heads)
        case _:
            return CacheSpec(KEYS_AND_VALUES, "float32", num_heads)


stages = st.sampled_from([(4,), (1, 3), (3, 1), (2, 2), (1, 1, 2)])


@st.composite
def engines(draw: st.DrawFn, num_heads: int, kinds: str = "") -> list[RankLayout]:
    sizes = [tp for tp in (1, 2, 3, 4, 6, 8) if num_heads % tp == 0 or tp % num_heads == 0]
    return engine(
        draw(st.sampled_from(sizes)),
        num_heads,
        draw(stages),
        kinds=kinds,
        reverse=draw(st.booleans()),
    )


@given(st.data())
def test_every_wanted_layer_and_head_comes_once_from_a_rank_that_holds_it(data: st.DataObject) -> None:
    num_heads = data.draw(st.sampled_from([1, 2, 3, 4]))
    kinds = data.draw(st.sampled_from(["", "sksk", "lili", "klis", "llll"]))
    producers, consumers = (data.draw(engines(num_heads, kinds)) for _ in "pd")
    pairs = plan_pairs_of_layouts(producers, consumers, rotation=data.draw(st.integers(0, 2**64)))
    assert len(set(pairs)) == len(pairs)
    for index, local in enumerate(consumers):
        sources = [pair.producer_rank for pair in pairs if pair.consumer_rank == index]
        shares = plan_shares(local, {source: producers[source] for source in sources})
        assert set(shares) == set(sources), "a rank is read for nothing"
        taken = Counter()
        for source, share in shares.items():
            held = {layer.name: heads_of(layer, producers[source]) for layer in producers[source].layers}
            assert all(set(heads) <= set(held[name]) for name, heads in share.items())
            taken.update((name, head) for name, heads in share.items() for head in heads)
        wanted = [(layer.name, head) for layer in local.layers for head in heads_of(layer, local)]
        assert taken == Counter(wanted)


@given(st.data())
def test_without_stages_both_planners_agree(data: st.DataObject) -> None:
    num_heads = data.draw(st.sampled_from([1, 2, 3, 4]))
    sizes = [tp for tp in (1, 2, 3, 4, 6, 8) if num_heads % tp == 0 or tp % num_heads == 0]
    p, d = data.draw(st.sampled_from(sizes)), data.draw(st.sampled_from(sizes))
    rotation = data.draw(st.integers(0, 20))
    of_layouts = plan_pairs_of_layouts(engine(p, num_heads), engine(d, num_heads), rotation=rotation)
    assert of_layouts == plan_pairs(p, d, num_heads, rotation=rotation)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 100))
def test_replicas_differ_by_at_most_one_reader(producer_tp: int, consumer_tp: int, rotation: int) -> None:
    """MLA: every rank of P holds everything, and every rank of D reads all of it from one of them."""
    producers = engine(producer_tp, 1, kinds="llll")
    consumers = engine(consumer_tp, 1, kinds="llll")
    pairs = plan_pairs_of_layouts(producers, consumers, rotation=rotation)
    assert sorted(pair.consumer_rank for pair in pairs) == list(range(consumer_tp))
    readers = Counter({rank: 0 for rank in range(producer_tp)})
    readers.update(pair.producer_rank for pair in pairs)
    assert max(readers.values()) - min(readers.values()) <= 1


def test_engines_of_one_rank_are_spread_over_the_replicas() -> None:
    producers, consumer = engine(8, 1), engine(1, 1)
    sources = {plan_pairs_of_layouts(producers, consumer, rotation=r)[0].producer_rank for r in range(8)}
    assert sources == set(range(8))
    assert plan_pairs_of_layouts(producers, consumer) == (Pair(0, 0),), "without a rotation"


def test_equal_ranks_read_from_the_same_rank_for_any_rotation() -> None:
    for tp, heads in ((4, 4), (8, 2), (8, 1)):
        pairs = plan_pairs(tp, tp, heads, rotation=5)
        assert pairs == tuple(Pair(rank, rank) for rank in range(tp))


def test_a_consumer_with_stages_reads_from_the_stages_that_have_its_layers() -> None:
    pairs = plan_pairs_of_layouts(engine(1, 2, (3, 1)), engine(1, 2, (2, 2)))
    assert pairs == (Pair(0, 0), Pair(0, 1), Pair(1, 1))


def test_a_rank_without_wanted_layers_is_left_out() -> None:
    producers = engine(2, 2)
    local = engine(2, 2)[0]
    assert set(plan_shares(local, dict(enumerate(producers)))) == {0}
    twice = engine(2, 1)
    assert set(plan_shares(engine(1, 1)[0], dict(enumerate(twice)))) == {0}


@pytest.mark.parametrize(
    ("producers", "consumers", "message"),
    [
        (engine(1, 2, (2, 2))[:1], engine(1, 2), "1 ranks, expected 2 stages of 1"),
        (engine(1, 2), engine(1, 4), "heads of a: ours 4, theirs 2"),
        (engine(1, 1), engine(1, 1, kinds="llll"), "kind of a: ours 'latent', theirs 'keys_and_values'"),
        (
            [msgspec.structs.replace(engine(1, 2, (2, 2))[0], pp_size=1)],
            engine(1, 2),
            r"layers differ: the producer has no \['c', 'd'\]",
        ),
        (
            [engine(2, 2)[0], msgspec.structs.replace(engine(2, 2)[1], tp_size=1)],
            engine(1, 2),
            "tp_size of one engine",
        ),
    ],
)
def test_an_impossible_plan_is_explained(
    producers: list[RankLayout], consumers: list[RankLayout], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        plan_pairs_of_layouts(producers, consumers)


def test_an_incomplete_set_of_ranks_is_refused_before_any_read() -> None:
    producers, (local,) = engine(2, 2), engine(1, 2)
    with pytest.raises(PlanError, match=r"none of ranks \[0\] has heads \[1\] of a"):
        plan_shares(local, {0: producers[0]})
    hostile = msgspec.structs.replace(producers[0], num_blocks=9)
    with pytest.raises(PeerError, match="its last block ends"):
        plan_shares(local, {0: hostile, 1: producers[1]})


def test_overlapping_offers_of_ranks_are_refused() -> None:
    """One rank has half of the heads, another has all of them: the source of the others is ambiguous."""
    (local,) = engine(1, 2)
    with pytest.raises(PlanError, match=r"offers heads \[0, 1\] of a, some of which others offer"):
        plan_shares(local, {0: engine(2, 2)[0], 1: engine(1, 2)[0]})


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.data())
def test_a_layout_is_sound_if_its_slots_are_disjoint_and_in_their_region(
    num_heads: int, block_tokens: int, slot_bytes: int, data: st.DataObject
) -> None:
    """Tries all strides, compared with a check of every byte. What passes is sound; plain layouts pass."""
    layer = LayerLayout(
        "a",
        CacheSpec(KEYS_AND_VALUES, "float32", num_heads),
        0,
        data.draw(st.integers(0, 3)),
        data.draw(st.integers(0, 40)),
        data.draw(st.integers(0, 20)),
        slot_bytes * block_tokens,
        data.draw(st.integers(0, 20)),
    )
    nbytes = data.draw(st.integers(1, 120))
    layout = sound(layer, block_tokens, nbytes)
    taken: list[int] = []
    token_stride = layer.token_stride or slot_bytes
    for block in range(2):
        for head in range(num_heads):
            for token in range(block_tokens):
                start = block * layer.block_stride + head * layer.head_stride + token * token_stride
                taken += range(layer.offset + start, layer.offset + start + slot_bytes)
    try:
        check_layout(layout)
    except PeerError:
        dense = layer.head_stride == slot_bytes * block_tokens and token_stride == slot_bytes
        token_major = layer.head_stride == slot_bytes and token_stride == slot_bytes * num_heads
        fits = layer.block_stride >= num_heads * slot_bytes * block_tokens and max(taken) < nbytes
        assert not ((dense or token_major) and fits)
        return
    assert len(set(taken)) == len(taken)
    assert max(taken) < nbytes


def sound(layer: LayerLayout, block_tokens: int, nbytes: int) -> RankLayout:
    return RankLayout(
        tp_rank=0,
        tp_size=1,
        num_blocks=2,
        block_tokens=block_tokens,
        regions=(Region(4096, nbytes),),
        layers=(layer,),
    )
