"""One engine's protocol machines behind one mailbox: envelopes and time in, envelopes and effects out.

    envelope --admit--> producers, consumers, peers --effects--> Send: outbox    others: scheduler half

No lock, thread, socket or clock: whoever drives it (the control thread, a test, a simulator) brings them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.core.ids import Address, Epoch, LoanId, Pair, PromptHash, TransferId
from baton.core.layout import ModelFingerprint
from baton.core.reasons import FailureReason
from baton.core.timers import Timers
from baton.protocol.effects import Effect, PeerLost, Send, StreamEffect, pack_sends
from baton.protocol.grouped_prompt import ONE_TABLE, GroupRoutes
from baton.protocol.handshake import RankCard, encode_ranks
from baton.protocol.messages import BlockTables, Envelope, Message
from baton.protocol.peers import PeerTable, admit
from baton.protocol.pull_consumer import PullConsumer
from baton.protocol.pull_producer import PullProducer
from baton.protocol.push_consumer import PushConsumer
from baton.protocol.push_producer import PushProducer
from baton.protocol.ticket import Ticket


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """Constructors of an agent's protocol machines, and the rule that admits envelopes.

    Production uses the defaults. A simulator replaces some of them.
    """

    producer: Callable[[Epoch, Timers], PullProducer] = PullProducer
    consumer: Callable[[Timers], PullConsumer] = PullConsumer
    prefills: Callable[[Timers], PushProducer] = PushProducer
    streams: Callable[[Timers, PullConsumer, int], PushConsumer] = PushConsumer
    peers: Callable[[Address, ModelFingerprint, Timers], PeerTable] = PeerTable
    admit: Callable[[Address, Envelope], tuple[tuple[Message, ...], list[Send]]] = admit


PRODUCTION = Machines()


class PullAgent:
    def __init__(
        self,
        address: Address,
        fingerprint: ModelFingerprint,
        timers: Timers,
        machines: Machines = PRODUCTION,
    ) -> None:
        self.address = address
        self._admit = machines.admit
        self._producer = machines.producer(address.epoch, timers)
        self._consumer = machines.consumer(timers)
        self._prefills = machines.prefills(timers)
        self._streams = machines.streams(timers, self._consumer, fingerprint.num_layers)
        self._peers = machines.peers(address, fingerprint, timers)
        self._machines = (self._producer, self._consumer, self._prefills, self._streams, self._peers)
        self._sends: list[Send] = []
        self._effects: deque[Effect | StreamEffect] = deque()

    # --- Driver --------------------------------------------------------------------------------

    def receive(self, envelope: Envelope, now: float) -> None:
        messages, answers = self._admit(self.address, envelope)
        self._carry_out(answers, now)
        for message in messages:
            for machine in self._machines:
                self._carry_out(machine.receive(envelope.sender, message, now), now)

    def wake(self, now: float) -> None:
        """Do what is due by now."""
        for machine in self._machines:
            self._carry_out(machine.wake(now), now)

    @property
    def next_deadline(self) -> float:
        return min([machine.next_deadline for machine in self._machines])

    def take_envelopes(self) -> list[Envelope]:
        """What has to be sent, one envelope per peer."""
        sends, self._sends = self._sends, []
        return pack_sends(self.address, sends)

    @property
    def has_envelopes(self) -> bool:
        return bool(self._sends)

    @property
    def has_effects(self) -> bool:
        """Something waits for `take_effects`."""
        return bool(self._effects)

    # --- Scheduler half ------------------------------------------------------------------------

    def take_effects(self) -> Iterable[Effect | StreamEffect]:
        """In order, each once. Carrying one out may lead to more, which come after."""
        while self._effects:
            yield self._effects.popleft()

    def announce(self, cards: list[RankCard]) -> None:
        """From now on peers may read our memory."""
        self._peers.announce(encode_ranks(cards))

    def lend(self, now: float) -> LoanId | None:
        return self._producer.lend(now)

    def keep(self, now: float, hold_s: float) -> LoanId | None:
        return self._producer.keep(now, hold_s)

    def give_up(self, loan_id: LoanId, now: float) -> bool:
        """End a loan that nobody has claimed; False if somebody has."""
        effects = self._producer.give_up(loan_id)
        self._carry_out(effects, now)
        return bool(effects)

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

    def want(
        self,
        transfer_id: TransferId,
        producer: Address,
        prompt_hash: PromptHash,
        num_tokens: int,
        block_tokens: int | None,
        now: float,
    ) -> int | None:
        """Claim what a producer computes under this name; None if another request here waits for it."""
        wanted = self._streams.want(transfer_id, producer, prompt_hash, num_tokens, block_tokens, now)
        if wanted is None:
            return None
        claim, effects = wanted
        self._carry_out(effects, now)
        return claim

    def read_early(
        self,
        claim: int,
        pairs: tuple[Pair, ...],
        first_token: int,
        now: float,
        *,
        block_tokens: int | None = None,
        group_routes: GroupRoutes = ONE_TABLE,
    ) -> None:
        """From now on read what is announced, behind the first `first_token` tokens.

        `block_tokens` are the producer's, if it has not introduced itself.
        """
        ready = self._streams.ready(
            claim, pairs, first_token, now, block_tokens=block_tokens, group_routes=group_routes
        )
        self._carry_out(ready, now)

    def accept(self, claim: int, ticket: Ticket, now: float) -> None:
        self._carry_out(self._streams.accept(claim, ticket, now), now)

    def refuse(self, claim: int, reason: FailureReason, now: float) -> None:
        self._carry_out(self._streams.refuse(claim, reason, now), now)

    def start(self, claim: int, pairs: tuple[Pair, ...], now: float) -> None:
        self._carry_out(self._consumer.start(claim, pairs, now), now)

    def read_ended(self, claim: int, pair: Pair, ok: bool, now: float, error: str) -> None:
        for machine in (self._streams, self._consumer):
            self._carry_out(machine.read_ended(claim, pair, ok, now, error), now)

    def abort(self, claim: int, now: float) -> None:
        for machine in (self._streams, self._consumer):
            self._carry_out(machine.abort(claim, now), now)

    def lose(self, peer: Address, reason: FailureReason, now: float) -> None:
        """Fail whatever is fetched from it: it cannot be used, for a reason that only we know."""
        for machine in (self._streams, self._consumer):
            self._carry_out(machine.peer_lost(peer, reason, now), now)

    # --- Prefills that somebody may read along -------------------------------------------------

    def expect(self, transfer_id: TransferId, prompt_hash: PromptHash, num_tokens: int, now: float) -> bool:
        """False: the name is in use; this prefill is lent as any other, when it has ended."""
        sends = self._prefills.expect(transfer_id, prompt_hash, num_tokens, now)
        self._carry_out(sends or (), now)
        return sends is not None

    def prefill_progress(
        self,
        transfer_id: TransferId,
        num_tokens: int,
        block_ids: BlockTables,
        now: float,
        *,
        partial_tokens: int = 0,
        partial_layers: int = 0,
        first_blocks: tuple[int, ...] = (),
    ) -> None:
        sends = self._prefills.progress(
            transfer_id,
            num_tokens,
            block_ids,
            now,
            partial_tokens=partial_tokens,
            partial_layers=partial_layers,
            first_blocks=first_blocks,
        )
        self._carry_out(sends, now)

    def prefill_preempted(self, transfer_id: TransferId, now: float) -> None:
        self._carry_out(self._prefills.preempted(transfer_id, now), now)

    def prefill_finished(self, transfer_id: TransferId, ticket: str, now: float) -> None:
        self._carry_out(self._prefills.finished(transfer_id, ticket, now), now)

    def prefill_failed(self, transfer_id: TransferId, reason: str, now: float) -> None:
        self._carry_out(self._prefills.failed(transfer_id, reason, now), now)

    def is_unwanted(self, transfer_id: TransferId) -> bool:
        return self._prefills.is_unwanted(transfer_id)

    @property
    def num_open_loans(self) -> int:
        return self._producer.num_open

    @property
    def num_open_fetches(self) -> int:
        return self._consumer.num_open + self._streams.num_open

    @property
    def num_open_streams(self) -> int:
        """Those of the fetches whose prefill has not ended, as far as we know."""
        return self._streams.num_open

    def _carry_out(self, effects: Iterable[Effect | StreamEffect], now: float) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._sends.append(effect)
                case PeerLost(address, reason):
                    # First the peer, then what fails with it: the order in which ranks have to hear of it.
                    self._effects.append(effect)
                    self.lose(address, reason, now)
                case _:
                    self._effects.append(effect)
