"""One engine's protocol machines behind one mailbox: envelopes and time in, envelopes and effects out.

    envelope --admit--> producer, consumer, peers --effects--> Send: outbox    others: scheduler half

No lock, thread, socket or clock: whoever drives it (the control thread, a test, a simulator) brings them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from baton.core.ids import Address, LoanId, Pair
from baton.core.layout import ModelFingerprint
from baton.core.timers import Timers
from baton.protocol.effects import Effect, PeerLost, Send
from baton.protocol.handshake import RankCard, encode_ranks
from baton.protocol.messages import Envelope, pack_sends
from baton.protocol.peers import PeerTable, admit
from baton.protocol.pull_consumer import PullConsumer
from baton.protocol.pull_producer import PullProducer


class PullAgent:
    def __init__(self, address: Address, fingerprint: ModelFingerprint, timers: Timers) -> None:
        self.address = address
        self._producer = PullProducer(address.epoch, timers)
        self._consumer = PullConsumer(timers)
        self._peers = PeerTable(address, fingerprint, timers)
        self._sends: list[Send] = []
        self._effects: deque[Effect] = deque()

    # --- Driver --------------------------------------------------------------------------------

    def receive(self, envelope: Envelope, now: float) -> None:
        messages, answers = admit(self.address, envelope)
        self._carry_out(answers, now)
        for message in messages:
            self._carry_out(self._producer.receive(envelope.sender, message, now), now)
            self._carry_out(self._consumer.receive(envelope.sender, message, now), now)
            self._carry_out(self._peers.receive(envelope.sender, message, now), now)

    def wake(self, now: float) -> None:
        """Do what is due by now."""
        for machine in (self._producer, self._consumer, self._peers):
            self._carry_out(machine.wake(now), now)

    @property
    def next_deadline(self) -> float:
        return min(self._producer.next_deadline, self._consumer.next_deadline, self._peers.next_deadline)

    def take_envelopes(self) -> list[Envelope]:
        """What has to be sent, one envelope per peer."""
        sends, self._sends = self._sends, []
        return pack_sends(self.address, sends)

    @property
    def has_envelopes(self) -> bool:
        return bool(self._sends)

    # --- Scheduler half ------------------------------------------------------------------------

    def take_effects(self) -> Iterable[Effect]:
        """In order, each once. Carrying one out may lead to more, which come after."""
        while self._effects:
            yield self._effects.popleft()

    def announce(self, cards: list[RankCard]) -> None:
        """From now on peers may read our memory."""
        self._peers.announce(encode_ranks(cards))

    def lend(self, now: float) -> LoanId | None:
        return self._producer.lend(now)

    def drain(self, deadline: float) -> None:
        self._producer.drain(deadline)

    def greet(self, peer: Address, now: float) -> None:
        """Leads to PeerReady or PeerLost, unless it is known already."""
        self._carry_out(self._peers.want(peer, now), now)

    def reserve(self, loan_id: LoanId, producer: Address, now: float) -> int | None:
        """Claim a loan; None if another request here has claimed it."""
        reserved = self._consumer.reserve(loan_id, producer, now)
        if reserved is None:
            return None
        claim, effects = reserved
        self._carry_out(effects, now)
        return claim

    def start(self, claim: int, pairs: tuple[Pair, ...], now: float) -> None:
        self._carry_out(self._consumer.start(claim, pairs, now), now)

    def read_ended(self, claim: int, pair: Pair, ok: bool, now: float, error: str) -> None:
        self._carry_out(self._consumer.read_ended(claim, pair, ok, now, error), now)

    def abort(self, claim: int, now: float) -> None:
        self._carry_out(self._consumer.abort(claim, now), now)

    def release_unused(self, loan_id: LoanId, producer: Address, now: float) -> None:
        self._carry_out(self._consumer.release_unused(loan_id, producer, now), now)

    def lose(self, peer: Address, reason: str, now: float) -> None:
        """Fail whatever is fetched from it: it cannot be used, for a reason that only we know."""
        self._carry_out(self._consumer.peer_lost(peer, reason, now), now)

    @property
    def num_open_loans(self) -> int:
        return self._producer.num_open

    @property
    def num_open_fetches(self) -> int:
        return self._consumer.num_open

    def _carry_out(self, effects: Iterable[Effect], now: float) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._sends.append(effect)
                case PeerLost(address, reason):
                    # First the peer, then what fails with it: the order in which ranks have to hear of it.
                    self._effects.append(effect)
                    self._carry_out(self._consumer.peer_lost(address, reason, now), now)
                case _:
                    self._effects.append(effect)
