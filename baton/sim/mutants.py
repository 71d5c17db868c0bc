"""Each safeguard taken away, one at a time, to prove that the world is unkind enough to miss it.

A mutant is the production parts with one replaced by a subclass or function that forgets its guard. Nothing
here can be switched on from production code, and nothing in production can be switched off.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from baton.core.ids import Address, BlockId, LoanId, Pair, PromptHash, TransferId
from baton.core.kv_groups import NULL_BLOCK_ID
from baton.core.layout import ModelFingerprint, RankLayout
from baton.core.reasons import FailureCode, Fault
from baton.core.timers import Timers
from baton.protocol.effects import ConsumerEffect, FreeTarget, ProducerEffect, ReadEarly, Send, StreamEffect
from baton.protocol.grouped_prompt import GroupRoutes, plan_group_routes
from baton.protocol.messages import Announced, Envelope, Finished, Message, Renewed
from baton.protocol.pull_consumer import NEVER, PullConsumer, _Fetch
from baton.protocol.pull_producer import PullProducer, _Loan
from baton.protocol.push_consumer import PushConsumer
from baton.protocol.push_producer import PushProducer, _Prefill, _Want
from baton.protocol.push_stream import PushStream
from baton.protocol.ticket import BadTicket, Ticket
from baton.sim.connection import Checks
from baton.sim.parts import Parts, verify

# --- D --------------------------------------------------------------------------------------------


class NoFence(PullConsumer):
    """Accepts whatever has been read."""

    def _is_proved(self, fetch: _Fetch, completed_at: float) -> bool:
        return True


class NoDrift(PullConsumer):
    """Trusts two clocks to run alike."""

    def _believed_until(self, sent_at: float, ttl_s: float) -> float:
        return sent_at + ttl_s


class FromReceipt(PullConsumer):
    """Counts the lease from the answer instead of from the question."""

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
    """Takes the first rank's end for the end."""

    def _has_unread(self, fetch: _Fetch) -> bool:
        return False


class NoDeadline(PullConsumer):
    """Never gives up."""

    def reserve(
        self, loan_id: LoanId, producer: Address, now: float, **of_a_stream: Any
    ) -> tuple[int, list[ConsumerEffect]] | None:
        reserved = super().reserve(loan_id, producer, now, **of_a_stream)
        if reserved is not None:
            self._fetches[reserved[0]].give_up_at = NEVER
        return reserved


class AnySender(PullConsumer):
    """Believes whoever speaks of its loan, and does not ask whether the answer is to this incarnation."""

    def _of(self, sender: Address, loan_id: LoanId, claim: int) -> _Fetch | None:
        fetch = self._fetches.get(claim)
        return fetch if fetch is not None and fetch.loan_id == loan_id else None


# --- P --------------------------------------------------------------------------------------------


class NoExpiry(PullProducer):
    """Waits for Released for ever."""

    def wake(self, now: float) -> list[ProducerEffect]:
        return []

    @property
    def next_deadline(self) -> float:
        return NEVER


class NoCap(PullProducer):
    """Renews for as long as anybody asks."""

    def _cap(self, loan: _Loan) -> float:
        return NEVER


class Abandon(PullProducer):
    """Takes draining for a reason to break its promises."""

    def drain(self, deadline: float) -> None:
        super().drain(deadline)
        for loan in self._loans.values():
            loan.deadline = -NEVER


class AnyClaimer(PullProducer):
    """Renews and frees for whoever has the ticket."""

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
    """Takes what was read in one run for what was read in another."""

    def _is_void(self, stream: PushStream, run: int) -> bool:
        return stream.run == 0 and super()._is_void(stream, run)

    def _order(self, stream: PushStream, latest: Announced, pairs: tuple[Pair, ...]) -> list[StreamEffect]:
        stream.blocks = ()  # Or other blocks would give it away.
        return super()._order(stream, latest, pairs)

    def _mismatch(self, stream: PushStream, ticket: Ticket) -> FailureCode | None:
        stream.blocks = ()
        return super()._mismatch(stream, ticket)


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
    """Does not look at what the ticket of its stream is for."""

    def _mismatch(self, stream: PushStream, ticket: Ticket) -> FailureCode | None:
        return None


class NoSilence(PushConsumer):
    """Waits for a producer that is gone."""

    def _fails_at(self, stream: PushStream) -> float:
        return stream.give_up_at


class NoStreamDeadline(PushConsumer):
    """Waits for as long as P says that it works."""

    def _fails_at(self, stream: PushStream) -> float:
        return stream.heard_at + self._timers.silence_s


class StartsOver(PullConsumer):
    """Takes over from a stream without waiting for its void reads."""

    def __init__(self, timers: Timers) -> None:
        super().__init__(timers)
        self._old = Counter[tuple[int, Pair]]()

    def start(self, claim: int, pairs: tuple[Pair, ...], now: float) -> list[ConsumerEffect]:
        fetch = self._fetches.get(claim)
        if fetch is not None and fetch.is_void and fetch.reading is None:
            self._old.update((claim, pair) for pair in fetch.early)
            fetch.early.clear()
        return super().start(claim, pairs, now)

    def read_ended(
        self, claim: int, pair: Pair, ok: bool, now: float, error: str = ""
    ) -> list[ConsumerEffect]:
        if not ok and self._old[claim, pair]:  # One that was cancelled; it never ends well.
            self._old[claim, pair] -= 1
            return []
        return super().read_ended(claim, pair, ok, now, error)


class NoHandedDrain(PullConsumer):
    """Does not know of the reads that a stream has begun under its claim."""

    def _drained(self, fetch: _Fetch) -> list[ConsumerEffect]:
        fetch.early.clear()
        return super()._drained(fetch)


# --- Push, P --------------------------------------------------------------------------------------


class OneRun(PushProducer):
    """Does not tell of a preemption."""

    def preempted(self, transfer_id: TransferId, now: float) -> list[Send]:
        prefill = self._computing(transfer_id)
        if prefill is not None:
            prefill.ready = None
        return []


class AnyPrompt(PushProducer):
    """Pairs by name alone."""

    def _is_of(self, prefill: _Prefill, want: _Want) -> bool:
        return True


class AnyPrefill(PushProducer):
    """Pairs a want with the next prefill of that length, as by scanning."""

    def _answer(self, transfer_id: TransferId, want: _Want, now: float) -> Send:
        own = self._prefills.get(transfer_id)
        others = [
            prefill
            for prefill in self._prefills.values()
            if prefill.num_tokens == want.num_tokens and prefill.ticket is not None
        ]
        if want.over is not None or (own is not None and own.ticket is not None) or not others:
            return super()._answer(transfer_id, want, now)
        assert others[0].ticket is not None
        return Send(want.consumer, Finished(transfer_id, want.number, others[0].run, others[0].ticket))


class NoHold(PushProducer):
    """Remembers everybody who ever waited."""

    def wake(self, now: float) -> list[Send]:
        return []

    @property
    def next_deadline(self) -> float:
        return NEVER


# --- Cache groups ---------------------------------------------------------------------------------


def plan_shorter(
    producers: Sequence[RankLayout], consumers: Sequence[RankLayout], windows: Sequence[int | None]
) -> GroupRoutes:
    """D takes its windows for one token shorter than they are."""
    return tuple(
        passage._replace(window=passage.window - 1) if passage.window is not None else passage
        for passage in plan_group_routes(producers, consumers, windows)
    )


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


# --- Between --------------------------------------------------------------------------------------


def verify_all_but_prompt(
    ticket: Ticket,
    fingerprint: ModelFingerprint,
    prompt_hash_of: Callable[[int], PromptHash],
    num_tokens: int,
) -> None:
    try:
        verify(ticket, fingerprint, prompt_hash_of, num_tokens)
    except BadTicket as error:
        if error.reason is not Fault.PROMPT:
            raise


def admit_all(own_address: Address, envelope: Envelope) -> tuple[tuple[Message, ...], list[Send]]:
    """What was meant for the predecessor will do for us."""
    return envelope.messages, []


WIRES: dict[str, Parts] = {
    "request_mac": Parts(checks=Checks(requests=False)),
    "bound_answers": Parts(checks=Checks(requests=False, bound_answers=False)),
    "counters": Parts(checks=Checks(counters=False)),
    "link_replaced": Parts(replaces_links=False),
    "frame_mac": Parts(seals_frames=False),
    "sender_bound": Parts(binds_senders=False),
}
"""Guards of transports and of the control channel, which both modes lean on."""

MUTANTS: dict[str, Parts] = {
    "fence": Parts(consumer=NoFence),
    "drift": Parts(consumer=NoDrift),
    "from_send": Parts(consumer=FromReceipt),
    "claim": Parts(producer=AnyClaimer),
    "claim_number": Parts(producer=AnyClaim),
    "claim_epoch": Parts(producer=AnyEpoch),
    "bound_ops": Parts(bound_reads=False),
    "drain_reads": Parts(consumer=NoDrain),
    "all_ranks": Parts(consumer=AnyRank),
    "ticket_hash": Parts(verify=verify_all_but_prompt),
    "lease_expiry": Parts(producer=NoExpiry),
    "loan_cap": Parts(producer=NoCap),
    "promises": Parts(producer=Abandon),
    "deadline": Parts(consumer=NoDeadline),
    "incarnation": Parts(admit=admit_all, consumer=AnySender),
    "window_length": Parts(plan_group_routes=plan_shorter),
    "window_drop": Parts(drops_early=1),
    **WIRES,
}
"""Guards of pull, by name."""

PUSH_MUTANTS: dict[str, Parts] = {
    "fence": Parts(consumer=NoFence),
    "bound_ops": Parts(bound_reads=False),
    "run_check": Parts(push_consumer=AnyRun),
    "run_count": Parts(push_producer=OneRun),
    "clear_first": Parts(push_consumer=ReadsOver),
    "void_first": Parts(consumer=StartsOver),
    "drain_early": Parts(push_consumer=NoEarlyDrain),
    "drain_handed": Parts(consumer=NoHandedDrain),
    "prompt_check": Parts(push_producer=AnyPrompt, push_consumer=AnyTicket, verify=verify_all_but_prompt),
    "pair_by_transfer": Parts(
        push_producer=AnyPrefill, push_consumer=AnyTicket, verify=verify_all_but_prompt
    ),
    "hold": Parts(push_producer=NoHold),
    "silence": Parts(push_consumer=NoSilence),
    "stream_deadline": Parts(push_consumer=NoStreamDeadline),
    "window_length": Parts(plan_group_routes=plan_shorter),
    "window_drop": Parts(drops_early=1),
    "early_tables": Parts(push_consumer=OneTable),
    "early_first": Parts(push_consumer=FromTokenZero),
    **WIRES,
}
"""Guards of push, and those of pull that it leans on."""
