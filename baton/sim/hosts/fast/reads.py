"""One-sided reads and the links that carry them: slow, hung, torn, failing, and altered by the wire.

A read lives from its post until nothing can move any more. Its poster may have died long before, and another
incarnation of the same name may have replaced the owner of its source. Each pair of ranks has a link: a
connection (baton.sim.kernel.connection) that is dialled for the first read, and again after it was lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core.ids import Address, Pair
from baton.sim.checkers import fenced
from baton.sim.checkers.fresh import TORN
from baton.sim.hosts.fast.facts import Landing, Lent, Read
from baton.sim.hosts.fast.memory import Content, toy_spans
from baton.sim.kernel.connection import Connection, flip_one
from baton.sim.kernel.lies import flip
from baton.sim.kernel.links import Links

if TYPE_CHECKING:
    from baton.sim.hosts.fast.cluster import Cluster
    from baton.sim.hosts.fast.host import Host

SLOW_READ_S = 5.0
CANCEL_MAX_S = 2.0


class ReadNetwork(Links):
    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.world, cluster.parts.checks)
        self._cluster = cluster
        self.live: list[Read] = []
        self.num_posted = 0
        self._link_by_pair: dict[tuple[Address, Address, Pair], Connection] = {}

    def post(self, read: Read) -> None:
        faults, world = self.world.faults, self.world
        self.live.append(read)
        pool, transfer_id = read.source.pool, read.landing.transfer_id
        generation = read.consumer.pool.generation
        read.target_generations = [generation[block] for block in read.targets]
        if not all(0 <= block < pool.num_blocks for block in read.origins):
            return self._end_soon(read)  # The producer lies. The transport refuses the post.
        read.is_torn = not read.source.is_alive or not all(
            isinstance(owner, Lent) and owner.transfer_id == transfer_id
            for owner in (pool.owner[block] for block in read.origins)
        )
        read.origin_generations = [pool.generation[block] for block in read.origins]
        read.cells = self._cells(read)
        memory = pool.ranks[read.pair.producer_rank]
        read.before = [memory[remote] for remote, _ in read.cells]
        took_s = world.spread(SLOW_READ_S if world.chance(faults.read_slow) else faults.read_mean_s)
        if world.chance(faults.read_hang):
            took_s = world.rng.uniform(10, 60)
        ok = not world.chance(faults.read_error)
        read.link = link = self._link_of(read)
        if link.is_lost:
            return self._end_soon(read)
        read.request = link.ask(tuple([remote for remote, _ in read.cells]))
        world.after(took_s, lambda: self._ended(read, ok=ok))
        if world.lies(faults.link_loss):
            self.break_link(link, took_s)

    def cancel(self, consumer: Host, landing: Landing) -> None:
        for read in self.live:
            if read.consumer is consumer and read.landing is landing:
                read.is_cancelled = True
                self._end_soon(read)

    def rank_died(self, host: Host, rank: int) -> None:
        """Its reads and the reads from its memory fail. Nothing else stops."""
        for read in self.live:
            is_reader = read.consumer is host and read.pair.consumer_rank == rank
            is_source = read.source is host and read.pair.producer_rank == rank
            if is_reader or is_source:
                self._end_soon(read)

    # --- Links ------------------------------------------------------------------------------------

    def _link_of(self, read: Read) -> Connection:
        key = (read.consumer.address, read.source.address, read.pair)
        link = self._link_by_pair.get(key)
        if link is None or (link.is_lost and self._cluster.parts.replaces_links):
            link = self._link_by_pair[key] = self.new_link()
        return link

    def fail_reads(self, link: Connection) -> None:
        """The next read of the pair dials again."""
        for (consumer, producer, _), other in self._link_by_pair.items():
            if other is link and producer.engine_id != consumer.engine_id:
                self.lost_ways[producer.engine_id, consumer.engine_id] = None
        for read in self.live:
            if read.link is link:
                self._end_soon(read)

    # --- Ends -------------------------------------------------------------------------------------

    def _end_soon(self, read: Read) -> None:
        delay_s = min(self.world.spread(self.world.faults.cancel_mean_s), CANCEL_MAX_S)
        self.world.after(delay_s, lambda: self._ended(read, ok=False))

    def _ended(self, read: Read, *, ok: bool) -> None:
        if not read.is_live or (ok and read.link is not None and read.link.is_stalled):
            return
        read.is_live = False
        self.live.remove(read)
        consumer, source = read.consumer, read.source
        if not consumer.is_alive:
            return
        if read.link is None:  # Refused when it was posted.
            return consumer.when_awake(lambda: read.on_end(False))
        if not source.is_alive:
            successor = self._cluster.hosts[source.address.engine_id]
            if self._cluster.parts.bound_reads or not successor.is_alive:
                ok = False
            source, read.is_torn = successor, True
        if read.origin_generations != [source.pool.generation[block] for block in read.origins]:
            read.is_torn = True
        payload = self._exchange(read, source) if ok else None
        ok = payload is not None
        if ok or self.world.chance(0.5):
            fenced.check_landing(read)
            memory = read.consumer.pool.ranks[read.pair.consumer_rank]
            # Without a payload, as after a failed read.
            for cell, (_, local) in zip(payload or [None] * len(read.cells), read.cells, strict=True):
                memory[local] = cell
        consumer.when_awake(lambda: read.on_end(ok))

    def _exchange(self, read: Read, source: Host) -> tuple[Content, ...] | None:
        """Returns the payload, or None if a request or an answer did not verify and the link is lost."""
        world, link, request = self.world, read.link, read.request
        assert link is not None
        assert request is not None
        if not world.faults.read_lies:
            return self._payload(read, source, request.wanted)
        rng = world.rng_of_lies
        num_cells = len(source.pool.ranks[read.pair.producer_rank])

        def serve(wanted: tuple[int, ...]) -> tuple[Content, ...] | None:
            if not all(0 <= cell < num_cells for cell in wanted):
                return None
            return self._payload(read, source, wanted)

        return self.exchange(
            link,
            request,
            serve,
            lambda cell: flip(rng, cell, 4),
            lambda cells: flip_one(rng, cells, None),
            lambda payload: len(payload) == len(read.cells),
        )

    def _payload(self, read: Read, source: Host, wanted: tuple[int, ...]) -> tuple[Content, ...]:
        """A cell that changed during the read arrives as TORN."""
        memory, request = source.pool.ranks[read.pair.producer_rank], read.request
        assert request is not None
        if wanted == request.wanted:
            pairs = zip(wanted, read.before, strict=True)
            return tuple([TORN if read.is_torn or memory[c] != before else memory[c] for c, before in pairs])
        return tuple([memory[cell] for cell in wanted])  # Not what the reader asked for.

    def _cells(self, read: Read) -> list[tuple[int, int]]:
        """(cell of P, cell of D) of each copied cell, by the real plan's spans."""
        consumer, producer = read.consumer, read.source
        num_blocks = consumer.pool.num_blocks
        spans = toy_spans(
            read.pair,
            producer.num_ranks,
            consumer.num_ranks,
            num_blocks,
            consumer.pool.groups,
            read.layers,
            read.group,
        )
        return [
            (
                span.remote_offset + remote * span.remote_stride + byte,
                span.local_offset + local * span.local_stride + byte,
            )
            for span in spans
            for remote, local in zip(read.origins, read.targets, strict=True)
            for byte in range(span.nbytes)
        ]
