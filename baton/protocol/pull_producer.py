"""Producer half of pull: lends blocks to consumers and frees them when the loan ends.

    lend --> HELD
    HELD --Renew by the claimer-----> HELD    (deadline moves forward, never back, never past the cap)
    HELD --Released by the claimer--> (free)
    HELD --deadline-----------------> (free)  and every later message about it is answered with Gone
    HELD, unclaimed --give_up-------> (free)  the consumer that it was lent for will not come

    keep --> KEPT --first Renew, Released--> as HELD from then on
             KEPT --hold_s, give_up, drain--> (free)

The first Renew makes its sender the claimer: this incarnation, for this one use of the ticket. A loan that
has ended never comes back, because P numbers the loans and uses each number once. So *any* Renewed proves
that the blocks were held without a gap from `lend` until the deadline it names. That a peer seems dead, or
has a new epoch, changes nothing: the old incarnation may be alive on the other side of a partition. Only
Released and time end a claimed loan.

A loan is *kept* if no consumer is on its way to fetch it, as for a next turn that may never come. Until it is
claimed nothing has been promised about it (a ticket promises nothing), so it may end at any time.
"""

from dataclasses import dataclass

from baton.core.ids import Address, Epoch, LoanId
from baton.core.timers import Timers
from baton.protocol.effects import FreeLoan, ProducerEffect, Send
from baton.protocol.messages import Gone, Message, Released, Renew, Renewed

NEVER = float("inf")


@dataclass(slots=True)
class _Loan:
    deadline: float  # The blocks are promised until then. Never moves backward.
    cap: float  # Latest deadline, however often the loan is renewed.
    claimer: tuple[Address, int] | None = None
    is_kept: bool = False  # Not claimed yet, and may end at any time.


class PullProducer:
    def __init__(self, epoch: Epoch, timers: Timers) -> None:
        self.epoch = epoch
        self._timers = timers
        self._loans: dict[LoanId, _Loan] = {}
        self._num_lent = 0
        self._drained_by = NEVER

    def lend(self, now: float) -> LoanId | None:
        """A new loan, for the ticket. None if this engine drains."""
        if self.is_draining:
            return None
        self._num_lent += 1
        loan_id = LoanId(self.epoch, self._num_lent)
        self._loans[loan_id] = _Loan(now + self._timers.ttl_s, now + self._timers.loan_max_s)
        return loan_id

    def keep(self, now: float, hold_s: float) -> LoanId | None:
        """A new loan that a consumer may claim within `hold_s`. None if this engine drains."""
        loan_id = self.lend(now)
        if loan_id is not None:
            self._loans[loan_id] = _Loan(now + hold_s, NEVER, is_kept=True)
        return loan_id

    def give_up(self, loan_id: LoanId) -> list[ProducerEffect]:
        """Ends a loan that is not claimed, about which nothing has been promised. Others are not touched."""
        loan = self._loans.get(loan_id)
        return [] if loan is None or loan.claimer is not None else [self._free(loan_id, expired=False)]

    def receive(self, sender: Address, message: Message, now: float) -> list[ProducerEffect]:
        effects = self.wake(now)  # Expired loans end before a message can renew them.
        match message:
            case Renew(loan_id, claim, sequence):
                loan = self._loans.get(loan_id)
                if loan is None or not self._claims(loan, sender, claim):
                    return [*effects, Send(sender, Gone(loan_id, claim))]
                if loan.is_kept:  # The first promise; from now on as just lent.
                    loan.is_kept = False
                    loan.deadline, loan.cap = now, now + self._timers.loan_max_s
                loan.deadline = max(loan.deadline, min(now + self._timers.ttl_s, self._cap(loan)))
                return [*effects, Send(sender, Renewed(loan_id, claim, sequence, loan.deadline - now))]
            case Released(loan_id, claim):
                loan = self._loans.get(loan_id)
                if loan is None or not self._claims(loan, sender, claim):
                    return effects  # A duplicate, late, or from another claimer.
                return [*effects, self._free(loan_id, expired=False)]
            case _:
                return effects  # Not for a producer.

    def wake(self, now: float) -> list[ProducerEffect]:
        if not self._loans:
            return []
        expired = [loan_id for loan_id, loan in self._loans.items() if now >= self._ends_at(loan)]
        return [self._free(loan_id, expired=True) for loan_id in expired]

    def drain(self, deadline: float) -> None:
        """Lends nothing more and promises nothing beyond `deadline`. Earlier promises are kept."""
        self._drained_by = min(self._drained_by, deadline)

    @property
    def is_draining(self) -> bool:
        return self._drained_by < NEVER

    @property
    def next_deadline(self) -> float:
        if not self._loans:
            return NEVER
        return min([self._ends_at(loan) for loan in self._loans.values()])

    @property
    def num_open(self) -> int:
        return len(self._loans)

    def _ends_at(self, loan: _Loan) -> float:
        return -NEVER if loan.is_kept and self.is_draining else loan.deadline

    def _cap(self, loan: _Loan) -> float:
        return min(loan.cap, self._drained_by)

    def _claims(self, loan: _Loan, sender: Address, claim: int) -> bool:
        if loan.claimer is None:
            loan.claimer = (sender, claim)
        return loan.claimer == (sender, claim)

    def _free(self, loan_id: LoanId, *, expired: bool) -> FreeLoan:
        del self._loans[loan_id]
        return FreeLoan(loan_id, expired)
