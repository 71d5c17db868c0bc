"""One-sided reads and the links that carry them: slow, hung, torn, failing, and altered by the wire.

A read lives from its post until nothing can move any more. Its poster may have died long before, and another
incarnation of the same name may have replaced the owner of its source. Each pair of ranks has a link: a
connection (baton.sim.kernel.connection) that is dialled for the first read, and again after it was lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core.ids import Address, EngineId, Pair
from baton.sim.checkers import fenced
from baton.sim.checkers.fresh import TORN
from baton.sim.hosts.fast.facts import Landing, Lent, Read
from baton.sim.hosts.fast.memory import Content, toy_spans
from baton.sim.kernel.connection import Connection, flip_one
from baton.sim.kernel.lies import flip

if TYPE_CHECKING:
    from baton.sim.hosts.fast.cluster import Cluster
    from baton.sim.hosts.fast.host import Host

SLOW_READ_S = 5.0
CANCEL_MAX_S = 2.0
TRIES = 2  # If an answer does not verify, the reader asks once more.
STALL_S = 4.0  # After this silence of the owner the connection is lost.


class ReadNetwork:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self.live: list[Read] = []
        self.num_posted = 0
        self.lost_ways: dict[tuple[EngineId, EngineId], None] = {}  # (P, D) that lost a link, in order.
        self._links: dict[tuple[Address, Address, Pair], Connection] = {}
        self._all_links: list[Connection] = []

    def post(self, read: Read) -> None:
        faults, world = self._world.faults, self._world
        self.live.append(read)
        pool, transfer_id = read.source.pool, read.landing.transfer_id
        generation = read.consumer.pool.generation
        read.target_generations = [generation[block] for block in read.targets]
        if not all(0 <= block < pool.num_blocks for block in read.origins):
            return self._end_soon(read)  # The producer lies. The transport refuses the post.
        read.is_torn = not read.source.alive or not all(
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
            self._break_link(link, took_s)

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
        link = self._links.get(key)
        if link is None or (link.is_lost and self._cluster.parts.replaces_links):
            link = self._links[key] = Connection(self._cluster.parts.checks)
            self._all_links.append(link)
        return link

    def _break_link(self, link: Connection, took_s: float) -> None:
        """Reset it during this read or after it, or stall it until a timeout."""
        world, rng = self._world, self._world.rng_of_lies
        if rng.random() < 0.5:
            link.is_stalled = True
            world.count("links stalled")
            world.after(STALL_S, lambda: self._lose(link))
        else:
            world.count("links reset")
            world.after(rng.uniform(0, 2 * took_s), lambda: self._lose(link))

    def _lose(self, link: Connection) -> None:
        """Fail every read on it. The next read of the pair dials again."""
        if link.is_lost:
            return
        link.is_lost, link.is_stalled = True, False
        for (consumer, producer, _), other in self._links.items():
            if other is link and producer.engine_id != consumer.engine_id:
                self.lost_ways[producer.engine_id, consumer.engine_id] = None
        for read in self.live:
            if read.link is link:
                self._end_soon(read)

    @property
    def num_false_serves(self) -> int:
        return sum(link.num_false_serves for link in self._all_links)

    # --- Ends -------------------------------------------------------------------------------------

    def _end_soon(self, read: Read) -> None:
        delay_s = min(self._world.spread(self._world.faults.cancel_mean_s), CANCEL_MAX_S)
        self._world.after(delay_s, lambda: self._ended(read, ok=False))

    def _ended(self, read: Read, *, ok: bool) -> None:
        if not read.is_live or (ok and read.link is not None and read.link.is_stalled):
            return
        read.is_live = False
        self.live.remove(read)
        consumer, source = read.consumer, read.source
        if not consumer.alive:
            return
        if read.link is None:  # Refused when it was posted.
            return consumer.when_awake(lambda: read.on_end(False))
        if not source.alive:
            successor = self._cluster.hosts[source.address.engine_id]
            if self._cluster.parts.bound_reads or not successor.alive:
                ok = False
            source, read.is_torn = successor, True
        if read.origin_generations != [source.pool.generation[block] for block in read.origins]:
            read.is_torn = True
        payload = self._exchange(read, source) if ok else None
        ok = payload is not None
        if ok or self._world.chance(0.5):
            fenced.check_landing(read)
            memory = read.consumer.pool.ranks[read.pair.consumer_rank]
            # Without a payload: what a failed read leaves behind.
            for cell, (_, local) in zip(payload or [None] * len(read.cells), read.cells, strict=True):
                memory[local] = cell
        consumer.when_awake(lambda: read.on_end(ok))

    def _exchange(self, read: Read, source: Host) -> tuple[Content, ...] | None:
        """Returns the payload, or None if a request or an answer did not verify and the link is lost."""
        world, link, request = self._world, read.link, read.request
        assert link is not None
        assert request is not None
        if not world.faults.read_lies:
            return self._payload(read, source, request.wanted)
        rng = world.rng_of_lies
        num_cells = len(source.pool.ranks[read.pair.producer_rank])
        for _ in range(TRIES):
            bent = request
            if request.wanted and world.lies(world.faults.read_lies):
                what, bent = link.bend_request(rng, request, lambda cell: flip(rng, cell, 4))
                world.count(what)
            if not link.serves(bent) or not all(0 <= cell < num_cells for cell in bent.wanted):
                break  # The owner ends the connection.
            answer = link.answer(bent, self._payload(read, source, bent.wanted))
            has_chance = link.can_replay(request, answer)
            if answer.payload and world.lies(0.5 if has_chance else world.faults.read_lies):
                what, answer = link.bend_answer(
                    rng, request, answer, lambda cells: flip_one(rng, cells, None)
                )
                world.count(what)
            if link.accepts(request, answer) and len(answer.payload) == len(request.wanted):
                payload: tuple[Content, ...] = answer.payload
                return payload
            request = link.ask(request.wanted)
        self._lose(link)
        return None

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
