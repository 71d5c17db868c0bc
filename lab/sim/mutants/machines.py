"""Protocol machines that each lack one guard. Worlds must find that it is missing."""

from collections import Counter
from typing import Any

from msgspec.structs import replace

from baton.core.ids import Address, BlockId, LoanId, Pair, TransferId
from baton.core.kv_groups import NULL_BLOCK_ID
from baton.core.reasons import FailureCode, FailureReason
from baton.core.timers import Timers
from baton.protocol.effects import (
    ConsumerEffect,
    FreeTarget,
    Lent,
    Part,
    ProducerEffect,
    ReadEarly,
    Send,
    StreamEffect,
)
from baton.protocol.messages import Announced, Envelope, Finished, Message, Renewed
from baton.protocol.pull_consumer import NEVER, PullConsumer, State, _Fetch
from baton.protocol.pull_producer import PullProducer, _Loan
from baton.protocol.push_consumer import PushConsumer
from baton.protocol.push_producer import PushProducer, _Prefill, _Want
from baton.protocol.push_stream import PushStream
from baton.protocol.ticket import Ticket

# --- D --------------------------------------------------------------------------------------------


class NoFence(PullConsumer):
    """Accepts every completed read."""

    def _is_proved(self, fetch: _Fetch) -> bool:
        return True


class NoDrift(PullConsumer):
    """Assumes that two clocks run at one rate."""

    def _believed_until(self, sent_at: float, ttl_s: float) -> float:
        return sent_at + ttl_s


class FromReceipt(PullConsumer):
    """Counts the lease from the answer instead of the question."""

    def receive(self, sender: Address, message: Message, now: float) -> list[ConsumerEffect]:
        if isinstance(message, Renewed):
            fetch = self._fetches.get(message.claim)
            if fetch is not None and message.sequence in fetch.sent_at:
                fetch.sent_at[message.sequence] = now
        return super().receive(sender, message, now)


class NoDrain(PullConsumer):
    """Frees the destination while its own reads run."""

    def _drained(self, fetch: _Fetch) -> list[ConsumerEffect]:
        self._forget(fetch)
        return [FreeTarget(fetch.claim)]


class AnyRank(PullConsumer):
    """Takes the end of the first rank's reads for the end of all."""

    def _has_unread(self, fetch: _Fetch) -> bool:
        return False

    def _completed(self, fetch: _Fetch, now: float) -> list[ConsumerEffect]:
        fetch.state = State.OPEN  # The end of each further rank counts as the last one again.
        return super()._completed(fetch, now)


class NoDeadline(PullConsumer):
    """Never gives up."""

    def reserve(
        self, loan_id: LoanId, producer: Address, now: float, **of_a_stream: Any
    ) -> tuple[int, list[ConsumerEffect]] | None:
        reserved = super().reserve(loan_id, producer, now, **of_a_stream)
        if reserved is not None:
            self._fetches[reserved[0]].give_up_at = NEVER
        return reserved


# --- P --------------------------------------------------------------------------------------------


class NoExpiry(PullProducer):
    """Waits for Released without a deadline."""

    def wake(self, now: float) -> list[ProducerEffect]:
        return []

    @property
    def next_deadline(self) -> float:
        return NEVER


class NoCap(PullProducer):
    """Renews for as long as a consumer asks."""

    def _cap(self, loan: _Loan) -> float:
        return NEVER


class Abandon(PullProducer):
    """Ends all loans when it drains."""

    def drain(self, deadline: float) -> None:
        super().drain(deadline)
        for loan in self._loans.values():
            loan.deadline = -NEVER


class AnyClaimer(PullProducer):
    """Renews and frees for any consumer that has the ticket."""

    def _claims(self, loan: _Loan, sender: Address, claim: int) -> bool:
        return True


class AnyClaim(PullProducer):
    """Does not tell two uses of a ticket by one consumer apart."""

    def _claims(self, loan: _Loan, sender: Address, claim: int) -> bool:
        if loan.claimer is None:
            loan.claimer = (sender, claim)
        return loan.claimer[0] == sender


class AnyEpoch(PullProducer):
    """Takes a restarted consumer for the one before."""

    def _claims(self, loan: _Loan, sender: Address, claim: int) -> bool:
        if loan.claimer is None:
            loan.claimer = (sender, claim)
        address, number = loan.claimer
        return address.engine_id == sender.engine_id and number == claim


# --- Push, D --------------------------------------------------------------------------------------


class AnyRun(PushConsumer):
    """Believes what it read before the prefill was preempted."""

    def _is_void(self, stream: PushStream, run: int) -> bool:
        stream.run, stream.blocks = run, ()  # The blocks would give it away.
        return False


class ReadsOver(PushConsumer):
    """Reads a new run into blocks that reads of the old one still write."""

    def __init__(self, timers: Timers, pull: PullConsumer, num_layers: int) -> None:
        super().__init__(timers, pull, num_layers)
        self._old = Counter[tuple[int, Pair]]()

    def _clear(self, stream: PushStream) -> list[StreamEffect]:
        effects = super()._clear(stream)
        if stream.is_clearing:
            stream.is_clearing = False
            self._old.update((stream.claim, pair) for pair in stream.reading)
            stream.reading.clear()
        return effects

    def read_ended(self, claim: int, pair: Pair, ok: bool, now: float, error: str = "") -> list[StreamEffect]:
        if not ok and self._old[claim, pair]:  # One that was cancelled; it never ends well.
            self._old[claim, pair] -= 1
            return []
        return super().read_ended(claim, pair, ok, now, error)


class NoEarlyDrain(PushConsumer):
    """Frees the destination while it is being read into."""

    def _drained(self, stream: PushStream) -> list[StreamEffect]:
        self._forget(stream)
        return [FreeTarget(stream.claim)]


class AnyTicket(PushConsumer):
    """Does not check the ticket of its stream."""

    def _mismatch(self, stream: PushStream, ticket: Ticket) -> FailureCode | None:
        return None


class NoSilence(PushConsumer):
    """Waits for a producer that is gone."""

    def _fails_at(self, stream: PushStream) -> float:
        return stream.give_up_at


class NoStreamDeadline(PushConsumer):
    """Waits for as long as P reports that it works."""

    def _fails_at(self, stream: PushStream) -> float:
        return stream.heard_at + self._timers.silence_s


class StartsOver(PullConsumer):
    """Takes over from a stream without waiting for its void reads."""

    def __init__(self, timers: Timers) -> None:
        super().__init__(timers)
        self._old = Counter[tuple[int, Pair]]()

    def start(self, claim: int, pairs: tuple[Pair, ...], now: float) -> list[ConsumerEffect]:
        fetch = self._fetches.get(claim)
        if fetch is not None and fetch.state is State.CLEARING:
            self._old.update((claim, pair) for pair in fetch.reading)
            fetch.reading.clear()
            fetch.state = State.QUEUED
        return super().start(claim, pairs, now)

    def read_ended(
        self, claim: int, pair: Pair, ok: bool, now: float, error: str = ""
    ) -> list[ConsumerEffect]:
        if not ok and self._old[claim, pair]:  # One that was cancelled; it never ends well.
            self._old[claim, pair] -= 1
            return []
        return super().read_ended(claim, pair, ok, now, error)


# --- Push, P --------------------------------------------------------------------------------------


class SameRun(PushProducer):
    """A preemption frees blocks, and the producer does not report it."""

    def preempted(self, transfer_id: TransferId, now: float) -> list[Send]:
        return []



class AnyPrompt(PushProducer):
    """Pairs by name alone."""

    def _is_of(self, prefill: _Prefill, want: _Want) -> bool:
        return True


class NoHold(PushProducer):
    """Remembers every consumer that ever waited."""

    def wake(self, now: float) -> list[Send]:
        return []

    @property
    def next_deadline(self) -> float:
        return NEVER


# --- Cache groups ---------------------------------------------------------------------------------


class OneTable(PushConsumer):
    """Reads all that is announced through the table of the first part, whatever its group."""

    def _order(self, stream: PushStream, latest: Announced, pairs: tuple[Pair, ...]) -> list[StreamEffect]:
        effects = super()._order(stream, latest, pairs)
        tables = [effect.block_ids for effect in effects if isinstance(effect, ReadEarly)]
        return [
            replace(effect, block_ids=tables[0]) if isinstance(effect, ReadEarly) else effect
            for effect in effects
        ]


class FromTokenZero(PushConsumer):
    """Takes the first block that is announced of a window for that of token 0."""

    def _order(self, stream: PushStream, latest: Announced, pairs: tuple[Pair, ...]) -> list[StreamEffect]:
        return [
            replace(effect, block_ids=self._pushed_to_the_front(effect))
            if isinstance(effect, ReadEarly)
            else effect
            for effect in super()._order(stream, latest, pairs)
        ]

    def _pushed_to_the_front(self, early: ReadEarly) -> tuple[BlockId, ...]:
        if early.part.groups is None or NULL_BLOCK_ID not in early.block_ids:
            return early.block_ids
        named = tuple(block for block in early.block_ids if block != NULL_BLOCK_ID)
        return named + named[-1:] * (len(early.block_ids) - len(named))


class ForgetsStates(PushConsumer):
    """When a stream has ended, reads the tokens that are missing, and no state."""

    def accept(self, claim: int, ticket: Ticket, now: float) -> list[StreamEffect]:
        return [
            replace(effect, unread=tuple(part for part in effect.unread if not self._is_state(effect, part)))
            if isinstance(effect, Lent) and effect.unread is not None
            else effect
            for effect in super().accept(claim, ticket, now)
        ]

    def _is_state(self, lent: Lent, part: Part) -> bool:
        return part.groups is not None and part.groups.remote in lent.ticket.state_groups
