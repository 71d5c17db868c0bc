"""The protocol machines of one engine: routes envelopes and time to them, and their effects to owners.

    envelope, time --> machines --> Send: outbox        FreeLoan: Loans        other effects: Fetches
                          ^                                                         |
                          +------------- calls of Loans, Fetches, PrefillAnnouncer -+

`Loans`, `Fetches` and the announcer call their machines directly, and hand what these return to `carry_out`.
No lock, thread, socket or clock: the caller (control thread, scheduler half, test) provides them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from baton.core.identity import CurrentIdentity
from baton.core.ids import Address, Epoch
from baton.core.reasons import FailureReason
from baton.core.timers import Timers
from baton.protocol.effects import Effect, FreeLoan, PeerLost, Send, StreamEffect, Unwanted, pack_sends
from baton.protocol.handshake import RankCard, encode_ranks
from baton.protocol.messages import Envelope, Message
from baton.protocol.peers import PeerTable, admit
from baton.protocol.pull_consumer import PullConsumer
from baton.protocol.pull_producer import PullProducer
from baton.protocol.push_consumer import PushConsumer
from baton.protocol.push_producer import PushProducer

logger = logging.getLogger(__name__)

AnyEffect: TypeAlias = Effect | StreamEffect


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """Constructors of an agent's protocol machines, and the rule that admits envelopes.

    Production uses the defaults. A simulator replaces some of them.
    """

    producer: Callable[[Epoch, Timers], PullProducer] = PullProducer
    consumer: Callable[[Timers], PullConsumer] = PullConsumer
    prefills: Callable[[Timers], PushProducer] = PushProducer
    streams: Callable[[Timers, PullConsumer, int], PushConsumer] = PushConsumer
    peers: Callable[[Address, CurrentIdentity, Timers], PeerTable] = PeerTable
    admit: Callable[[Address, Envelope], tuple[tuple[Message, ...], list[Send]]] = admit


PRODUCTION: Final = Machines()


class PullAgent:
    """The machines of one engine. Every call needs the lock of the caller.

    Args:
        address: engine id and epoch of this process.
        identity: identity of this engine's KV; peers with another one are refused.
        timers: timers of all machines, in seconds.
    """

    def __init__(
        self,
        address: Address,
        identity: CurrentIdentity,
        timers: Timers,
        machines: Machines = PRODUCTION,
    ) -> None:
        self.address = address
        self._admit = machines.admit
        self.producer = machines.producer(address.epoch, timers)
        self.consumer = machines.consumer(timers)
        self.prefills = machines.prefills(timers)
        self.streams = machines.streams(timers, self.consumer, identity.value.num_layers)
        self.peers = machines.peers(address, identity, timers)
        self._machines = (self.producer, self.consumer, self.prefills, self.streams, self.peers)
        self._sends: list[Send] = []
        self._effects: deque[AnyEffect] = deque()
        self._is_handing_over = False
        self.num_effects = 0  # Given to their owners so far.
        # Bound by the owners of loans and of fetches, and by the half that counts faults.
        self.on_free: Callable[[FreeLoan, float], None] = lambda effect, now: None
        self.on_unwanted: Callable[[Unwanted, float], None] = lambda effect, now: None
        self.on_effect: Callable[[AnyEffect, float], None] = lambda effect, now: None
        self.on_fault: Callable[[], None] = lambda: None

    # --- Messages and time -----------------------------------------------------------------------

    def receive(self, envelope: Envelope, now: float) -> None:
        messages, answers = self._admit(self.address, envelope)
        if answers:
            self._queue(answers, now)
        for message in messages:
            for machine in self._machines:
                if effects := machine.receive(envelope.sender, message, now):
                    self._queue(effects, now)
        self._hand_over(now)

    def wake(self, now: float) -> None:
        """Do what is due."""
        for machine in self._machines:
            if effects := machine.wake(now):
                self._queue(effects, now)
        self._hand_over(now)

    @property
    def next_deadline(self) -> float:
        return min(
            self.producer.next_deadline,
            self.consumer.next_deadline,
            self.prefills.next_deadline,
            self.streams.next_deadline,
            self.peers.next_deadline,
        )

    def take_envelopes(self) -> list[Envelope]:
        """What has to be sent, one envelope per peer."""
        sends, self._sends = self._sends, []
        return pack_sends(self.address, sends)

    @property
    def has_envelopes(self) -> bool:
        return bool(self._sends)

    # --- Owners of machines ----------------------------------------------------------------------

    def announce(self, cards: list[RankCard]) -> None:
        """Let peers read the memory of these ranks from now on."""
        self.peers.announce(encode_ranks(cards))

    def carry_out(self, effects: Iterable[AnyEffect], now: float) -> None:
        """Put messages into the outbox, and give other effects to their owners, in order.

        Effects that an owner causes while it handles one come after those that wait already.
        """
        self._queue(effects, now)
        self._hand_over(now)

    def greet(self, peer: Address, now: float) -> None:
        """Leads to PeerReady or PeerLost, unless the peer is known already."""
        self.carry_out(self.peers.want(peer, now), now)

    def weights_changed(self, now: float) -> None:
        """Our weights have changed. All fetches have been aborted before."""
        self.carry_out(self.peers.weights_changed(), now)

    def lose(self, peer: Address, reason: FailureReason, now: float) -> None:
        """Fail everything that is fetched from this peer."""
        self._lose(peer, reason, now)
        self._hand_over(now)

    # --- Parts -----------------------------------------------------------------------------------

    def _queue(self, effects: Iterable[AnyEffect], now: float) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._sends.append(effect)
                continue
            self._effects.append(effect)
            if isinstance(effect, PeerLost):
                # The ranks have to learn of the lost peer before they learn which reads failed with it.
                self._lose(effect.address, effect.reason, now)

    def _lose(self, peer: Address, reason: FailureReason, now: float) -> None:
        for machine in (self.streams, self.consumer):
            self._queue(machine.peer_lost(peer, reason, now), now)

    def _hand_over(self, now: float) -> None:
        if self._is_handing_over or not self._effects:
            return
        self._is_handing_over = True
        try:
            while self._effects:
                effect = self._effects.popleft()
                self.num_effects += 1
                try:
                    if isinstance(effect, FreeLoan):
                        self.on_free(effect, now)
                    elif isinstance(effect, Unwanted):
                        self.on_unwanted(effect, now)
                    else:
                        self.on_effect(effect, now)
                except Exception:  # A bug of ours costs this effect; what waits for it ends by its deadline.
                    logger.exception("could not carry out %s; the engine goes on", type(effect).__name__)
                    self.on_fault()
        finally:
            self._is_handing_over = False
