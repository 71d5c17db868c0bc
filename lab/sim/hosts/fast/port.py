"""In-memory control port of one host: frames and time in, frames out, without a thread.

It also notes for the checkers what frames tell: the claim of each fetch, and when a waiting D last heard of
its producer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from baton.connectors.pull.control.agent import PullAgent
from baton.core.ids import Address
from baton.protocol.messages import (
    Announced,
    Envelope,
    Failed,
    Finished,
    Message,
    Renew,
    Renewed,
    Stranger,
    Want,
    Working,
)
from lab.sim.checkers import contained
from lab.sim.hosts.fast.model import CONTROL_URL, PUBLIC_KEY
from lab.sim.hosts.fast.wire import Sealed
from lab.sim.kernel.process import NEVER, SOON_S

if TYPE_CHECKING:
    from lab.sim.hosts.fast.host import Host

AMBUSH_S = 8.0
OF_STREAMS = (Working, Announced, Finished, Failed)  # What a producer answers.


class Port:
    """A `ControlPort`."""

    num_bad_frames = 0
    public_key = PUBLIC_KEY
    url = CONTROL_URL

    def __init__(self, host: Host, agent: PullAgent) -> None:
        self._host, self._agent, self._world = host, agent, host.world
        self._num_effects = 0
        self._armed_at = NEVER  # True time.
        self.is_stale = False  # The timer has to be looked at when the event ends.

    # --- ControlPort ------------------------------------------------------------------------------

    def start(self) -> None:
        return

    def route(self, peer: Address, url: str, public_key: bytes | None) -> None:
        return  # The wire finds engines by name.

    def raise_if_dead(self) -> None:
        return

    def close(self, timeout_s: float) -> None:
        return

    def flush(self) -> None:
        if self._agent.has_envelopes:
            for envelope in self._agent.take_envelopes():
                self._note_claims(envelope)
                self._world.count("batched envelopes", len(envelope.messages) > 1)
                self._host.cluster.wire.send(self._host.engine_id, envelope)
        self.is_stale = True

    def had_effects(self) -> bool:
        """Whether there were effects since the last call."""
        num_effects, self._num_effects = self._num_effects, self._agent.num_effects
        return self._num_effects > num_effects

    # --- Frames -----------------------------------------------------------------------------------

    def receive(self, sealed: Sealed) -> None:
        """What the channel does with a frame before the agent sees it."""
        host, world, parts = self._host, self._world, self._host.cluster.parts
        if parts.seals_frames and not sealed.is_whole:
            return world.count("altered frames dropped")
        envelope = contained.decode_or_none(sealed.frame)
        if envelope is None:
            return world.count("malformed frames")
        if world.lies(world.faults.suspends):
            world.count("suspended as it hears something")
            host.pause(world.rng_of_lies.choice([0.5, 3.0, 7.0]))
            if world.lies(0.5):
                return host.when_awake(lambda: self.receive(sealed))  # Paused before the read, else after.
        if parts.binds_senders:
            if envelope.sender != sealed.source:
                return world.count("frames in another's name dropped")
            if Stranger in map(type, envelope.messages):
                believed = [
                    message
                    for message in envelope.messages
                    if not isinstance(message, Stranger) or self._is_believed(message, sealed.source)
                ]
                envelope = msgspec.structs.replace(envelope, messages=tuple(believed))
        if envelope.target == host.address:
            for message in envelope.messages:
                self._note_heard(envelope.sender, message)
        self._agent.receive(envelope, host.clock())
        host.settle()
        self.flush()

    def _is_believed(self, message: Stranger, source: Address) -> bool:
        """Only the process that answers where an engine is reached knows that the engine is gone."""
        reached = self._host.cluster.hosts.get(message.about.engine_id)
        return reached is not None and reached.address == source

    def _note_heard(self, sender: Address, message: Message) -> None:
        host, world = self._host, self._world
        if isinstance(message, OF_STREAMS):
            landing = host.fetches.by_claim.get(message.number)
            if landing is None:
                return
            if landing.producer.address == sender:
                landing.heard_at = world.now
            if isinstance(message, Finished) and any(
                read.owner is landing and read.is_cancelled for read in host.cluster.reads.live
            ):
                world.count("lent to a stream whose void reads still run")
        elif isinstance(message, Renewed) and world.chance(world.faults.ambush):
            host.cluster.wire.cut_off((host.name, sender.engine_id), AMBUSH_S, both=False)

    def _note_claims(self, envelope: Envelope) -> None:
        fetches, producer = self._host.fetches, envelope.target
        for message in envelope.messages:
            match message:
                case Want(transfer_id, claim):
                    landing = fetches.of_claim(claim, lambda one: one.transfer_id == transfer_id)
                    if landing.is_named and not producer.is_named_only:
                        landing.is_named, landing.heard_at = False, self._world.now
                        landing.producer = self._host.cluster.incarnations[producer]
                        self._world.count("found by name")
                case Renew(loan_id, claim):
                    landing = fetches.of_claim(claim, lambda one: one.loan_id == loan_id)
                    landing.loan_id = loan_id

    # --- Time -------------------------------------------------------------------------------------

    def clock_stepped(self) -> None:
        """Timers are relative to the clock."""
        self._armed_at = NEVER
        self.arm()

    def arm(self) -> None:
        self.is_stale = False
        due = self._agent.next_deadline
        if due == NEVER:
            return
        host, world = self._host, self._world
        due_at = (due - host.skew_s) / host.rate
        if due_at < self._armed_at:
            self._armed_at = due_at
            late_s = world.rng.random() * world.faults.timer_late_s
            wait_s = max(0.0, due_at - world.now) + late_s + SOON_S
            world.after(wait_s, lambda: host.when_awake(lambda: self._ring(due_at)))

    def _ring(self, armed_at: float) -> None:
        if self._armed_at == armed_at:
            self._armed_at = NEVER
        self._agent.wake(self._host.clock())
        self._host.settle()
        self.flush()
