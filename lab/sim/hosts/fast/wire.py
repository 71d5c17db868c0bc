"""Control frames between engines, through a bad network and an authenticated channel.

Frames are the real bytes of `encode_envelope`. The channel is a model of CURVE: a seal covers the frame and
the process that sent it. The channel drops a frame that was altered on the way, and a frame whose `sender` is
another process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

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
from lab.sim.checkers import contained
from lab.sim.kernel import lies
from lab.sim.kernel.wire import Wire, garbled

if TYPE_CHECKING:
    from lab.sim.hosts.fast.cluster import Cluster

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


class FastWire(Wire):
    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._hosts = cluster.hosts
        self._dead_once: set[str] = set()

    def send(self, source: str, envelope: Envelope) -> None:
        """Send to the engine that has this name on arrival: a successor has the same host and port."""
        world, faults = self._world, self._world.faults
        target = envelope.target.engine_id
        if world.trace is not None:
            for message in envelope.messages:
                world.note(source, f"-> {target}.{envelope.target.epoch % 1000:03d} {message}")
        frame = encode_envelope(self.as_sent(source, envelope))
        late_s = self._die_speaking(source, envelope)
        self._seal(envelope.sender, target, frame, late_s)
        if world.chance(faults.meddle):
            # A member repeats the messages of another. The channel proves its own name only.
            false = Envelope(WIRE_VERSION, MEDDLER, envelope.target, envelope.messages)
            self._seal(MEDDLER, target, encode_envelope(false))
        if world.chance(faults.malformed):
            garbage = garbled(world.rng, frame)
            if contained.decode_or_none(garbage) is None:  # The channel drops what happens to decode.
                self.carry((source, target), garbage, self._deliverer(envelope.sender, target), alter=None)
        if world.lies(faults.false_names):
            false = lies.false_names(world.rng_of_lies, envelope)
            self._seal(MEDDLER, false.target.engine_id, encode_envelope(false))
            world.count("frames in another's name")

    def _seal(self, source: Address, target: str, frame: bytes, late_s: float = 0.0) -> None:
        deliver = self._deliverer(source, target, frame)
        self.carry((source.engine_id, target), frame, deliver, late_s)

    def _deliverer(
        self, source: Address, target: str, sealed: bytes | None = None
    ) -> Callable[[bytes], None]:
        """`sealed`: the frame that was sealed; None: whichever arrives."""

        def deliver(frame: bytes) -> None:
            host = self._hosts.get(target)
            if host is not None:
                seal = (source, frame if sealed is None else sealed)
                host.when_awake(lambda: host.port.receive(Sealed(source, frame, seal)))

        return deliver

    def _die_speaking(self, source: str, envelope: Envelope) -> float:
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
