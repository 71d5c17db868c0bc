"""The two ways between engines: frames through a bad network, and one-sided reads.

Frames are the real bytes; what arrives has been through `encode_envelope` and `decode_envelope`. A read
lives from its post until nothing can move any more, which may be long after its poster has died, or the
owner of its source has been replaced by an incarnation of the same name.
"""

from typing import TYPE_CHECKING

from baton.core.ids import Address, EngineId, Epoch
from baton.protocol.messages import WIRE_VERSION, Envelope, Released, Renew, encode_envelope
from baton.sim.checkers import contained, fenced
from baton.sim.facts import Landing, Read
from baton.sim.memory import toy_spans

if TYPE_CHECKING:
    from baton.sim.cluster import Cluster
    from baton.sim.engine import Engine

MEDDLER = Address(EngineId("D-meddler"), Epoch(13))
CANCEL_MEAN_S = 0.2
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
        if not any(isinstance(message, Renew | Released) for message in envelope.messages):
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
        took_s = (
            world.rng.uniform(10, 60) if world.chance(faults.read_hang) else world.spread(faults.read_mean_s)
        )
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
        delay_s = min(self._world.spread(CANCEL_MEAN_S), CANCEL_MAX_S)
        self._world.after(delay_s, lambda: self._ended(read, ok=False))

    def _ended(self, read: Read, *, ok: bool) -> None:
        if not read.is_live:
            return
        read.is_live = False
        self.reads.remove(read)
        consumer, landing = read.consumer, read.landing
        if not consumer.alive:
            return
        source = landing.producer
        if not source.alive:
            successor = self._cluster.engines[source.address.engine_id]
            if self._cluster.parts.bound_reads or not successor.alive:
                ok = False
            source, landing.is_torn = successor, True
        generations = [source.pool.generation[block] for block in landing.sources]
        if generations != read.generations:
            landing.is_torn = True
        if ok or self._world.chance(0.5):
            fenced.check_landing(read)
            self._copy(read, source if ok else None)
        consumer.when_awake(lambda: consumer.read_ended(read, ok))

    def _copy(self, read: Read, source: "Engine | None") -> None:
        """By the real plan's spans. Without a source: what a failed read leaves behind."""
        landing, consumer, pair = read.landing, read.consumer, read.pair
        num_blocks = consumer.pool.num_blocks
        target_memory = consumer.pool.ranks[pair.consumer_rank]
        spans = toy_spans(pair, landing.producer.num_ranks, consumer.num_ranks, num_blocks)
        for span in spans:
            for remote, local in zip(landing.sources, landing.targets, strict=True):
                start = span.local_offset + local * span.local_stride
                if source is None:
                    target_memory[start : start + span.nbytes] = [None] * span.nbytes
                    continue
                memory = source.pool.ranks[pair.producer_rank]
                origin = span.remote_offset + remote * span.remote_stride
                target_memory[start : start + span.nbytes] = memory[origin : origin + span.nbytes]
