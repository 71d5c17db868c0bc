"""Which bytes of which rank go where: pure functions of two engines' layouts.

    plan_pairs(P's ranks, D's ranks)     who reads from whom
    plan_spans(D rank's layout, P rank's layout)     which byte ranges, for every block of a transfer

Every KV head that a D rank holds is read exactly once, from one P rank that holds it. Where P has replicas
(more ranks than heads), the D ranks that want the same head are spread over them.

    num_kv_heads = 4        P, tp 4:  |  0  |  1  |  2  |  3  |        D, tp 2:  |   0 1   |   2 3   |
                            pairs (0,0) (1,0) (2,1) (3,1); each moves one head into its half of D's block
"""

from collections.abc import Iterable, Iterator

from baton.core.errors import PeerError, TransferError
from baton.core.ids import Pair
from baton.core.layout import CopySpan, LayerLayout, RankLayout
from baton.core.topology import kv_heads_of

MAX_RANKS = 4096
MAX_REGIONS = 4096
MAX_LAYERS = 4096
MAX_NAME_CHARS = 256
MAX_BLOCKS = 2**32
ADDRESS_SPACE = 2**64


class PlanError(TransferError):
    """Both layouts are sound, but there is no way from one to the other. Names both values."""


def plan_pairs(producer_tp: int, consumer_tp: int, num_kv_heads: int) -> tuple[Pair, ...]:
    """Raises PlanError if either size cannot hold that many heads."""
    _check_divides(producer_tp, num_kv_heads, "producer")
    _check_divides(consumer_tp, num_kv_heads, "consumer")
    pairs: list[Pair] = []
    for consumer_rank in range(consumer_tp):
        for head in kv_heads_of(consumer_rank, tp_size=consumer_tp, num_kv_heads=num_kv_heads):
            source = _source_of(head, consumer_rank, producer_tp, consumer_tp, num_kv_heads)
            pair = Pair(source, consumer_rank)
            if not pairs or pairs[-1] != pair:
                pairs.append(pair)
    return tuple(pairs)


def plan_spans(local: RankLayout, remote: RankLayout) -> tuple[CopySpan, ...]:
    """What `local` (D) reads from `remote` (P), per block; empty if these two ranks are no pair of the plan.

    Raises PeerError if the remote layout is unsound, PlanError if both are sound and do not fit together.
    """
    check_layout(remote)
    _check_equal("num_kv_heads", local.num_kv_heads, remote.num_kv_heads)
    _check_equal("block_tokens", local.block_tokens, remote.block_tokens)
    _check_equal("dtype", local.dtype, remote.dtype)
    heads = heads_of_pair(
        Pair(remote.tp_rank, local.tp_rank), remote.tp_size, local.tp_size, local.num_kv_heads
    )
    if not heads:
        return ()
    local_first = _heads(local).start
    remote_first = _heads(remote).start
    atoms = (
        _atom(local, local_layer, head - local_first, remote, remote_layer, head - remote_first)
        for local_layer, remote_layer in _matched_layers(local, remote)
        for head in heads
    )
    return tuple(_merged(atoms))


def heads_of_pair(pair: Pair, producer_tp: int, consumer_tp: int, num_kv_heads: int) -> range:
    """Global indices of the heads that move between these two ranks: one run, possibly empty."""
    wanted = kv_heads_of(pair.consumer_rank, tp_size=consumer_tp, num_kv_heads=num_kv_heads)
    moved = [
        head
        for head in wanted
        if _source_of(head, pair.consumer_rank, producer_tp, consumer_tp, num_kv_heads) == pair.producer_rank
    ]
    return range(moved[0], moved[-1] + 1) if moved else range(0)


def check_layout(layout: RankLayout) -> None:
    """Raises PeerError unless every block of every layer lies inside its region and no two heads overlap.

    A layout from a peer is believed in nothing before it has passed here.
    """
    _check_range("tp_size", layout.tp_size, 1, MAX_RANKS)
    _check_range("tp_rank", layout.tp_rank, 0, layout.tp_size - 1)
    _check_range("num_kv_heads", layout.num_kv_heads, 1, MAX_RANKS)
    if layout.num_kv_heads % layout.tp_size and layout.tp_size % layout.num_kv_heads:
        raise PeerError(f"layout: {layout.tp_size} ranks cannot share {layout.num_kv_heads} KV heads")
    _check_range("num_blocks", layout.num_blocks, 1, MAX_BLOCKS)
    _check_range("block_tokens", layout.block_tokens, 1, 1 << 16)
    _check_range("number of regions", len(layout.regions), 1, MAX_REGIONS)
    _check_range("number of layers", len(layout.layers), 1, MAX_LAYERS)
    for region in layout.regions:
        _check_range("region address", region.address, 0, ADDRESS_SPACE - 1)
        _check_range("region nbytes", region.nbytes, 1, ADDRESS_SPACE - region.address)
    names = {layer.name for layer in layout.layers}
    if len(names) != len(layout.layers):
        raise PeerError("layout: two layers have one name")
    for layer in layout.layers:
        _check_layer(layer, layout)


def _check_layer(layer: LayerLayout, layout: RankLayout) -> None:
    _check_range("length of a layer's name", len(layer.name), 1, MAX_NAME_CHARS)
    where = f"layer {layer.name!r}: "
    _check_range(where + "region", layer.region, 0, len(layout.regions) - 1)
    region_bytes = layout.regions[layer.region].nbytes
    num_heads = len(_heads(layout))
    _check_range(where + "offset", layer.offset, 0, region_bytes - 1)
    _check_range(where + "head_bytes", layer.head_bytes, 1, region_bytes)
    if layer.head_bytes % layout.block_tokens:
        raise PeerError(f"layout: {where}head_bytes {layer.head_bytes} is no multiple of its tokens")
    _check_range(where + "head_stride", layer.head_stride, layer.head_bytes, ADDRESS_SPACE)
    block_bytes = (num_heads - 1) * layer.head_stride + layer.head_bytes
    _check_range(where + "block_stride", layer.block_stride, block_bytes, ADDRESS_SPACE)
    end = layer.offset + (layout.num_blocks - 1) * layer.block_stride + block_bytes
    if end > region_bytes:
        raise PeerError(f"layout: {where}its last block ends at {end}, its region at {region_bytes}")


def _source_of(head: int, consumer_rank: int, producer_tp: int, consumer_tp: int, num_kv_heads: int) -> int:
    """The P rank that `consumer_rank` reads `head` from."""
    if producer_tp <= num_kv_heads:
        return head // (num_kv_heads // producer_tp)
    replicas = producer_tp // num_kv_heads
    readers = max(1, consumer_tp // num_kv_heads)  # D ranks that want this head.
    return head * replicas + (consumer_rank % readers) * replicas // readers


def _heads(layout: RankLayout) -> range:
    return kv_heads_of(layout.tp_rank, tp_size=layout.tp_size, num_kv_heads=layout.num_kv_heads)


def _matched_layers(local: RankLayout, remote: RankLayout) -> Iterator[tuple[LayerLayout, LayerLayout]]:
    theirs = {layer.name: layer for layer in remote.layers}
    ours = {layer.name for layer in local.layers}
    if ours != theirs.keys():
        raise PlanError(
            f"layers differ: only ours {sorted(ours - theirs.keys())[:3]}, "
            f"only theirs {sorted(theirs.keys() - ours)[:3]}"
        )
    for layer in local.layers:
        other = theirs[layer.name]
        _check_equal(f"head_bytes of {layer.name}", layer.head_bytes, other.head_bytes)
        yield layer, other


def _atom(
    local: RankLayout,
    local_layer: LayerLayout,
    local_head: int,
    remote: RankLayout,
    remote_layer: LayerLayout,
    remote_head: int,
) -> CopySpan:
    """One head of one layer: the smallest run that is contiguous on both sides."""
    assert 0 <= local_head < len(_heads(local))
    assert 0 <= remote_head < len(_heads(remote))
    return CopySpan(
        local_region=local_layer.region,
        local_offset=local_layer.offset + local_head * local_layer.head_stride,
        local_stride=local_layer.block_stride,
        remote_region=remote_layer.region,
        remote_offset=remote_layer.offset + remote_head * remote_layer.head_stride,
        remote_stride=remote_layer.block_stride,
        nbytes=local_layer.head_bytes,
    )


def _merged(atoms: Iterable[CopySpan]) -> Iterator[CopySpan]:
    """Neighbours that follow each other on both sides become one span, as long as it stays within a block."""
    last: CopySpan | None = None
    for atom in atoms:
        if last is not None and _follows(last, atom):
            last = CopySpan(
                last.local_region,
                last.local_offset,
                last.local_stride,
                last.remote_region,
                last.remote_offset,
                last.remote_stride,
                last.nbytes + atom.nbytes,
            )
            continue
        if last is not None:
            yield last
        last = atom
    if last is not None:
        yield last


def _follows(last: CopySpan, atom: CopySpan) -> bool:
    return (
        (last.local_region, last.local_stride, last.remote_region, last.remote_stride)
        == (atom.local_region, atom.local_stride, atom.remote_region, atom.remote_stride)
        and last.local_offset + last.nbytes == atom.local_offset
        and last.remote_offset + last.nbytes == atom.remote_offset
        and last.nbytes + atom.nbytes <= min(last.local_stride, last.remote_stride)
    )


def _check_divides(tp_size: int, num_kv_heads: int, whose: str) -> None:
    if tp_size < 1 or num_kv_heads < 1 or (num_kv_heads % tp_size and tp_size % num_kv_heads):
        raise PlanError(f"the {whose}'s {tp_size} ranks cannot share {num_kv_heads} KV heads")


def _check_equal(what: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise PlanError(f"{what}: ours {ours!r}, theirs {theirs!r}")


def _check_range(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise PeerError(f"layout: {what} is {value}, expected {low} to {high}")
