"""The control network with its faults, and the control port of each engine.

Ways between engines lose, repeat, delay, alter and hold up frames. A faulty member sends false ones.

Frames cross it signed and encoded, as in production. A way that was learnt from a ticket is a url and reaches
the process that listens there now. A way that was learnt from a connection that came in dies with its peer.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, cast

import msgspec

from baton.connectors.pull.control.agent import PullAgent
from baton.connectors.pull.control.thread import ControlThread, _Way
from baton.connectors.pull.identity import TICKET_KEY_PURPOSE
from baton.core.ids import Address, EngineId
from baton.protocol.messages import (
    Announced,
    Envelope,
    Finished,
    Hello,
    Message,
    Released,
    Renew,
    Renewed,
    Want,
    Welcome,
)
from baton.protocol.signed_frame import ProcessKey
from baton.transport.control.channel import ControlChannel
from lab.sim.host.host_spec import SECRET
from lab.sim.kernel import lies
from lab.sim.kernel.process import NEVER, SOON_S
from lab.sim.kernel.world import World

if TYPE_CHECKING:
    from lab.sim.host.cluster import Cluster
    from lab.sim.host.engine import Engine

AMBUSH_S = 8.0
LAST_WORDS = {Renew, Renewed, Released, Want, Finished}
MEDDLER_URL = "tcp://10.0.9.9:14600"
TICKET_KEY = SECRET.derive(TICKET_KEY_PURPOSE)
ABOUT_CONTENTS = (Announced, Finished, Renewed, Welcome)
Way: TypeAlias = tuple[str, str]


class Wire:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._world = cluster, cluster.world
        self._cut: dict[Way, float] = {}  # Lost until then.
        self._clogged: dict[Way, float] = {}  # Held up until then.
        self.stations: dict[str, Station] = {}  # Listeners by url.
        self.meddler = ProcessKey(b"a member of the cluster, faulty!")
        self.late_s = 0.0  # How much later the frame that is being sent arrives.
        self._dead_once: set[str] = set()
        self._claimed: set[tuple[Address, int]] = set()

    def cut_off(self, way: Way, for_s: float, *, both: bool) -> None:
        self._world.note("net", f"{way} is cut{' both ways' if both else ''} for {for_s} s")
        for one in (way, way[::-1]) if both else (way,):
            self._cut[one] = self._world.now + for_s

    def clog(self, way: Way, for_s: float) -> None:
        self._world.count("clog")
        self._world.note("net", f"{way} is clogged for {for_s} s")
        self._clogged[way] = self._world.now + for_s

    def is_cut(self, way: Way) -> bool:
        return bool(self._cut) and self._cut.get(way, 0.0) > self._world.now

    def carry(
        self,
        way: Way,
        frame: bytes,
        arrive: Callable[[bytes], None],
        late_s: float = 0.0,
        *,
        alter: Callable[[random.Random, bytes], bytes] | None = lies.altered,
    ) -> None:
        world, faults = self._world, self._world.faults
        if self.is_cut(way):
            return
        if alter is not None and world.lies(faults.frame_lies):
            frame = alter(world.rng_of_lies, frame)
            world.count("frames altered by the wire")

        def arrives() -> None:
            if not self.is_cut(way):
                arrive(frame)

        free_in_s = max(0.0, self._clogged.get(way, 0.0) - world.now) if self._clogged else 0.0
        if not world.chance(faults.loss):
            world.after(free_in_s or world.spread(faults.delay_mean_s) + late_s, arrives)
        if world.chance(faults.duplicate):
            copy_late_s = world.rng.random() * faults.late_copy_s
            world.after(free_in_s or world.spread(faults.delay_mean_s) + copy_late_s, arrives)

    def as_sent(self, sender: str, envelope: Envelope) -> Envelope:
        """A faulty member sends other values than its machines gave it."""
        world, cluster = self._world, self._cluster
        if sender != cluster.liar or not world.lies(world.faults.member_lies):
            return envelope
        # A prefix cache would spread a lie about contents of blocks to requests that the liar has no part in.
        if any(isinstance(message, ABOUT_CONTENTS) for message in envelope.messages):
            return envelope
        others = [host.address for host in cluster.hosts.values() if host.address != envelope.sender]
        sent = lies.untrue(world.rng_of_lies, envelope, TICKET_KEY, others)
        world.count("lies of a member")
        cluster.lied_at = world.now
        if sent is None:
            return envelope
        cluster.has_false_ranks |= any(isinstance(message, Welcome) for message in sent.messages)
        if world.trace is not None:
            world.note(sender, f"lies: {sent.messages}"[:160])
        return sent

    def draw_late_s(self, envelope: Envelope) -> float:
        """How late it arrives: a leg that comes again may overtake `Released`."""
        world, is_last = self._world, Released in map(type, envelope.messages)
        return world.rng.uniform(0, 3) if is_last and world.chance(world.faults.again) else 0.0

    def meddle(self, engine: Engine, envelope: Envelope) -> None:
        """Break something at the moment when a process has sent these messages.

        An ambush: the consumer believes a lease, and cannot renew it. Last words: a successor of the sender
        is there before they arrive.
        """
        world, faults, source = self._world, self._world.faults, engine.name
        sent = set(map(type, envelope.messages))
        for claim, fetch in engine.half._fetches._claims.items() if faults.again else ():
            if (engine.address, claim) not in self._claimed:
                self._claimed.add((engine.address, claim))
                self._cluster.on_claim(engine, fetch.request_id)
        if Renewed in sent and world.chance(faults.ambush):
            world.count("ambush")
            self.cut_off((_name_of(envelope.target), source), AMBUSH_S, both=False)
        if sent & LAST_WORDS and source not in self._dead_once and world.chance(faults.last_words):
            world.count("last words")
            self._dead_once.add(source)
            world.after(0.0, lambda: self._cluster.crash(source, down_s=0.01))

    def send(self, sender: Station, route: Route, frame: bytes) -> None:
        """Send over a connection that the sender has dialled, or over one that the receiver has."""
        world = self._world
        url = route if isinstance(route, str) else route.url
        way = (sender.engine.name, url.removeprefix("tcp://").partition(":")[0])

        def arrive(frame: bytes) -> None:
            station = self.stations.get(route) if isinstance(route, str) else route
            seen_as = sender if isinstance(route, str) else sender.url
            if station is not None:
                station.engine.when_awake(lambda: station.receive(seen_as, frame))

        self.carry(way, frame, arrive, self.late_s, alter=_altered)
        if world.chance(world.faults.malformed):
            self.carry(way, garbled(world.rng, frame), arrive, alter=None)


def garbled(rng: random.Random, frame: bytes) -> bytes:
    """Bytes that are most likely no envelope."""
    match rng.randrange(4):
        case 0:
            return frame[: rng.randrange(len(frame))]
        case 1:
            return rng.randbytes(rng.randrange(40))
        case 2:
            return b"\x94\x02" + frame[2:]  # An envelope of another version.
        case _:
            at = rng.randrange(len(frame))
            return frame[:at] + rng.randbytes(rng.randint(1, 9)) + frame[at + 1 :]


def _altered(rng: random.Random, frame: bytes) -> bytes:
    """What is signed is altered, or the frame as a whole."""
    version, public_key, mac, body = msgspec.msgpack.decode(frame)
    if rng.random() < 0.2:
        at = rng.randrange(len(frame))
        return frame[:at] + bytes([lies.flip(rng, frame[at], 8)]) + frame[at + 1 :]
    return msgspec.msgpack.encode([version, public_key, mac, lies.altered(rng, body)])


class _Door:
    """What a station has of a ControlChannel."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.station: Station

    def send(self, to: Route, frame: bytes) -> None:
        self.station.engine.cluster.wire.send(self.station, to, frame)


class Station(ControlThread):
    """An engine's ControlPort: the code of the control thread, called by events instead of a thread."""

    def __init__(
        self, engine: Engine, url: str, agent: PullAgent, lock: threading.Lock, key: ProcessKey
    ) -> None:
        door = _Door(url)
        super().__init__(agent, lock, cast(ControlChannel, door), key, engine.clock)
        door.station = self
        self.engine = engine
        self._armed_for = NEVER  # Our clock.
        self._is_flushing = False

    # --- ControlPort ------------------------------------------------------------------------------

    def start(self) -> None:
        self.engine.cluster.wire.stations[self.url] = self

    def flush(self) -> None:
        if not self._agent.has_envelopes:
            self._arm()
        elif not self._is_flushing:
            self._is_flushing = True
            self._world.after(SOON_S, lambda: self.engine.when_awake(self._flush))

    def close(self, timeout_s: float) -> None:
        self._pump()  # The last words.

    # --- What comes and what is due ---------------------------------------------------------------

    def receive(self, route: Route, frame: bytes) -> None:
        world, engine = self._world, self.engine
        if world.lies(world.faults.suspends):
            world.count("suspended as it hears something")
            engine.pause(world.rng_of_lies.choice([0.5, 3.0, 8.0]))
            if world.lies(0.5):
                # The process stops before it has read the frame, else right after.
                return engine.when_awake(lambda: self.receive(route, frame))
        num_bad, num_forged = self.num_bad_frames, self.num_forged_frames
        self._receive(route, frame)  # type: ignore[arg-type]  # Stations are what routes are here.
        self._world.count("bad frames", self.num_bad_frames - num_bad)
        self._world.count("forged frames", self.num_forged_frames - num_forged)
        self._pump()
        self.engine.poke()

    def _flush(self) -> None:
        self._is_flushing = False
        self._pump()

    def _ring(self, deadline: float) -> None:
        if deadline != self._armed_for:
            return  # Overtaken by an earlier one.
        self._armed_for = NEVER
        self._pump()
        self.engine.poke()

    def _pump(self) -> None:
        agent = self._agent
        agent.wake(self.engine.clock())
        for envelope, way in self._take_outgoing():
            self._send(envelope, way)
        self._arm()

    def _send(self, envelope: Envelope, way: _Way | None) -> None:
        world = self._world
        if way is None:
            return
        if world.trace is not None:
            names = ", ".join(_told(message) for message in envelope.messages)
            world.note(self.engine.name, f"-> {envelope.target.engine_id}: {names}"[:220])
        wire = self.engine.cluster.wire
        wire.late_s = wire.draw_late_s(envelope)
        super()._send(wire.as_sent(self.engine.name, envelope), way)
        wire.late_s = 0.0
        wire.meddle(self.engine, envelope)
        # Another member has seen the frame. It speaks in the name of one of both, or repeats it in its own.
        if world.lies(world.faults.false_names):
            self._send_as_meddler(lies.false_names(world.rng_of_lies, envelope), "frames in another's name")
        if world.chance(world.faults.meddle):
            own_name = Address(EngineId("meddler"), wire.meddler.epoch)
            self._send_as_meddler(msgspec.structs.replace(envelope, sender=own_name), "frames repeated")

    def _send_as_meddler(self, envelope: Envelope, what: str) -> None:
        world, wire = self._world, self.engine.cluster.wire
        station = wire.stations.get(self.engine.cluster.url_of(envelope.target))
        if station is not None:
            world.count(what)
            frame = wire.meddler.sign(envelope, station.public_key)
            world.after(0.0, lambda: station.engine.when_awake(lambda: station.receive(MEDDLER_URL, frame)))

    def _arm(self) -> None:
        deadline = self._agent.next_deadline
        if deadline >= self._armed_for:
            return
        self._armed_for = deadline
        world = self._world
        wait_s = max(0.0, (deadline - self.engine.clock()) / self.engine.rate) + SOON_S
        if world.faults.timer_late_s:
            wait_s += world.rng.uniform(0, world.faults.timer_late_s)
        world.after(wait_s, lambda: self.engine.when_awake(lambda: self._ring(deadline)))

    @property
    def _world(self) -> World:
        return self.engine.world


def _name_of(address: Address) -> str:
    return address.engine_id.rstrip("'")


def _told(message: Message) -> str:
    """A message for the trace, without what is long or differs from run to run: addresses of memory."""
    return type(message).__name__ if isinstance(message, Hello | Welcome) else str(message)


Route: TypeAlias = str | Station
