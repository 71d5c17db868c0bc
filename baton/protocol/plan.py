"""Plan of which rank reads which bytes from which rank, as pure functions of two engines' layouts.

    plan_pairs_of_layouts  which rank of D reads from which rank of P: used by the scheduler
    plan_shares            what one rank of D takes from each of its ranks of P: used by the rank
    share_spans            which bytes these are
    plan_state_spans       the same, of recurrent states

Every head of every cache that a rank of D holds is read exactly once, from one rank of P that holds it.
Caches are matched by name, so the stages of a pipeline may cut the model anywhere. How many heads a cache has
follows from its kind: several for keys and values and their scales, one for latents and index keys, units for
states. If P has replicas (more ranks than heads), the readers of one head are spread over them.

    num_kv_heads = 4        P, tp 4:  |  0  |  1  |  2  |  3  |        D, tp 2:  |   0 1   |   2 3   |
                            pairs (0,0) (1,0) (2,1) (3,1); each moves one head into its half of D's block

The index of a rank in a pair is `pp_rank * tp_size + tp_rank`.

Layers of D's draft model are read if P has the same draft, and left out otherwise (`unfilled_drafts`): P may
have no draft or another one, and answers do not depend on a draft's KV.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from baton.core.ids import Pair
from baton.core.layout import CopySpan, LayerLayout, RankLayout, StateLayout
from baton.protocol.block_runs import HeadRun, PlanError, Shape, check_equal, merged_spans, slot_spans
from baton.protocol.layout_checks import check_layout, heads_of, units_of

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
    "unfilled_drafts",
]


class GroupPair(NamedTuple):
    """Index of a cache group on either side; the two groups have layers in common."""

    local: int
    remote: int


Share: TypeAlias = Mapping[str, range]
"""What a rank of D takes from one rank of P: one run of global head indices by layer, in D's order."""


def plan_pairs_of_layouts(
    producers: Sequence[RankLayout], consumers: Sequence[RankLayout], *, rotation: int = 0
) -> tuple[Pair, ...]:
    """Pairs of ranks, given all their ranks in order of index.

    `rotation` spreads independent readers over replicas: engines of one rank that read from replicated
    ranks. Raises PlanError if no rank of P holds something that D needs.
    """
    producer_tp, consumer_tp = _tp_size_of(producers), _tp_size_of(consumers)
    theirs = {layer.name: layer for rank in producers for layer in rank.layers}
    stages = [{cache.name for cache in ranks[0].caches} for ranks in _stages(producers)]
    unfilled = unfilled_drafts(producers, consumers)
    pairs: dict[Pair, None] = {}
    for index, layout in enumerate(consumers):
        wanted = [cache for cache in layout.caches if cache.name not in unfilled]
        if missing := {cache.name for cache in wanted}.difference(*stages):
            raise PlanError(f"layers differ: the producer has no {sorted(missing)[:3]}")
        for layer in layout.layers:
            if layer.name not in unfilled:
                _check_alike(layer, theirs.get(layer.name))
        for stage, names in enumerate(stages):
            units = {unit for cache in wanted if cache.name in names for unit in _units(cache, layout)}
            for source in _sources_of(units, layout.tp_rank, producer_tp, consumer_tp, rotation):
                pairs[Pair(stage * producer_tp + source, index)] = None
    return tuple(pairs)


def _sources_of(
    units: Iterable[tuple[int, int]], consumer_rank: int, producer_tp: int, consumer_tp: int, rotation: int
) -> list[int]:
    """The tensor-parallel ranks of P that a rank of D reads these (unit, number of units) from.

    Where a rank is read anyway, it also serves what it has a replica of, which makes fewer pairs.
    """
    sources: dict[int, None] = {}
    for unit, num_units in sorted(units, key=lambda of: (-of[1], of[0])):
        replicas = max(1, producer_tp // num_units)
        holders = range(unit * replicas, (unit + 1) * replicas)
        if producer_tp <= num_units or sources.keys().isdisjoint(holders):
            sources[_source_of(unit, consumer_rank, producer_tp, consumer_tp, num_units, rotation)] = None
    return [*sources]


def _units(cache: LayerLayout | StateLayout, layout: RankLayout) -> Iterator[tuple[int, int]]:
    """The heads of a cache, or the units of a state, that a rank holds: each with the model's number."""
    if isinstance(cache, LayerLayout):
        yield from ((head, cache.spec.num_heads) for head in heads_of(cache, layout))
    else:
        yield from ((unit, part.num_units) for part in cache.parts for unit in units_of(part, layout))


def _check_alike(ours: LayerLayout, theirs: LayerLayout | None) -> None:
    """Raises PlanError for caches of different kinds. `conversion` compares the rest."""
    if theirs is None:
        raise PlanError(f"kind of {ours.name}: ours {ours.spec.kind!r}, theirs 'state'")
    check_equal(f"kind of {ours.name}", ours.spec.kind, theirs.spec.kind)
    check_equal(f"heads of {ours.name}", ours.spec.num_heads, theirs.spec.num_heads)


def pair_groups(producers: Sequence[RankLayout], consumers: Sequence[RankLayout]) -> tuple[GroupPair, ...]:
    """The pairs of tables through which the layers move; every layer belongs to exactly one pair.

    Engines may group the layers of one model differently. Raises PlanError for a layer that no rank of P has,
    and for a layer that ranks of one engine put into different groups.
    """
    theirs, ours = _group_by_name(producers), _group_by_name(consumers)
    for name in unfilled_drafts(producers, consumers):
        del ours[name]
    if missing := ours.keys() - theirs.keys():
        raise PlanError(f"layers differ: the producer has no {sorted(missing)[:3]}")
    return tuple(sorted({GroupPair(group, theirs[name]) for name, group in ours.items()}))


def unfilled_drafts(producers: Sequence[RankLayout], consumers: Sequence[RankLayout]) -> frozenset[str]:
    """Layers of D's draft model that P does not have, because it has no draft or another one.

    Raises PlanError for a layer that is the model's on one side and a draft's on the other.
    """
    theirs, ours = _draft_by_name(producers), _draft_by_name(consumers)
    for name in theirs.keys() & ours.keys():
        if bool(theirs[name]) != bool(ours[name]):
            side = "the producer" if theirs[name] else "the consumer"
            raise PlanError(f"layers differ: only {side} has {name!r} in a draft model")
    return frozenset(name for name, draft in ours.items() if draft and theirs.get(name) != draft)


def _draft_by_name(ranks: Sequence[RankLayout]) -> dict[str, str]:
    """The digest of the draft that a layer belongs to; empty: the model itself."""
    return {layer.name: rank.draft if layer.is_draft else "" for rank in ranks for layer in rank.layers}


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
    unfilled = unfilled_drafts([*remotes.values()], [local])
    wanted = [layer for layer in local.layers if layer.name not in unfilled]
    open_heads = {layer.name: set(heads_of(layer, local)) for layer in wanted}
    shares: dict[int, Share] = {}
    for index, remote in remotes.items():
        check_layout(remote)
        theirs = {layer.name: layer for layer in remote.layers}
        share: dict[str, range] = {}
        for layer in wanted:
            if layer.name not in theirs:
                continue
            _check_alike(layer, theirs[layer.name])
            offered = heads_of(theirs[layer.name], remote)
            heads = [head for head in heads_of(layer, local) if head in offered]
            still_open = open_heads[layer.name]
            # Only the first of two replicas that are named for the same heads is read.
            if not heads or still_open.isdisjoint(heads):
                continue
            if not still_open.issuperset(heads):
                raise PlanError(
                    f"rank {index} of the producer offers heads {heads} of {layer.name}, some of which "
                    "others offer"
                )
            still_open.difference_update(heads)
            share[layer.name] = range(heads[0], heads[-1] + 1)
        if share:
            shares[index] = share
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


def share_spans(local: RankLayout, remote: RankLayout, share: Share, shape: Shape) -> tuple[CopySpan, ...]:
    """Copies of one run of tokens of a share, for any pair of blocks."""
    return slot_spans(local, remote, head_runs(local, remote, share), shape)


def head_runs(local: RankLayout, remote: RankLayout, share: Share) -> Iterator[HeadRun]:
    """The share as runs of heads in both layouts."""
    ours = {layer.name: layer for layer in local.layers}
    theirs = {layer.name: layer for layer in remote.layers}
    for name, heads in share.items():
        yield HeadRun(
            ours[name],
            heads.start - heads_of(ours[name], local).start,
            theirs[name],
            heads.start - heads_of(theirs[name], remote).start,
            len(heads),
        )


def _source_of(
    unit: int, consumer_rank: int, producer_tp: int, consumer_tp: int, num_units: int, rotation: int
) -> int:
    """The tensor-parallel rank of P that `consumer_rank` reads a head, or a unit of a state, from."""
    if producer_tp <= num_units:
        return unit // (num_units // producer_tp)
    replicas = producer_tp // num_units
    readers = max(1, consumer_tp // num_units)
    return unit * replicas + _replica_of(consumer_rank % readers, readers, replicas, rotation)


def _tp_size_of(ranks: Sequence[RankLayout]) -> int:
    first = ranks[0]
    if len(ranks) != first.tp_size * first.pp_size:
        raise PlanError(f"{len(ranks)} ranks, expected {first.pp_size} stages of {first.tp_size}")
    for rank in ranks:
        check_equal("tp_size of one engine", first.tp_size, rank.tp_size)
    return first.tp_size


def _stages(ranks: Sequence[RankLayout]) -> list[Sequence[RankLayout]]:
    tp_size = ranks[0].tp_size
    return [ranks[first : first + tp_size] for first in range(0, len(ranks), tp_size)]


def _replica_of(reader: int, num_readers: int, num_replicas: int, rotation: int) -> int:
    """Index of the replica that `reader` reads from, chosen so that all get about the same load.

    With at least as many readers as replicas, every replica is used. With fewer, the readers are spread out,
    and `rotation` shifts them, so that independent groups of readers do not all read the first replica.
    """
    spread = reader * num_replicas // num_readers
    return spread if num_readers >= num_replicas else (spread + rotation) % num_replicas
