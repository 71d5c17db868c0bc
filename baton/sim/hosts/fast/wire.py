"""Control frames between engines, through a bad network and an authenticated channel.

Frames are the real bytes of `encode_envelope`. The channel is a model of CURVE: a seal covers the frame and
the process that sent it. The channel drops a frame that was altered on the way, and a frame whose `sender` is
another process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from baton.core.ids import Address, EngineId, Epoch
from baton.protocol.messages import (
    WIRE_VERSION,
    Envelope,
    Finished,
    Released,
    Renew,
    Want,
    Welcome,
    encode_envelope,
)
from baton.sim.checkers import contained
from baton.sim.hosts.fast.model import KEY
from baton.sim.kernel import lies

if TYPE_CHECKING:
    from baton.sim.hosts.fast.cluster import Cluster

MEDDLER = Address(EngineId("D-meddler"), Epoch(13))
LAST_WORDS = (Renew, Released, Want, Finished)


class Sealed(NamedTuple):
    """A frame on the wire."""

    source: Address  # The process at the other end of the connection.
    frame: bytes
    seal: tuple[Address, bytes]  # What the channel's MAC covers. The wire cannot make one.

    @property
    def is_whole(self) -> bool:
        return self.seal == (self.source, self.frame)


class Wire:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._cut: set[tuple[EngineId, EngineId]] = set()
        self._dead_once: set[EngineId] = set()

    # --- Frames -----------------------------------------------------------------------------------

    def send(self, source: EngineId, envelope: Envelope) -> None:
        """To the engine that has that name on arrival: a successor has the same host and port."""
        world, faults = self._world, self._world.faults
        target = envelope.target.engine_id
        if world.trace is not None:
            for message in envelope.messages:
                world.note(source, f"-> {target}.{envelope.target.epoch % 1000:03d} {message}")
        true, envelope = envelope, self._as_sent(envelope)
        frame = encode_envelope(envelope)
        late_s = self._die_speaking(source, true)
        self._carry(envelope.sender, target, frame, late_s)
        if world.chance(faults.meddle):
            # A member repeats the messages of another. The channel proves its own name only.
            false = Envelope(WIRE_VERSION, MEDDLER, envelope.target, envelope.messages)
            self._carry(MEDDLER, target, encode_envelope(false))
        if world.chance(faults.malformed):
            self._carry(envelope.sender, target, self._garbled(frame), is_garbage=True)
        if world.lies(faults.false_names):
            false = lies.false_names(world.rng_of_lies, true)
            self._carry(MEDDLER, false.target.engine_id, encode_envelope(false))
            world.count("frames in another's name")

    def cut_off(self, one: EngineId, other: EngineId, for_s: float, *, both: bool) -> None:
        ways = {(one, other), (other, one)} if both else {(one, other)}
        self._cut |= ways
        self._world.note("net", f"cut off {sorted(ways)} for {for_s} s")
        self._world.after(for_s, lambda: self._cut.difference_update(ways))

    def _die_speaking(self, source: EngineId, envelope: Envelope) -> float:
        """Crash after these last words, once in the life of a name. Returns how late they arrive."""
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

    def _as_sent(self, envelope: Envelope) -> Envelope:
        """A faulty member sends other values than its machines gave it."""
        world, cluster = self._world, self._cluster
        if envelope.sender.engine_id != cluster.liar or not world.lies(world.faults.member_lies):
            return envelope
        others = [e.address for e in cluster.hosts.values() if e.address != envelope.sender]
        sent = lies.untrue(world.rng_of_lies, envelope, KEY, others)
        world.count("lies of a member")
        cluster.lied_at = world.now
        if sent is not None and any(isinstance(message, Welcome) for message in sent.messages):
            cluster.has_false_ranks = True
        if world.trace is not None and sent is not None:
            world.note(envelope.sender.engine_id, f"lies: {sent.messages}"[:160])
        return sent or envelope

    def _carry(
        self,
        source: Address,
        target: EngineId,
        frame: bytes,
        late_s: float = 0.0,
        *,
        is_garbage: bool = False,
    ) -> None:
        world, faults, way = self._world, self._world.faults, (source.engine_id, target)
        if way in self._cut:
            return
        sealed = Sealed(source, frame, (source, frame))
        if not is_garbage and world.lies(faults.frame_lies):
            sealed = Sealed(source, lies.altered(world.rng_of_lies, frame), sealed.seal)
            world.count("frames altered by the wire")

        def arrive() -> None:
            host = self._cluster.hosts.get(target)
            if host is not None and way not in self._cut:
                host.when_awake(lambda: host.port.receive(sealed))

        if not world.chance(faults.loss):
            world.after(world.spread(faults.delay_mean_s) + late_s, arrive)
        if world.chance(faults.duplicate):
            copy_late_s = world.rng.random() * faults.late_copy_s
            world.after(world.spread(faults.delay_mean_s) + copy_late_s, arrive)

    def _garbled(self, frame: bytes) -> bytes:
        """Bytes that are no envelope. Bytes that happen to decode are not sent, because the channel drops
        altered frames."""
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
