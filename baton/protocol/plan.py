"""Plan of which rank reads which bytes from which rank, as pure functions of two engines' layouts.

    plan_pairs_of_layouts  which rank of D reads from which rank of P: used by the scheduler
    plan_shares            what one rank of D takes from each of its ranks of P: used by the rank
    share_spans            which bytes these are
    plan_state_spans       the same, of recurrent states

Every KV head of every layer that a rank of D holds is read exactly once, from one rank of P that holds it.
Layers are matched by name, so the stages of a pipeline may cut the model anywhere. If P has replicas (more
ranks than heads, or a cache that all ranks hold), the readers of one head are spread over them.

    num_kv_heads = 4        P, tp 4:  |  0  |  1  |  2  |  3  |        D, tp 2:  |   0 1   |   2 3   |
                            pairs (0,0) (1,0) (2,1) (3,1); each moves one head into its half of D's block

The index of a rank in a pair is `pp_rank * tp_size + tp_rank`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from baton.core.ids import Pair
from baton.core.layout import CopySpan, RankLayout
from baton.protocol.block_runs import PlanError, Shape, check_equal, merged_spans, slot_spans
from baton.protocol.layout_checks import can_share, check_layout, heads_of, units_of

__all__ = [
    "GroupPair",
    "PlanError",
    "Share",
    "check_layout",
    "pair_groups",
    "plan_pairs_of_layouts",
    "plan_shares",
    "plan_state_spans",
    "share_spans",
]


class GroupPair(NamedTuple):
    """Index of a cache group on either side; the two groups have layers in common."""

    local: int
    remote: int


class Share(NamedTuple):
    """The heads and layers that a rank of D takes from one rank of P."""

    heads: range  # Global indices, one run.
    layers: tuple[str, ...]  # In D's order.


class _Side(NamedTuple):
    tp_size: int
    is_replicated: bool = False


def plan_pairs_of_layouts(
    producers: Sequence[RankLayout], consumers: Sequence[RankLayout], *, rotation: int = 0
) -> tuple[Pair, ...]:
    """Pairs of ranks, given all their ranks in order of index.

    `rotation` spreads independent readers over replicas: engines of one rank that read from replicated
    ranks. Raises PlanError if no rank of P holds something that D needs.
    """
    producer, consumer = _side_of(producers), _side_of(consumers)
    num_kv_heads = consumers[0].num_kv_heads
    check_equal("num_kv_heads", num_kv_heads, producers[0].num_kv_heads)
    stages = [{layer.name for layer in ranks[0].caches} for ranks in _stages(producers)]
    pairs: dict[Pair, None] = {}
    for index, layout in enumerate(consumers):
        wanted = {layer.name for layer in layout.layers}
        states = {state.name for state in layout.states}
        if missing := (wanted | states).difference(*stages):
            raise PlanError(f"layers differ: the producer has no {sorted(missing)[:3]}")
        units = {
            (unit, part.num_units)
            for state in layout.states
            for part in state.parts
            for unit in units_of(part, layout)
        }
        sources = [
            _source_of(head, layout.tp_rank, producer, consumer, num_kv_heads, rotation)
            for head in heads_of(layout)
        ]
        # States are split over ranks even where all ranks hold every KV head.
        sides = _Side(producer.tp_size), _Side(consumer.tp_size)
        of_states = [
            _source_of(unit, layout.tp_rank, *sides, num_units, rotation) for unit, num_units in sorted(units)
        ]
        for stage, names in enumerate(stages):
            read = (sources if names & wanted else []) + (of_states if names & states else [])
            pairs.update((Pair(stage * producer.tp_size + source, index), None) for source in read)
    return tuple(pairs)


def pair_groups(producers: Sequence[RankLayout], consumers: Sequence[RankLayout]) -> tuple[GroupPair, ...]:
    """The pairs of tables through which the layers move; every layer belongs to exactly one pair.

    Engines may group the layers of one model differently. Raises PlanError for a layer that no rank of P has,
    and for a layer that ranks of one engine put into different groups.
    """
    theirs, ours = _group_by_name(producers), _group_by_name(consumers)
    if missing := ours.keys() - theirs.keys():
        raise PlanError(f"layers differ: the producer has no {sorted(missing)[:3]}")
    return tuple(sorted({GroupPair(group, theirs[name]) for name, group in ours.items()}))


def _group_by_name(ranks: Sequence[RankLayout]) -> dict[str, int]:
    groups: dict[str, int] = {}
    for layer in (layer for rank in ranks for layer in rank.caches):
        if groups.setdefault(layer.name, layer.group) != layer.group:
            raise PlanError(f"ranks of one engine have {layer.name!r} in different cache groups")
    return groups


def plan_shares(local: RankLayout, remotes: Mapping[int, RankLayout]) -> dict[int, Share]:
    """The share that `local` takes from each rank of `remotes`, so that it reads everything exactly once.

    Ranks with nothing to read are left out. Raises PeerError for an unsound layout, PlanError if some head or
    layer is missing or is offered twice.
    """
    open_heads = {layer.name: set(heads_of(local)) for layer in local.layers}
    shares: dict[int, Share] = {}
    for index, remote in remotes.items():
        check_layout(remote)
        check_equal("num_kv_heads", local.num_kv_heads, remote.num_kv_heads)
        offered = {layer.name for layer in remote.layers}
        layers = tuple(layer.name for layer in local.layers if layer.name in offered)
        heads = [head for head in heads_of(local) if head in heads_of(remote)]
        # Of two replicas that are named for the same heads, only the first is read.
        heads = [head for head in heads if any(head in open_heads[name] for name in layers)]
        if not heads or not layers:
            continue
        if heads[-1] - heads[0] != len(heads) - 1 or not all(open_heads[n] >= {*heads} for n in layers):
            raise PlanError(f"rank {index} of the producer offers heads {heads}, some of which others offer")
        for name in layers:
            open_heads[name].difference_update(heads)
        shares[index] = Share(range(heads[0], heads[-1] + 1), layers)
    for name, heads_left in open_heads.items():
        if heads_left:
            raise PlanError(
                f"layers differ: none of ranks {sorted(remotes)} has heads {sorted(heads_left)} of {name}"
            )
    return shares


def plan_state_spans(
    local: RankLayout, remotes: Mapping[int, RankLayout], source: int
) -> dict[str, tuple[CopySpan, ...]]:
    """Copies of the states that `local` takes from rank `source` of `remotes`, by layer, for any two blocks.

    Of two replicas that hold a unit, only the first is read. Raises PlanError if a unit is missing, or a part
    differs.
    """
    spans: dict[str, tuple[CopySpan, ...]] = {}
    for state in local.states:
        holders = {
            index: theirs
            for index, remote in remotes.items()
            for theirs in remote.states
            if theirs.name == state.name
        }
        for index, theirs in holders.items():
            described = [
                [(part.name, part.num_units, part.unit_bytes, part.dtype) for part in one.parts]
                for one in (state, theirs)
            ]
            check_equal(f"parts of the state of {state.name} in rank {index}", *described)
        atoms = []
        for place, part in enumerate(state.parts):
            ours = units_of(part, local)
            for unit in ours:
                held = {
                    index: units_of(theirs.parts[place], remotes[index]) for index, theirs in holders.items()
                }
                found = next((index for index, units in held.items() if unit in units), None)
                if found is None:
                    raise PlanError(
                        f"layers differ: none of ranks {sorted(remotes)} has unit {unit} of {part.name} of "
                        f"the state of {state.name}"
                    )
                if found != source:
                    continue
                theirs = holders[source]
                atoms.append(
                    CopySpan(
                        state.region,
                        state.offset + part.offset + (unit - ours.start) * part.unit_bytes,
                        state.block_stride,
                        theirs.region,
                        theirs.offset
                        + theirs.parts[place].offset
                        + (unit - held[source].start) * part.unit_bytes,
                        theirs.block_stride,
                        part.unit_bytes,
                    )
                )
        if atoms:
            spans[state.name] = tuple(merged_spans(atoms))
    return spans


def share_spans(
    local: RankLayout, remote: RankLayout, share: Share, shape: Shape, layers: Sequence[str] | None = None
) -> tuple[CopySpan, ...]:
    """Copies of one run of tokens of a share, for any pair of blocks. `layers`: limits it to these."""
    return slot_spans(
        local,
        remote,
        share.layers if layers is None else layers,
        local_head=share.heads.start - heads_of(local).start,
        remote_head=share.heads.start - heads_of(remote).start,
        num_heads=len(share.heads),
        shape=shape,
    )


def _source_of(
    head: int, consumer_rank: int, producer: _Side, consumer: _Side, num_kv_heads: int, rotation: int
) -> int:
    """The tensor-parallel rank of P that `consumer_rank` reads `head` (or a unit of a state) from."""
    if producer.is_replicated:
        # One reader takes all heads from one rank, which makes one pair instead of several.
        return _replica_of(consumer_rank, consumer.tp_size, producer.tp_size, rotation)
    if producer.tp_size <= num_kv_heads:
        return head // (num_kv_heads // producer.tp_size)
    replicas = producer.tp_size // num_kv_heads
    if consumer.is_replicated:
        readers = consumer.tp_size
    else:
        readers = max(1, consumer.tp_size // num_kv_heads)
    return head * replicas + _replica_of(consumer_rank % readers, readers, replicas, rotation)


def _side_of(ranks: Sequence[RankLayout]) -> _Side:
    first = ranks[0]
    side = _Side(first.tp_size, first.is_replicated)
    if len(ranks) != first.tp_size * first.pp_size:
        raise PlanError(f"{len(ranks)} ranks, expected {first.pp_size} stages of {first.tp_size}")
    if not first.is_replicated:
        _check_divides(first.tp_size, first.num_kv_heads, "engine")
    for rank in ranks:
        check_equal("tp_size and is_replicated of one engine", side, _Side(rank.tp_size, rank.is_replicated))
    return side


def _stages(ranks: Sequence[RankLayout]) -> list[Sequence[RankLayout]]:
    tp_size = ranks[0].tp_size
    return [ranks[first : first + tp_size] for first in range(0, len(ranks), tp_size)]


def _check_divides(tp_size: int, num_kv_heads: int, whose: str) -> None:
    if tp_size < 1 or num_kv_heads < 1 or not can_share(tp_size, num_kv_heads):
        raise PlanError(f"the {whose}'s {tp_size} ranks cannot share {num_kv_heads} KV heads evenly")


def _replica_of(reader: int, num_readers: int, num_replicas: int, rotation: int) -> int:
    """Index of the replica that `reader` reads from, chosen so that all get about the same load.

    With at least as many readers as replicas, every replica is used. With fewer, the readers are spread out,
    and `rotation` shifts them, so that independent groups of readers do not all read the first replica.
    """
    spread = reader * num_replicas // num_readers
    return spread if num_readers >= num_replicas else (spread + rotation) % num_replicas
