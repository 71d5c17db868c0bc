"""Each safeguard of pull taken away, one at a time, to prove that the world is unkind enough to miss it.

A mutant is the production parts with one replaced by a subclass or function that forgets its guard. Nothing
here can be switched on from production code, and nothing in production can be switched off.
"""

from collections.abc import Callable
from typing import Any

from baton.core.ids import Address, LoanId, PromptHash
from baton.core.layout import ModelFingerprint
from baton.protocol.effects import ConsumerEffect, FreeTarget, ProducerEffect, Send
from baton.protocol.messages import Envelope, Message, Renewed
from baton.protocol.pull_consumer import NEVER, PullConsumer, _Fetch
from baton.protocol.pull_producer import PullProducer, _Loan
from baton.protocol.ticket import BadTicket, Ticket, TicketFault
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
        if error.reason is not TicketFault.PROMPT:
            raise


def admit_all(own_address: Address, envelope: Envelope) -> tuple[tuple[Message, ...], list[Send]]:
    """What was meant for the predecessor will do for us."""
    return envelope.messages, []


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
}
