"""One incarnation of an engine: its pool, its process, and the driver of its machines.

The driver is as thin as the one in production: messages and time in, effects out. Every engine can lend and
fetch.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, assert_never

import msgspec

from baton.core.ids import Address, EngineId, Epoch
from baton.core.timers import Timers
from baton.protocol.effects import (
    CancelReads,
    Deliver,
    Effect,
    Fail,
    Found,
    FreeLoan,
    FreeTarget,
    Lent,
    OpenTicket,
    PeerLost,
    PeerReady,
    ReadEarly,
    Send,
    StartReads,
    StreamEffect,
    pack_sends,
)
from baton.protocol.introduction import Introduction, sign_introduction
from baton.protocol.messages import (
    Announced,
    Envelope,
    Failed,
    Finished,
    Message,
    Renewed,
    Stranger,
    Working,
)
from baton.protocol.peers import PeerTable
from baton.sim.checkers import bounded, contained, whole
from baton.sim.fetcher import Fetcher
from baton.sim.lender import Lender
from baton.sim.memory import NUM_LAYERS, Pool
from baton.sim.model import FINGERPRINT, KEY, PUBLIC_KEY, rank_cards
from baton.sim.wire import Sealed

if TYPE_CHECKING:
    from baton.sim.cluster import Cluster

SOON_S = 1e-6
AMBUSH_S = 8.0
NEVER = float("inf")


class Engine:
    def __init__(
        self,
        cluster: "Cluster",
        engine_id: EngineId,
        num_ranks: int,
        rate: float,
        skew_s: float,
        timers: Timers,
    ) -> None:
        self.cluster, self.world = cluster, cluster.world
        self.address = Address(engine_id, Epoch(self.world.rng.getrandbits(64)))
        self.num_ranks, self.rate, self.skew_s, self.timers = num_ranks, rate, skew_s, timers
        self.pool = Pool(cluster.num_blocks, num_ranks, cluster.groups)
        self.alive = True
        self.exits_at = NEVER  # Once it drains.
        self.producer = cluster.parts.producer(self.address.epoch, timers)
        self.consumer = cluster.parts.consumer(timers)
        self.prefills = cluster.parts.push_producer(timers)
        self.streams = cluster.parts.push_consumer(timers, self.consumer, NUM_LAYERS)
        self.peers = PeerTable(
            self.address, FINGERPRINT, timers, rank_cards(num_ranks, cluster.num_blocks, cluster.groups)
        )
        self._machines = (self.producer, self.consumer, self.prefills, self.streams, self.peers)
        self.lender, self.fetcher = Lender(self), Fetcher(self)
        self._paused_until = 0.0
        self._never_before = -NEVER  # Its clock has been here.
        self._armed_at = NEVER

    def clock(self) -> float:
        return max(self._never_before, self.world.now * self.rate + self.skew_s)

    # --- The process ------------------------------------------------------------------------------

    def when_awake(self, action: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self._paused_until > self.world.now:
            wait_s = self._paused_until - self.world.now + SOON_S
            self.world.after(wait_s, lambda: self.when_awake(action))
        else:
            action()

    def pause(self, for_s: float) -> None:
        self._paused_until = self.world.now + for_s

    def step_clock(self, by_s: float) -> None:
        """A negative step: it stands still for so long. A monotonic clock does not go back."""
        self._never_before = self.clock()
        self.skew_s += by_s
        self.world.note(self.address.engine_id, f"its clock steps by {by_s} s")
        self._armed_at = NEVER  # Timers are relative to the clock.
        self._arm()

    def drain(self, for_s: float) -> None:
        """No new loans and fetches; gone when nothing is left, or at the deadline."""
        if self.exits_at < NEVER:
            return
        self.exits_at = self.world.now + for_s
        self.producer.drain(self.clock() + for_s * self.rate)
        self.world.count("drain")
        self._arm()
        self.world.after(for_s, lambda: self.when_awake(self._exit))
        self._exit_if_empty()

    def _exit_if_empty(self) -> None:
        is_empty = not (self.producer.num_open or self.consumer.num_open or self.streams.num_open)
        if self.exits_at < NEVER and is_empty:
            self.world.after(0.0, lambda: self.when_awake(self._exit))

    def _exit(self) -> None:
        self.cluster.stop(self, down_s=0.5)

    # --- The driver -------------------------------------------------------------------------------

    def do(self, effects: Sequence[Effect | StreamEffect]) -> None:
        if effects:
            self._carry_out(effects)
        self._arm()
        if self.exits_at < NEVER:
            self._exit_if_empty()

    def _carry_out(self, effects: Sequence[Effect | StreamEffect]) -> None:
        todo: deque[Effect | StreamEffect] = deque(effects)
        sends: list[Send] = []
        name = self.address.engine_id
        while todo:
            effect = todo.popleft()
            if self.world.trace is not None and not isinstance(effect, Send):
                self.world.note(name, f"{effect}"[:160])
            match effect:
                case Send():
                    sends.append(effect)
                case Found(claim, producer):
                    todo.extend(self.fetcher.found(claim, producer))
                case ReadEarly():
                    self.fetcher.read_early(effect)
                case OpenTicket(claim, text):
                    todo.extend(self.fetcher.open_ticket(claim, text))
                case Lent(claim, ticket, unread):
                    todo.extend(self.fetcher.lent(claim, ticket, unread))
                case StartReads(claim, pairs):
                    self.fetcher.start_reads(claim, pairs)
                case CancelReads(claim):
                    self.fetcher.cancel_reads(claim)
                case Deliver(claim):
                    self.fetcher.delivered(claim)
                case Fail(claim, reason):
                    self.fetcher.failed(claim, reason)
                case FreeTarget(claim):
                    self.fetcher.free_target(claim)
                case FreeLoan(loan_id, expired):
                    self.lender.free_loan(loan_id, expired)
                case PeerReady(address):
                    todo.extend(self.fetcher.peer_ready(address))
                case PeerLost(address, reason):
                    for machine in (self.streams, self.consumer):
                        todo.extend(machine.peer_lost(address, reason, self.clock()))
                case _:
                    assert_never(effect)
        for envelope in pack_sends(self.address, sends):
            if len(envelope.messages) > 1:
                self.world.count("batched envelopes")
            self.cluster.wire.send(name, envelope)

    def hear(self, sealed: Sealed) -> None:
        """What the channel does with a frame before the driver sees it."""
        parts = self.cluster.parts
        if parts.seals_frames and not sealed.is_whole:
            return self.world.count("altered frames dropped")
        envelope = contained.decode_or_none(sealed.frame)
        if envelope is None:
            return self.world.count("malformed frames")
        if self.world.lies(self.world.faults.suspends):
            self.world.count("suspended as it hears something")
            self.cluster.pause(self.address.engine_id, self.world.rng_of_lies.choice([0.5, 3.0, 7.0]))
            if self.world.lies(0.5):
                return self.when_awake(lambda: self.hear(sealed))  # Before it has read it, else right after.
        if parts.binds_senders:
            if envelope.sender != sealed.source:
                return self.world.count("frames in another's name dropped")
            believed = tuple([m for m in envelope.messages if self._is_believed(m, sealed.source)])
            if len(believed) < len(envelope.messages):
                envelope = msgspec.structs.replace(envelope, messages=believed)
        self._receive(envelope)

    def _is_believed(self, message: Message, source: Address) -> bool:
        """Only what answers where an engine is reached knows that the engine is gone."""
        if not isinstance(message, Stranger):
            return True
        reached = self.cluster.engines.get(message.about.engine_id)
        return reached is not None and reached.address == source

    def _receive(self, envelope: Envelope) -> None:
        messages, answers = self.cluster.parts.admit(self.address, envelope)
        sender, now = envelope.sender, self.clock()
        effects: list[Effect | StreamEffect] = [*answers]
        for message in messages:
            self._hear(sender, message)
            if isinstance(message, Renewed) and self.world.chance(self.world.faults.ambush):
                self.cluster.wire.cut_off(self.address.engine_id, sender.engine_id, AMBUSH_S, both=False)
            effects += self.producer.receive(sender, message, now)
            effects += self.consumer.receive(sender, message, now)
            effects += self.prefills.receive(sender, message, now)
            effects += self.streams.receive(sender, message, now)
            effects += self.peers.receive(sender, message, now)
        self.do(effects)

    def _hear(self, sender: Address, message: Message) -> None:
        """A fact for the checkers: somebody who waits has heard of whom it waits for."""
        if isinstance(message, Working | Announced | Finished | Failed):
            landing = self.fetcher.landings.get(message.number)
            if landing is not None and landing.producer.address == sender:
                landing.heard_at = self.world.now

    def _arm(self) -> None:
        due = min([machine.next_deadline for machine in self._machines])
        if due == NEVER:
            return
        due_at = (due - self.skew_s) / self.rate
        if due_at < self._armed_at:
            self._armed_at = due_at
            late_s = self.world.rng.random() * self.world.faults.timer_late_s
            wait_s = max(0.0, due_at - self.world.now) + late_s + SOON_S
            self.world.after(wait_s, lambda: self.when_awake(lambda: self._wake(due_at)))

    def _wake(self, armed_at: float) -> None:
        if self._armed_at == armed_at:
            self._armed_at = NEVER
        now = self.clock()
        effects: list[Effect | StreamEffect] = []
        for machine in self._machines:
            effects += machine.wake(now)
        self.do(effects)

    def introduction(self) -> str:
        return sign_introduction(
            Introduction(
                address=self.address,
                control_url="sim://",
                public_key=PUBLIC_KEY,
                fingerprint=FINGERPRINT,
                tp_size=self.num_ranks,
                block_tokens=1,
            ),
            KEY,
        )

    def check_rest(self) -> None:
        bounded.check_rest(self)
        whole.check_rest(self)
