"""Properties of the two lease machines that the transcripts do not show: caps, false senders, timers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.ids import Address, EngineId, Epoch, LoanId, Pair
from baton.core.reasons import FailureCode, FailureReason
from baton.core.timers import Timers
from baton.protocol.effects import Deliver, Fail, FreeLoan, FreeTarget, Send
from baton.protocol.messages import Gone, Message, Released, Renew, Renewed
from baton.protocol.pull_consumer import NEVER, NEXT, PullConsumer, State
from baton.protocol.pull_producer import PullProducer

T = Timers()
P, D, E = (Address(EngineId(name), Epoch(5)) for name in "PDE")
PAIR = Pair(0, 0)
LOAN = LoanId(Epoch(5), 1)
GONE = FailureReason(FailureCode.GONE)


def messages_of(effects: object) -> list[Message]:
    assert isinstance(effects, list)
    return [effect.message for effect in effects if isinstance(effect, Send)]


def lent(producer: PullProducer, now: float = 0.0) -> LoanId:
    loan_id = producer.lend(now)
    assert loan_id is not None
    return loan_id


def fetching(consumer: PullConsumer, loan_id: LoanId = LOAN, producer: Address = P) -> int:
    reserved = consumer.reserve(loan_id, producer, 0.0)
    assert reserved is not None
    consumer.start(reserved[0], (PAIR,), 0.0)
    return reserved[0]


def test_a_loan_is_capped_and_its_answers_shrink() -> None:
    producer = PullProducer(Epoch(5), T)
    loan_id = lent(producer)
    promised = []
    now = 0.0
    while True:
        [answer] = messages_of(producer.receive(D, Renew(loan_id, 1, 1), now))
        if isinstance(answer, Gone):
            break
        assert isinstance(answer, Renewed)
        promised.append(now + answer.ttl_s)
        now += T.renew_every_s
    assert max(promised) == T.loan_max_s == now
    assert promised == sorted(promised), "a promise must not be shortened"


def test_loans_are_numbered_by_their_lender_for_ever() -> None:
    producer = PullProducer(Epoch(5), T)
    first = lent(producer)
    assert producer.receive(D, Released(first, 1), 0.0) == [FreeLoan(first, expired=False)]
    assert lent(producer) == LoanId(Epoch(5), 2)


def test_a_loan_may_be_given_up_until_it_is_claimed() -> None:
    producer = PullProducer(Epoch(5), T)
    forgotten, claimed = lent(producer), lent(producer)
    producer.receive(D, Renew(claimed, 1, 1), 0.0)
    assert producer.give_up(forgotten) == [FreeLoan(forgotten, expired=False)]
    assert producer.give_up(claimed) == []
    assert producer.give_up(forgotten) == [], "it has ended"
    assert messages_of(producer.receive(D, Renew(forgotten, 2, 1), 0.0)) == [Gone(forgotten, 2)]


def kept(producer: PullProducer, hold_s: float = 1000.0) -> LoanId:
    loan_id = producer.keep(0.0, hold_s)
    assert loan_id is not None
    return loan_id


def test_a_kept_loan_is_promised_from_its_first_renewal_on() -> None:
    producer = PullProducer(Epoch(5), T)
    loan_id = kept(producer)
    assert producer.next_deadline == 1000.0
    assert producer.wake(999.0) == []
    assert messages_of(producer.receive(D, Renew(loan_id, 1, 1), 999.0)) == [Renewed(loan_id, 1, 1, T.ttl_s)]
    now = 999.0
    while producer.next_deadline > now:
        now = producer.next_deadline - 0.001
        producer.receive(D, Renew(loan_id, 1, 2), now)
        if producer.next_deadline == 999.0 + T.loan_max_s:
            break
    assert producer.wake(999.0 + T.loan_max_s) == [FreeLoan(loan_id, expired=True)]


def test_a_kept_loan_that_is_not_claimed_ends_with_its_time() -> None:
    producer = PullProducer(Epoch(5), T)
    loan_id = kept(producer)
    assert producer.wake(1000.0) == [FreeLoan(loan_id, expired=True)]
    assert messages_of(producer.receive(D, Renew(loan_id, 1, 1), 1000.0)) == [Gone(loan_id, 1)]


def test_a_drain_ends_kept_loans_at_once_and_claimed_ones_at_its_end() -> None:
    producer = PullProducer(Epoch(5), T)
    waiting, claimed = kept(producer), kept(producer)
    producer.receive(D, Renew(claimed, 1, 1), 0.0)
    producer.drain(20.0)
    assert producer.next_deadline == -NEVER
    assert producer.wake(0.0) == [FreeLoan(waiting, expired=True)]
    assert producer.keep(0.0, 10.0) is None
    assert producer.next_deadline == T.ttl_s, "an earlier promise is kept"


def test_an_early_read_that_ends_by_itself_names_its_ranks() -> None:
    consumer = PullConsumer(T)
    reserved = consumer.reserve(LOAN, P, 0.0, early=[PAIR])
    assert reserved is not None
    _, failed, freed = consumer.read_ended(reserved[0], PAIR, False, 1.0, "link down")
    reason = FailureReason(FailureCode.READ_FAILED, "read failed, rank 0 to rank 0: link down")
    assert failed == Fail(reserved[0], reason)
    assert freed == FreeTarget(reserved[0])


@pytest.mark.parametrize(
    ("state", "waited_for"),
    [
        ("queued", "room"),
        ("reading", "2 reads"),
        ("read", "an answer of the producer"),
        ("early", "reads of an older run"),
    ],
)
def test_a_deadline_names_what_was_waited_for(state: str, waited_for: str) -> None:
    consumer, pairs = PullConsumer(Timers(silence_s=500.0, hold_s=600.0)), (PAIR, Pair(1, 0))
    early = {"early": pairs, "is_void": True} if state == "early" else {}
    reserved = consumer.reserve(LOAN, P, 0.0, **early)  # type: ignore[arg-type]
    assert reserved is not None
    claim, _ = reserved
    if state in ("reading", "read"):
        consumer.start(claim, pairs, 0.0)
        for pair in pairs if state == "read" else ():
            consumer.read_ended(claim, pair, True, 1.0)
    [failed] = [effect for effect in consumer.wake(T.deadline_s) if isinstance(effect, Fail)]
    text = f"deadline of {T.deadline_s:g} s passed, waiting for {waited_for}"
    assert failed.reason == FailureReason(FailureCode.DEADLINE, text)


def test_a_lease_is_believed_until_the_moment_of_its_end_and_not_in_it() -> None:
    consumer = PullConsumer(T)
    claim = fetching(consumer)
    consumer.receive(P, Renewed(LOAN, claim, 1, 10.0), 1.0)
    ends_at = 10.0 * (1 - T.drift_max)
    assert consumer.is_held(claim, ends_at - 0.001)
    assert not consumer.is_held(claim, ends_at)


def test_only_the_producer_of_a_loan_can_report_on_it() -> None:
    consumer = PullConsumer(T)
    claim = fetching(consumer)
    assert consumer.receive(E, Gone(LOAN, claim), 0.0) == []
    assert messages_of(consumer.receive(E, Renewed(LOAN, claim, 1, 30.0), 0.0)) == [Released(LOAN, claim)]
    assert not consumer.is_held(claim, 0.0)
    other = LoanId(Epoch(5), 2)
    assert consumer.receive(P, Gone(other, claim), 0.0) == []
    assert consumer.num_open == 1


@pytest.mark.parametrize("stopped_at", [0.0, 0.001, 1.0, 7.4, 7.5, 7.6, 14.9, 15.1, 100.0])
@pytest.mark.parametrize("is_queued", [True, False])
def test_a_stopped_producer_costs_at_most_15_seconds(stopped_at: float, is_queued: bool) -> None:
    """The bound holds with default timers, while reads hang or before they have started."""
    consumer = PullConsumer(T)
    reserved = consumer.reserve(LOAN, P, 0.0)
    assert reserved is not None
    claim, effects = reserved
    if not is_queued:
        consumer.start(claim, (PAIR,), 0.0)
    now = 0.0
    while not any(isinstance(effect, Fail) for effect in effects):
        for renew in messages_of(effects):
            if isinstance(renew, Renew) and now < stopped_at:
                consumer.receive(P, Renewed(LOAN, claim, renew.sequence, T.ttl_s), now)
        now = consumer.next_deadline
        assert now <= max(stopped_at, 0.0) + 15.0
        effects = consumer.wake(now)


def test_every_claim_ends_once_and_its_blocks_are_freed_once() -> None:
    consumer = PullConsumer(T)
    claim = fetching(consumer)
    ends: list[object] = []
    for effects in (
        consumer.abort(claim, 1.0),
        consumer.receive(P, Gone(LOAN, claim), 1.0),
        consumer.peer_lost(P, GONE, 1.0),
        consumer.wake(T.deadline_s),
        consumer.read_ended(claim, PAIR, False, 121.0),
        consumer.read_ended(claim, PAIR, True, 121.0),
        consumer.abort(claim, 122.0),
    ):
        ends += [effect for effect in effects if isinstance(effect, Fail | Deliver | FreeTarget)]
    assert ends == [Fail(claim, FailureReason(FailureCode.ABORTED)), FreeTarget(claim)]
    assert (consumer.num_open, consumer.next_deadline) == (0, NEVER)


def test_a_claim_is_started_once() -> None:
    consumer = PullConsumer(T)
    claim = fetching(consumer)
    with pytest.raises(AssertionError, match="started once"):
        consumer.start(claim, (PAIR,), 0.0)


def test_every_live_state_can_fail_and_only_over_is_the_end() -> None:
    assert set(NEXT) == set(State)
    for state, following in NEXT.items():
        assert (State.DRAINING in following) == (state not in (State.DRAINING, State.OVER))
        assert bool(following) == (state is not State.OVER)


@given(
    ttl_s=st.floats(1.0, 100.0),
    receipt_after_s=st.floats(0.0, 10.0),
    answer_after_s=st.floats(0.0, 10.0),
    producer_rate=st.floats(0.9951, 1.0049),
    consumer_rate=st.floats(0.9951, 1.0049),
)
def test_the_believed_lease_never_outlives_the_promise(
    ttl_s: float, receipt_after_s: float, answer_after_s: float, producer_rate: float, consumer_rate: float
) -> None:
    """True time against two clocks, each wrong by less than half of drift_max."""
    timers = Timers(
        ttl_s=ttl_s,
        round_trip_max_s=min(ttl_s / 10, 2.0),
        silence_s=500.0,
        hold_s=600.0,
        loan_max_s=200.0 + 2 * ttl_s,
    )
    producer, consumer = PullProducer(Epoch(5), timers), PullConsumer(timers)
    loan_id = lent(producer, 0.0)
    fetching(consumer, loan_id)
    receipt_s = min(receipt_after_s, ttl_s / 2)
    [renewed] = messages_of(producer.receive(D, Renew(loan_id, 1, 1), receipt_s * producer_rate))
    consumer.receive(P, renewed, (receipt_s + answer_after_s) * consumer_rate)
    freed_at_s = producer.next_deadline / producer_rate
    assert not consumer.is_held(1, freed_at_s * consumer_rate)
