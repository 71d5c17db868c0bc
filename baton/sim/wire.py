"""The two ways between engines: frames through a bad network, and one-sided reads.

Frames are the real bytes; what arrives has been through `encode_envelope` and `decode_envelope`. A read
lives from its post until nothing can move any more, which may be long after its poster has died, or the
owner of its source has been replaced by an incarnation of the same name.
"""

from typing import TYPE_CHECKING

from baton.core.ids import Address, EngineId, Epoch
from baton.protocol.messages import (
    WIRE_VERSION,
    Envelope,
    Finished,
    Released,
    Renew,
    Want,
    encode_envelope,
)
from baton.sim.checkers import contained, fenced
from baton.sim.facts import Landing, Lent, Read
from baton.sim.memory import TORN, Content, toy_spans

if TYPE_CHECKING:
    from baton.sim.cluster import Cluster
    from baton.sim.engine import Engine

MEDDLER = Address(EngineId("D-meddler"), Epoch(13))
LAST_WORDS = (Renew, Released, Want, Finished)
SLOW_READ_S = 5.0
CANCEL_MAX_S = 2.0


class Wire:
    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._cut: set[tuple[EngineId, EngineId]] = set()
        self._dead_once: set[EngineId] = set()
        self.reads: list[Read] = []

    # --- Frames -----------------------------------------------------------------------------------

    def send(self, source: EngineId, envelope: Envelope) -> None:
        """To whoever answers at that name on arrival: a successor has the same host and port."""
        world, faults = self._world, self._world.faults
        target = envelope.target.engine_id
        if world.trace is not None:
            for message in envelope.messages:
                world.note(source, f"-> {target}.{envelope.target.epoch % 1000:03d} {message}")
        frame = encode_envelope(envelope)
        late_s = self._die_speaking(source, envelope)
        self._carry(source, target, frame, late_s)
        if world.chance(faults.meddle):
            # An engine of the cluster that says what others said: the channel vouches for its name only.
            false = Envelope(WIRE_VERSION, MEDDLER, envelope.target, envelope.messages)
            self._carry(MEDDLER.engine_id, target, encode_envelope(false))
        if world.chance(faults.malformed):
            self._carry(source, target, self._garbled(frame))

    def cut_off(self, one: EngineId, other: EngineId, for_s: float, *, both: bool) -> None:
        ways = {(one, other), (other, one)} if both else {(one, other)}
        self._cut |= ways
        self._world.note("net", f"cut off {sorted(ways)} for {for_s} s")
        self._world.after(for_s, lambda: self._cut.difference_update(ways))

    def _die_speaking(self, source: EngineId, envelope: Envelope) -> float:
        """How late these last words are, if they are: once in the life of a name."""
        faults, world = self._world.faults, self._world
        if not faults.last_words or source in self._dead_once:
            return 0.0
        if not any(isinstance(message, LAST_WORDS) for message in envelope.messages):
            return 0.0
        if not world.chance(faults.last_words):
            return 0.0
        self._dead_once.add(source)
        world.after(0.0, lambda: self._cluster.crash(source, down_s=0.01))
        return world.rng.choice([0.0, world.rng.uniform(0, 2)])

    def _carry(self, source: EngineId, target: EngineId, frame: bytes, late_s: float = 0.0) -> None:
        world, faults = self._world, self._world.faults
        if (source, target) in self._cut:
            return

        def arrive() -> None:
            engine = self._cluster.engines.get(target)
            if engine is not None and (source, target) not in self._cut:
                engine.when_awake(lambda: engine.receive(frame))

        if not world.chance(faults.loss):
            world.after(world.spread(faults.delay_mean_s) + late_s, arrive)
        if world.chance(faults.duplicate):
            copy_late_s = world.rng.random() * faults.late_copy_s
            world.after(world.spread(faults.delay_mean_s) + copy_late_s, arrive)

    def _garbled(self, frame: bytes) -> bytes:
        """Something that is no envelope. What happens to decode all the same is not sent: the channel is
        authenticated, so that a flipped bit costs the frame."""
        rng = self._world.rng
        match rng.randrange(4):
            case 0:
                garbled = frame[: rng.randrange(len(frame))]
            case 1:
                garbled = rng.randbytes(rng.randrange(40))
            case 2:
                garbled = b"\x94\x02" + frame[2:]  # Of another version.
            case _:
                at = rng.randrange(len(frame))
                garbled = frame[:at] + rng.randbytes(rng.randint(1, 9)) + frame[at + 1 :]
        return garbled if contained.decode_or_none(garbled) is None else b""

    # --- Reads ------------------------------------------------------------------------------------

    def post(self, read: Read) -> None:
        faults, world = self._world.faults, self._world
        self.reads.append(read)
        pool, transfer_id = read.landing.producer.pool, read.landing.transfer_id
        read.is_torn = not read.landing.producer.alive or not all(
            isinstance(owner, Lent) and owner.transfer_id == transfer_id
            for owner in (pool.owner[block] for block in read.sources)
        )
        read.generations = [pool.generation[block] for block in read.sources]
        read.before = self._contents(read, read.landing.producer)
        took_s = world.spread(SLOW_READ_S if world.chance(faults.read_slow) else faults.read_mean_s)
        if world.chance(faults.read_hang):
            took_s = world.rng.uniform(10, 60)
        ok = not world.chance(faults.read_error)
        world.after(took_s, lambda: self._ended(read, ok=ok))

    def cancel(self, consumer: "Engine", landing: Landing) -> None:
        for read in self.reads:
            if read.consumer is consumer and read.landing is landing:
                self._end_soon(read)

    def rank_died(self, engine: "Engine", rank: int) -> None:
        """Its reads fail, and so do the reads from its memory; nothing else stops."""
        for read in self.reads:
            is_reader = read.consumer is engine and read.pair.consumer_rank == rank
            is_source = read.landing.producer is engine and read.pair.producer_rank == rank
            if is_reader or is_source:
                self._end_soon(read)

    def _end_soon(self, read: Read) -> None:
        delay_s = min(self._world.spread(self._world.faults.cancel_mean_s), CANCEL_MAX_S)
        self._world.after(delay_s, lambda: self._ended(read, ok=False))

    def _ended(self, read: Read, *, ok: bool) -> None:
        if not read.is_live:
            return
        read.is_live = False
        self.reads.remove(read)
        consumer, source = read.consumer, read.landing.producer
        if not consumer.alive:
            return
        if not source.alive:
            successor = self._cluster.engines[source.address.engine_id]
            if self._cluster.parts.bound_reads or not successor.alive:
                ok = False
            source, read.is_torn = successor, True
        if read.generations != [source.pool.generation[block] for block in read.sources]:
            read.is_torn = True
        if ok or self._world.chance(0.5):
            fenced.check_landing(read)
            self._copy(read, source if ok else None)
        consumer.when_awake(lambda: read.on_end(ok))

    def _copy(self, read: Read, source: "Engine | None") -> None:
        """Without a source: what a failed read leaves behind."""
        memory = read.consumer.pool.ranks[read.pair.consumer_rank]
        now: list[Content] = [None] * len(read.before)
        if source is not None:
            found = self._contents(read, source)
            # What changed under the read has arrived as neither the one nor the other.
            now = [
                TORN if read.is_torn or cell != before else cell
                for cell, before in zip(found, read.before, strict=True)
            ]
        for cell, (_, local) in zip(now, self._cells(read), strict=True):
            memory[local] = cell

    def _contents(self, read: Read, source: "Engine") -> list[Content]:
        memory = source.pool.ranks[read.pair.producer_rank]
        return [memory[remote] for remote, _ in self._cells(read)]

    def _cells(self, read: Read) -> list[tuple[int, int]]:
        """By the real plan's spans: from which of P's cells into which of D's."""
        consumer, producer = read.consumer, read.landing.producer
        num_blocks = consumer.pool.num_blocks
        spans = toy_spans(
            read.pair,
            producer.num_ranks,
            consumer.num_ranks,
            num_blocks,
            consumer.pool.groups,
            read.part.layers,
            read.part.groups.local if read.part.groups is not None else 0,
        )
        return [
            (
                span.remote_offset + remote * span.remote_stride + byte,
                span.local_offset + local * span.local_stride + byte,
            )
            for span in spans
            for remote, local in zip(read.sources, read.targets, strict=True)
            for byte in range(span.nbytes)
        ]
