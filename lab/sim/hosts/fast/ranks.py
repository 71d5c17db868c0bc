"""Stand-in for the worker halves of all ranks of a host: carries out orders, reports how reads ended.

The end of a pair's reads is reported once, when every part has ended and no other part follows.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from baton.connectors.pull.metadata import (
    EndReads,
    FailedLoad,
    Order,
    PullWorkerReport,
    ReadBlocks,
    ReadEnd,
)
from baton.connectors.pull.reads.operations import Parts
from baton.core.ids import Address, Pair
from lab.sim.hosts.fast.facts import Landing
from lab.sim.hosts.fast.memory import NUM_LAYERS, from_first_unit, toy_spans, toy_state_spans
from lab.sim.kernel.connection import Connection
from lab.sim.kernel.reads import Copy, Read

if TYPE_CHECKING:
    from lab.sim.hosts.fast.host import Host


class Ranks:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._parts: dict[tuple[int, Pair], Parts] = {}
        self._ended: set[ReadEnd] = set()
        self._links: dict[tuple[Address, Pair], Connection] = {}

    @property
    def num_open(self) -> int:
        return len(self._parts)

    def carry_out(self, order: Order) -> None:
        match order:
            case ReadBlocks():
                self._read(order)
            case EndReads(claim):
                self._cancel(claim)
            case FailedLoad(request_id, _):
                self._host.fetches.load_failed(request_id)

    def report(self, step: int) -> PullWorkerReport | None:
        """The reports of all ranks, combined as the engine combines them."""
        ended, self._ended = self._ended, set()
        if not ended and not step:
            return None
        others = range(1, self._host.num_ranks if step else 1)
        return PullWorkerReport(
            rank=0,
            step=step,
            ended=ended,
            others=tuple([PullWorkerReport(rank=rank, step=step) for rank in others]),
        )

    def _read(self, order: ReadBlocks) -> None:
        host, world = self._host, self._host.world
        landing = host.fetches.by_claim[order.claim]
        is_early = landing.loan_id is None
        if is_early:
            landing.num_early += 1
            world.count("early reads")
            world.count("early reads of cache groups", order.groups is not None)
            world.count("early reads of some layers", order.layers is not None)
        elif order.is_last and "baton_ticket" not in (landing.request.kv_transfer_params or {}):
            what = "has read" if landing.num_early else "has read nothing"
            world.count(f"lent to a stream that {what}")
        span = slice(order.first_token, order.first_token + order.num_tokens)
        for pair in order.pairs:
            parts = self._parts.setdefault((order.claim, pair), Parts(order.claim, pair))
            parts.is_complete |= order.is_last
            if order.num_tokens:
                parts.num_open += 1
                self._post(order, span, pair, landing, parts)
            self._settle(parts)

    def _post(self, order: ReadBlocks, span: slice, pair: Pair, landing: Landing, parts: Parts) -> None:
        host, cluster = self._host, self._host.cluster
        source, num_blocks = cluster.incarnations[order.producer], host.pool.num_blocks
        link = self._links.get((source.address, pair))
        if link is None or (link.is_lost and cluster.parts.replaces_links):
            link = self._links[source.address, pair] = cluster.reads.dial(source, host)
        origins, targets = tuple(order.remote_blocks[span]), tuple(order.local_blocks[span])
        copies: list[Copy] = []  # None of a lost link, or if the producer lies: the post is refused.
        if not link.is_lost and all(0 <= block < num_blocks for block in origins):
            group = order.groups.local if order.groups is not None else 0
            if host.pool.groups[group].is_state:
                landing.has_states_read = True
                host.world.count("states read")
                host.world.count("slices of states read", source.num_ranks != host.num_ranks)
                sources = sorted(
                    p.producer_rank for p in order.pairs if p.consumer_rank == pair.consumer_rank
                )
                spans = toy_state_spans(
                    pair,
                    tuple(sources),
                    source.num_ranks,
                    host.num_ranks,
                    num_blocks,
                    host.pool.groups,
                    group,
                )
                if not cluster.parts.slices_states:
                    spans = tuple(map(from_first_unit, spans))
            else:
                layers = order.layers
                if not cluster.parts.reads_all_layers:
                    first, last = layers or (0, NUM_LAYERS)
                    layers = first, min(last, NUM_LAYERS - 1)
                spans = toy_spans(
                    pair, source.num_ranks, host.num_ranks, num_blocks, host.pool.groups, layers, group
                )
                if not cluster.parts.slices_heads:
                    spans = tuple(map(from_first_unit, spans))
            copies = [
                (
                    span.local_offset + local * span.local_stride,
                    span.remote_offset + remote * span.remote_stride,
                    span.nbytes,
                )
                for span in spans
                for remote, local in zip(origins, targets, strict=True)
            ]
        cluster.reads.post(
            Read(
                number=len(cluster.reads.posted) + 1,
                consumer=host,
                source=source,
                ranks=pair,
                link=link,
                origins=origins,
                targets=targets,
                copies=copies,
                owner=landing,
                on_end=partial(self._part_ended, parts),
            )
        )

    def _cancel(self, claim: int) -> None:
        for key, parts in list(self._parts.items()):
            if key[0] == claim:
                del self._parts[key]  # Later parts of this claim are counted apart.
                parts.is_complete = True
                parts.fail("cancelled")
                self._settle(parts)
        self._host.cluster.reads.cancel(self._host.fetches.by_claim[claim])

    def _part_ended(self, parts: Parts, error: str | None) -> None:
        parts.num_open -= 1
        if error is not None:
            parts.fail(error)
        self._settle(parts)

    def _settle(self, parts: Parts) -> None:
        if not parts.has_ended:
            return
        if self._parts.get((parts.claim, parts.pair)) is parts:
            del self._parts[parts.claim, parts.pair]
        self._ended.add(parts.to_end())
        # Reported in an event of its own.
        self._host.world.after(0.0, partial(self._host.when_awake, self._report))

    def _report(self) -> None:
        if self._ended:
            self._host.step()
