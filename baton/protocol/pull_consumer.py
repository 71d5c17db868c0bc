"""Consumer half of pull: starts reads at once, renews the lease meanwhile, accepts what is proved valid.

    reserve --> QUEUED, or CLEARING while void reads of a stream run
    QUEUED --start--> OPEN
    CLEARING --every void read has ended--> QUEUED
    CLEARING --start--> STARTING --every void read has ended--> OPEN
    OPEN --all pairs read--> PROVING --held_until lies after the last completion--> OVER   (delivered)
    any --Gone, read error, abort, deadline, silence, producer lost--> DRAINING            (fails now)
    DRAINING --every own read has ended--> OVER                                            (FreeTarget)

The fence is on completion. `held_until` is D's belief about the lease and always earlier than the truth: it
is counted from the *send* of a renewal, less the drift allowance. `completed_at` is when D learns of the last
rank's last read, which is later than the truth. A read that ended after the believed time is not lost yet: a
later Renewed proves that the loan never ended (see pull_producer), a Gone that it did.

A question without an answer is repeated after a round trip. A producer that answers none of them for
`silence_s` is stopped, dead or unreachable. The fetch then fails regardless of its reads, because computing
the prompt here is always correct.

    send of Renew                 learns of last read      held_until = sent + ttl_s * (1 - drift_max)
    |---------------- believed ---------|-------------------------|
    |<--- P holds at least from here to ... ------------------------------>|
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from baton.core.ids import Address, LoanId, Pair
from baton.core.reasons import FailureCode, FailureReason
from baton.core.timers import Timers
from baton.protocol.effects import CancelReads, ConsumerEffect, Deliver, Fail, FreeTarget, Send, StartReads
from baton.protocol.messages import Gone, Message, Released, Renew, Renewed, Stranger

NEVER = float("inf")


class State(Enum):
    QUEUED = "the request waits for free blocks; reads that a stream has started may run"
    CLEARING = "as QUEUED, but the reads are void, and must end before others start"
    STARTING = "the request has blocks; the void reads must end first"
    OPEN = "the pairs are being read"
    PROVING = "all pairs are read; a Renewed has to prove that the loan was held until then"
    DRAINING = "has failed; its reads must end before the target is free"
    OVER = "delivered, or failed and its target is free"


# The states that may follow each one. Any other step is a fault of ours.
NEXT: Final[dict[State, set[State]]] = {
    State.QUEUED: {State.OPEN, State.DRAINING},
    State.CLEARING: {State.QUEUED, State.STARTING, State.DRAINING},
    State.STARTING: {State.OPEN, State.DRAINING},
    State.OPEN: {State.PROVING, State.OVER, State.DRAINING},  # OVER: there is nothing to read.
    State.PROVING: {State.OVER, State.DRAINING},
    State.DRAINING: {State.OVER},
    State.OVER: set(),
}


@dataclass(slots=True)
class _Fetch:
    state: State
    claim: int
    loan_id: LoanId
    producer: Address
    give_up_at: float
    next_renew: float
    renewed_at: float  # When the last Renew was *sent*.
    reading: set[Pair]  # Reads that run, those that a stream has started included.
    to_start: tuple[Pair, ...] = ()  # STARTING: the pairs to read.
    completed_at: float = NEVER
    silent_since: float = NEVER  # First question since the last answer.
    held_until: float = -NEVER
    sent_at: dict[int, float] = field(default_factory=dict)  # Send time by sequence, until answered.


class PullConsumer:
    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        # Time from a question to its repetition.
        self._ask_again_s = min(timers.renew_every_s, timers.round_trip_max_s)
        self._fetches: dict[int, _Fetch] = {}
        self._in_use: dict[tuple[Address, LoanId], int] = {}
        self._num_claims = 0
        self._num_renewals = 0

    def new_claim(self) -> int:
        """A claim number for one use of a ticket or transfer; unique in this incarnation."""
        self._num_claims += 1
        return self._num_claims

    # --- Requests ---------------------------------------------------------------------------------

    def reserve(
        self,
        loan_id: LoanId,
        producer: Address,
        now: float,
        *,
        claim: int | None = None,
        give_up_at: float | None = None,
        early: Collection[Pair] = (),
        is_void: bool = False,
    ) -> tuple[int, list[ConsumerEffect]] | None:
        """Claims the loan and renews it until `start` or `abort`, for a request that waits for free blocks.

        None if another request of this engine uses this loan already; a ticket is good for one request.

        A stream (push_consumer) continues here under its claim number and deadline. `start` continues the
        reads in `early`; if they are void (`is_void`), they end before it starts.
        """
        if (producer, loan_id) in self._in_use:
            return None
        if claim is None:
            claim = self.new_claim()
        if give_up_at is None:
            give_up_at = now + self._timers.deadline_s
        state = State.CLEARING if is_void and early else State.QUEUED
        fetch = _Fetch(state, claim, loan_id, producer, give_up_at, now, now, set(early))
        self._fetches[claim] = fetch
        self._in_use[producer, loan_id] = claim
        return claim, [self._renew(fetch, now)]

    def start(self, claim: int, pairs: tuple[Pair, ...], now: float) -> list[ConsumerEffect]:
        """Starts the reads of a reserved claim. Does nothing if the claim has failed, as its Fail is out.

        Without pairs there is nothing to move or to prove: the claim is delivered and the loan released.
        """
        fetch = self._fetches.get(claim)
        if fetch is None or fetch.state is State.DRAINING:
            return []
        if fetch.state is State.CLEARING:
            self._move(fetch, State.STARTING)
            fetch.to_start = pairs
            return []
        assert fetch.state is State.QUEUED, "a claim is started once"
        assert fetch.reading <= set(pairs), "an early read that start does not continue"
        return self._open(fetch, pairs)

    def read_ended(
        self, claim: int, pair: Pair, ok: bool, now: float, error: str = ""
    ) -> list[ConsumerEffect]:
        fetch = self._fetches.get(claim)
        if fetch is None or pair not in fetch.reading:
            return []  # A duplicate.
        fetch.reading.discard(pair)
        if fetch.state is State.DRAINING:
            return self._drained(fetch)
        if fetch.state in (State.CLEARING, State.STARTING):
            return self._cleared(fetch)
        # QUEUED: the end of an early read that was not cancelled is an error, whatever its result.
        if not ok or fetch.state is State.QUEUED:
            return self._fail(fetch, read_failed(pair, error))
        return [] if self._has_unread(fetch) else self._completed(fetch, now)

    def abort(self, claim: int, now: float, code: FailureCode = FailureCode.ABORTED) -> list[ConsumerEffect]:
        fetch = self._fetches.get(claim)
        return [] if fetch is None else self._fail(fetch, FailureReason(code))

    def peer_lost(self, address: Address, reason: FailureReason, now: float) -> list[ConsumerEffect]:
        """Fails all fetches from this peer. It gets no message: see Stranger in docs/protocol.md."""
        lost = [fetch for fetch in self._fetches.values() if fetch.producer == address]
        return [effect for fetch in lost for effect in self._fail(fetch, reason, notify=False)]

    # --- Messages and time ------------------------------------------------------------------------

    def receive(self, sender: Address, message: Message, now: float) -> list[ConsumerEffect]:
        match message:
            case Renewed(loan_id, claim, sequence, ttl_s):
                fetch = self._of(sender, loan_id, claim)
                if fetch is None or fetch.state is State.DRAINING:
                    return [Send(sender, Released(loan_id, claim))]  # An earlier Released may have been lost.
                sent_at = fetch.sent_at.pop(sequence, None)
                if sent_at is None:
                    return []  # A duplicate.
                fetch.silent_since = NEVER
                # Once all reads have ended, ask again at once: the request waits for the answer.
                if fetch.state is not State.PROVING:
                    fetch.next_renew = max(fetch.next_renew, fetch.renewed_at + self._timers.renew_every_s)
                fetch.held_until = max(fetch.held_until, self._believed_until(sent_at, ttl_s))
                return self._settle(fetch)
            case Gone(loan_id, claim):
                fetch = self._of(sender, loan_id, claim)
                return [] if fetch is None else self._fail(fetch, FailureReason(FailureCode.LEASE_EXPIRED))
            case Stranger(about):
                return self.peer_lost(about, FailureReason(FailureCode.GONE), now)
            case _:
                return []  # Not for a consumer.

    def wake(self, now: float) -> list[ConsumerEffect]:
        if now < self.next_deadline:
            return []
        effects: list[ConsumerEffect] = []
        for fetch in [fetch for fetch in self._live() if now >= self._gives_up_at(fetch)]:
            effects += self._fail(fetch, self._overdue(fetch, now))
        open_fetches = self._live()
        due = {fetch.producer for fetch in open_fetches if now >= fetch.next_renew}
        for fetch in open_fetches:
            # Renewals that are nearly due go along, so that each peer gets about one envelope per period.
            is_near = fetch.next_renew - now < self._timers.renew_every_s / 2
            is_asked = now < fetch.renewed_at + self._ask_again_s
            if fetch.producer in due and is_near and not is_asked:
                effects.append(self._renew(fetch, now))
        return effects

    def is_held(self, claim: int, now: float) -> bool:
        """Whether bytes that arrive now would be accepted, given the answers received so far."""
        fetch = self._fetches.get(claim)
        return fetch is not None and fetch.state is not State.DRAINING and now < fetch.held_until

    @property
    def next_deadline(self) -> float:
        if not self._fetches:
            return NEVER
        due = NEVER
        for fetch in self._live():
            due = min(due, fetch.next_renew, self._gives_up_at(fetch))
        return due

    @property
    def num_open(self) -> int:
        return len(self._fetches)

    # --- Steps ------------------------------------------------------------------------------------

    def _move(self, fetch: _Fetch, to: State) -> None:
        assert to in NEXT[fetch.state], f"claim {fetch.claim}: from {fetch.state.name} to {to.name}"
        fetch.state = to

    def _live(self) -> list[_Fetch]:
        return [fetch for fetch in self._fetches.values() if fetch.state is not State.DRAINING]

    def _open(self, fetch: _Fetch, pairs: tuple[Pair, ...]) -> list[ConsumerEffect]:
        self._move(fetch, State.OPEN)
        fetch.reading = set(pairs)
        return [StartReads(fetch.claim, pairs)] if pairs else self._deliver(fetch)

    def _cleared(self, fetch: _Fetch) -> list[ConsumerEffect]:
        """A void read has ended."""
        if fetch.reading:
            return []
        if fetch.state is State.STARTING:
            return self._open(fetch, fetch.to_start)
        self._move(fetch, State.QUEUED)
        return []

    def _of(self, sender: Address, loan_id: LoanId, claim: int) -> _Fetch | None:
        fetch = self._fetches.get(claim)
        if fetch is None or fetch.loan_id != loan_id or fetch.producer != sender:
            return None
        return fetch

    def _renew(self, fetch: _Fetch, now: float) -> Send:
        self._num_renewals += 1
        fetch.sent_at[self._num_renewals] = now
        fetch.renewed_at = now
        fetch.silent_since = min(fetch.silent_since, now)
        fetch.next_renew = now + self._ask_again_s
        return Send(fetch.producer, Renew(fetch.loan_id, fetch.claim, self._num_renewals))

    def _gives_up_at(self, fetch: _Fetch) -> float:
        # Once all reads have ended, a live producer answers one of several renewals within silence_s.
        waits_since = min(fetch.silent_since, fetch.completed_at)
        return min(fetch.give_up_at, waits_since + self._timers.silence_s)

    def _believed_until(self, sent_at: float, ttl_s: float) -> float:
        # Counted from the send, not the answer: P counts from the receipt, which lies between the two.
        return sent_at + ttl_s * (1 - self._timers.drift_max)

    def _has_unread(self, fetch: _Fetch) -> bool:
        return bool(fetch.reading)

    def _completed(self, fetch: _Fetch, now: float) -> list[ConsumerEffect]:
        self._move(fetch, State.PROVING)
        fetch.completed_at = now
        effects = self._settle(fetch)
        if fetch.state is State.PROVING:  # Not proved yet: renew soon, or now.
            fetch.next_renew = min(fetch.next_renew, fetch.renewed_at + self._ask_again_s)
            if now >= fetch.next_renew:
                effects.append(self._renew(fetch, now))
        return effects

    def _settle(self, fetch: _Fetch) -> list[ConsumerEffect]:
        if fetch.state is State.PROVING and self._is_proved(fetch):
            return self._deliver(fetch)
        return []

    def _deliver(self, fetch: _Fetch) -> list[ConsumerEffect]:
        self._forget(fetch)
        return [Send(fetch.producer, Released(fetch.loan_id, fetch.claim)), Deliver(fetch.claim)]

    def _is_proved(self, fetch: _Fetch) -> bool:
        return fetch.completed_at < fetch.held_until

    def _overdue(self, fetch: _Fetch, now: float) -> FailureReason:
        if now < fetch.give_up_at:
            text = f"the producer has not answered for {self._timers.silence_s:g} s"
            return FailureReason(FailureCode.SILENT, text)
        match fetch.state:
            case State.QUEUED:
                waited_for = "room"
            case State.CLEARING | State.STARTING:
                waited_for = "reads of an older run"
            case State.OPEN:
                waited_for = f"{len(fetch.reading)} reads"
            case _:
                waited_for = "an answer of the producer"
        text = f"deadline of {self._timers.deadline_s:g} s passed, waiting for {waited_for}"
        return FailureReason(FailureCode.DEADLINE, text)

    def _fail(self, fetch: _Fetch, reason: FailureReason, *, notify: bool = True) -> list[ConsumerEffect]:
        if fetch.state is State.DRAINING:
            return []
        self._move(fetch, State.DRAINING)
        effects: list[ConsumerEffect] = [Fail(fetch.claim, reason)]
        if notify:
            effects.insert(0, Send(fetch.producer, Released(fetch.loan_id, fetch.claim)))
        return [*effects, *(self._drained(fetch) or [CancelReads(fetch.claim)])]

    def _drained(self, fetch: _Fetch) -> list[ConsumerEffect]:
        if fetch.reading:
            return []
        self._forget(fetch)
        return [FreeTarget(fetch.claim)]

    def _forget(self, fetch: _Fetch) -> None:
        self._move(fetch, State.OVER)
        del self._fetches[fetch.claim]
        del self._in_use[fetch.producer, fetch.loan_id]


def read_failed(pair: Pair, error: str) -> FailureReason:
    ranks = f"rank {pair.producer_rank} to rank {pair.consumer_rank}"
    return FailureReason(FailureCode.READ_FAILED, f"read failed, {ranks}: {error or 'no reason given'}")
