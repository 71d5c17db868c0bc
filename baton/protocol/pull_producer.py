"""Producer half of pull: lends blocks, takes them back.

    lend --> HELD
    HELD --Renew by the claimer-----> HELD    (deadline moves forward, never back, never past the cap)
    HELD --Released by the claimer--> (free)
    HELD --deadline-----------------> (free)  and every later message about it is answered with Gone
    HELD, unclaimed --give_up-------> (free)  for whom it was lent will not come

    keep --> KEPT --first Renew, Released--> as HELD from then on
             KEPT --hold_s, give_up, drain--> (free)

The first Renew makes its sender the claimer: this incarnation, this one use of the ticket. A loan that has
ended never comes back, for its number is ours and is used once; so *any* Renewed proves that the blocks were
held without a gap from `lend` until the deadline it names. A peer that seems dead, or has a new epoch,
changes nothing: the old one may be alive behind a partition. Only Released and time end a claimed loan.

A loan is *kept* when nobody is on the way to fetch it, as for a next turn that may never come. Until it is
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
    deadline: float  # What has been promised; only ever moves forward.
    cap: float  # However often it is renewed.
    claimer: tuple[Address, int] | None = None
    is_kept: bool = False  # For whoever may come; until then its end is nobody's business.


class PullProducer:
    def __init__(self, epoch: Epoch, timers: Timers) -> None:
        self._epoch = epoch
        self._timers = timers
        self._loans: dict[LoanId, _Loan] = {}
        self._num_lent = 0
        self._drained_by = NEVER

    def lend(self, now: float) -> LoanId | None:
        """A new loan, for the ticket. None once this engine drains."""
        if self.is_draining:
            return None
        self._num_lent += 1
        loan_id = LoanId(self._epoch, self._num_lent)
        self._loans[loan_id] = _Loan(now + self._timers.ttl_s, now + self._timers.loan_max_s)
        return loan_id

    def keep(self, now: float, hold_s: float) -> LoanId | None:
        """A new loan for whoever may come within `hold_s`. None once this engine drains."""
        loan_id = self.lend(now)
        if loan_id is not None:
            self._loans[loan_id] = _Loan(now + hold_s, NEVER, is_kept=True)
        return loan_id

    def give_up(self, loan_id: LoanId) -> list[ProducerEffect]:
        """End a loan that nobody has claimed, about which nothing has been promised; no other is touched."""
        loan = self._loans.get(loan_id)
        return [] if loan is None or loan.claimer is not None else [self._free(loan_id, expired=False)]

    def receive(self, sender: Address, message: Message, now: float) -> list[ProducerEffect]:
        effects = self.wake(now)  # What has run out is over before anybody can renew it.
        match message:
            case Renew(loan_id, claim, sequence):
                loan = self._loans.get(loan_id)
                if loan is None or not self._claims(loan, sender, claim):
                    return [*effects, Send(sender, Gone(loan_id, claim))]
                if loan.is_kept:  # The first promise about it; from now on as if it had just been lent.
                    loan.is_kept = False
                    loan.deadline, loan.cap = now, now + self._timers.loan_max_s
                loan.deadline = max(loan.deadline, min(now + self._timers.ttl_s, self._cap(loan)))
                return [*effects, Send(sender, Renewed(loan_id, claim, sequence, loan.deadline - now))]
            case Released(loan_id, claim):
                loan = self._loans.get(loan_id)
                if loan is None or not self._claims(loan, sender, claim):
                    return effects  # A duplicate, late, or not theirs to release.
                return [*effects, self._free(loan_id, expired=False)]
            case _:
                return effects  # Not for a lender.

    def wake(self, now: float) -> list[ProducerEffect]:
        expired = [loan_id for loan_id, loan in self._loans.items() if now >= self._ends_at(loan)]
        return [self._free(loan_id, expired=True) for loan_id in expired]

    def drain(self, deadline: float) -> None:
        """Lend nothing more and promise nothing beyond `deadline`. Promises already made are kept."""
        self._drained_by = min(self._drained_by, deadline)

    @property
    def is_draining(self) -> bool:
        return self._drained_by < NEVER

    @property
    def next_deadline(self) -> float:
        return min((self._ends_at(loan) for loan in self._loans.values()), default=NEVER)

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
