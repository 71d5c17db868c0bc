"""Plans for engines without pipeline stages and with equal block layouts, to compare the real ones with."""

from baton.core.ids import Pair
from baton.core.layout import CopySpan, RankLayout, kv_heads_of
from baton.protocol.block_runs import Shape
from baton.protocol.plan import _source_of, share_spans


def plan_pairs(
    producer_tp: int, consumer_tp: int, num_kv_heads: int, *, rotation: int = 0
) -> tuple[Pair, ...]:
    """Pairs for engines without pipeline stages."""
    pairs: dict[Pair, None] = {}  # Ordered pairs, each once.
    for rank in range(consumer_tp):
        for head in kv_heads_of(rank, tp_size=consumer_tp, num_kv_heads=num_kv_heads):
            source = _source_of(head, rank, producer_tp, consumer_tp, num_kv_heads, rotation)
            pairs[Pair(source, rank)] = None
    return tuple(pairs)


def plan_spans(local: RankLayout, remote: RankLayout) -> tuple[CopySpan, ...]:
    """Copies from `remote` (P) to `local` (D), per block; empty if the plan has no such pair of ranks.

    For two engines without pipeline stages and with equal block layouts.
    """
    heads = heads_of_pair(
        Pair(remote.tp_rank, local.tp_rank), remote.tp_size, local.tp_size, local.layers[0].spec.num_heads
    )
    if not heads:
        return ()
    share = {layer.name: heads for layer in local.layers}
    return share_spans(local, remote, share, Shape(0, 0, local.block_tokens))


def heads_of_pair(pair: Pair, producer_tp: int, consumer_tp: int, num_kv_heads: int) -> range:
    """Global indices of the heads that move between these two ranks: one range, possibly empty."""
    rank = pair.consumer_rank
    moved = [
        head
        for head in kv_heads_of(rank, tp_size=consumer_tp, num_kv_heads=num_kv_heads)
        if _source_of(head, rank, producer_tp, consumer_tp, num_kv_heads, 0) == pair.producer_rank
    ]
    return range(moved[0], moved[-1] + 1) if moved else range(0)
