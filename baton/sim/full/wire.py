"""The control network, as unkind as networks are, and each engine's door to it.

Frames cross it encoded, as in production. A way that was learnt from a ticket is a url: whoever listens there
now is reached. A way that was learnt from a connection that came in dies with its peer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from baton.connectors.pull.agent import PullAgent
from baton.core.errors import PeerError
from baton.core.ids import Address
from baton.protocol.messages import Envelope, Hello, Message, Welcome, decode_envelope, encode_envelope
from baton.sim.full.clockwork import Clockwork
from baton.sim.model import PUBLIC_KEY

if TYPE_CHECKING:
    from baton.sim.full.engine import Engine

NEVER = float("inf")
SOON_S = 1e-5


@dataclass
class Wire:
    clockwork: Clockwork
    stations: dict[str, Station] = field(default_factory=dict)  # By url: who listens there now.
    cut: dict[tuple[str, str], float] = field(default_factory=dict)  # From url to url: lost until then.
    clogged: dict[tuple[str, str], float] = field(default_factory=dict)  # Held up until then.

    def send(self, sender: Station, route: Route, frame: bytes, what: Envelope) -> None:
        clockwork, faults = self.clockwork, self.clockwork.faults
        url = route if isinstance(route, str) else route.url
        way = (sender.url, url)
        if clockwork.trace is not None:
            names = ", ".join(_told(message) for message in what.messages)
            clockwork.note(sender.engine.name, f"-> {what.target.engine_id}: {names}"[:220])
        copies = 2 if clockwork.chance(faults.duplicate) else 1
        for copy in range(copies):
            if clockwork.now < self.cut.get(way, -NEVER) or clockwork.chance(faults.loss):
                clockwork.count("frames lost")
                continue
            delay_s = clockwork.spread(faults.delay_mean_s)
            if copy:
                delay_s += clockwork.rng.uniform(0, faults.late_copy_s)
            free_at = self.clogged.get(way, -NEVER)
            if free_at > clockwork.now:
                delay_s = free_at - clockwork.now
            clockwork.after(delay_s, lambda: self._arrive(sender, route, frame))
        if clockwork.chance(faults.malformed):
            garbage = bytes(clockwork.rng.randrange(256) for _ in range(clockwork.rng.choice([0, 3, 40])))
            # 0xC1 begins nothing in msgpack: what is sealed on the way can be lost, not forged.
            broken = frame[: clockwork.rng.randrange(3)] + b"\xc1" + garbage
            clockwork.after(
                clockwork.spread(faults.delay_mean_s), lambda: self._arrive(sender, route, broken)
            )

    def _arrive(self, sender: Station, route: Route, frame: bytes) -> None:
        station = self.stations.get(route) if isinstance(route, str) else route
        if station is not None:
            station.engine.when_awake(lambda: station.receive(sender, frame))


class Station:
    """An engine's ControlPort: what ControlThread is in production, without the thread."""

    def __init__(self, engine: Engine, url: str, agent: PullAgent) -> None:
        self.engine = engine
        self.url = url
        self.num_bad_frames = 0
        self.public_key = PUBLIC_KEY
        self._agent = agent
        self._routes: dict[Address, Route] = {}
        self._armed_for = NEVER  # Our clock.
        self._is_flushing = False

    # --- ControlPort ------------------------------------------------------------------------------

    def start(self) -> None:
        self.engine.wire.stations[self.url] = self

    def route(self, peer: Address, url: str, public_key: bytes | None) -> None:
        self._routes[peer] = url

    def flush(self) -> None:
        if not self._agent.has_envelopes:
            self._arm()
        elif not self._is_flushing:
            self._is_flushing = True
            self._clockwork.after(SOON_S, lambda: self.engine.when_awake(self._flush))

    def raise_if_dead(self) -> None:
        return

    def close(self, timeout_s: float) -> None:
        self._pump()  # The last words.

    # --- What comes and what is due ---------------------------------------------------------------

    def receive(self, sender: Station, frame: bytes) -> None:
        try:
            envelope = decode_envelope(frame)
        except PeerError:
            self.num_bad_frames += 1
            self._clockwork.count("bad frames")
            return
        if not isinstance(self._routes.get(envelope.sender), str):
            self._routes[envelope.sender] = sender
        self._agent.receive(envelope, self.engine.clock())
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
        for envelope in agent.take_envelopes():
            route = self._routes.get(envelope.target)
            if route is not None:
                self.engine.wire.send(self, route, encode_envelope(envelope), envelope)
        self._arm()

    def _arm(self) -> None:
        deadline = self._agent.next_deadline
        if deadline >= self._armed_for:
            return
        self._armed_for = deadline
        clockwork = self._clockwork
        wait_s = max(0.0, (deadline - self.engine.clock()) / self.engine.rate) + SOON_S
        if clockwork.faults.timer_late_s:
            wait_s += clockwork.rng.uniform(0, clockwork.faults.timer_late_s)
        clockwork.after(wait_s, lambda: self.engine.when_awake(lambda: self._ring(deadline)))

    @property
    def _clockwork(self) -> Clockwork:
        return self.engine.clockwork


def _told(message: Message) -> str:
    """Without what is long, or differs from run to run: addresses of memory."""
    return type(message).__name__ if isinstance(message, Hello | Welcome) else str(message)


Route: TypeAlias = str | Station
