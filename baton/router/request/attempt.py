"""One attempt of a request: engines are chosen and met, then legs go to them, until D's leg is open.

    start --> D is met --> P is met --> pull    P's leg, then D's with P's ticket
                              |         push    P's leg and D's at once, or D's held back
                              +-------> alone   D's leg, perhaps after a stored loan

An engine is met before it gets its first request. What it reports may exclude it. Then the choice begins
anew.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from baton.router.fleet.engine import Engine
from baton.router.request.answers import Prefilled, Unable
from baton.router.request.decode import Decode
from baton.router.request.events import Hold, HoldOver, Meet, Met
from baton.router.request.prefill import Prefill, Shared
from baton.router.request.step import AfterClosing, LegAnswerEvent, Next, State
from baton.router.values.errors import LegFailure
from baton.router.values.identity import has_other_weights
from baton.router.values.legs import push_params


class Attempt:
    def __init__(self, shared: Shared, prefill: Prefill, decode: Decode, body: Mapping[str, Any]) -> None:
        """`body`: the client's."""
        self._view, self._outbox, _, self._engines, self._first, self._reply, self._lending = shared
        self._prefill, self._decode, self._body = prefill, decode, body
        self._then: Callable[[], Next] = self.start  # The step after MEETING.
        self._push_params: Mapping[str, Any] = {}  # Params of a decode leg that leaves with the prefill leg.

    # --- The choice of engines

    def start(self) -> Next:
        # D is chosen before the prefill: without a decode engine there is nothing to prefill for.
        has_begun = self._reply.has_begun
        is_open = self._prefill.prefilled is None and not has_begun
        consumer = self._engines.place(is_open=is_open, has_begun=has_begun)
        if consumer is None:
            raise self._view.no_engine("decode", self._decode.failure)
        return self._meet(consumer, self._find_producer)

    def meet_again(self) -> Next:
        """D has refused an introduction: it is asked what it is, then the choice begins anew."""
        assert self._decode.leg is not None
        return self._meet(self._decode.leg.engine, self.start, is_again=True)

    def _meet(self, engine: Engine, then: Callable[[], Next], *, is_again: bool = False) -> Next:
        if not engine.is_up or (engine.was_asked and not is_again):
            return then()
        self._then = then
        self._outbox.emit(Meet(engine))
        return State.MEETING

    def on_met(self, event: Met) -> Next:
        return self._then()

    def _find_producer(self) -> Next:
        if self._prefill.prefilled is not None or self._engines.local_reason is not None:
            return self._choose_way(None)
        producer = self._engines.choose_producer(self._engines.consumer)
        if producer is None or producer.was_asked:
            return self._choose_way(producer)
        return self._meet(producer, self._find_producer)  # P may turn out not to fit.

    def _choose_way(self, producer: Engine | None) -> Next:
        """Pull or push, now that both engines are known."""
        consumer = self._engines.consumer
        assert consumer is not None
        if not self._view.fleet.models.may_take(consumer, self._engines.routed):
            return self.start()  # What it says of itself excludes it.
        if producer is None or self._view.settings.mode == "pull" or self._first.is_told:
            self._first.choose(producer, consumer, is_push=False)
            return self._pull(producer)
        return self._meet(
            producer, lambda: self._push_or_pull(producer, consumer), is_again=not producer.is_introduced
        )

    # --- Push

    def _push_or_pull(self, producer: Engine, consumer: Engine) -> Next:
        if self._engines.why_no_pair(producer, consumer) is not None:
            return self.start()  # P has introduced itself again.
        self._first.choose(producer, consumer, is_push=True)
        card = producer.introduction
        if card is None or card.introduction is None or self._first.needs_no_decode:
            self._first.choose(producer, consumer, is_push=False)
            return self._pull(producer)
        hold_s = self._view.late_legs.hold_s(producer, consumer, self._engines.routed.num_tokens)
        continues = self._first.takes_prefills_token
        self._prefill.begin(producer)
        self._push_params = push_params(
            self._prefill.transfer_id,
            engine_id=card.engine_id,
            introduction=card.introduction,
            continues=continues,
        )
        if hold_s == 0.0:
            return self._push("at_once")
        if hold_s is not None:
            self._outbox.emit(Hold(hold_s, self._prefill.transfer_id))
        return State.HELD

    def on_hold_over(self, event: HoldOver) -> Next:
        if event.transfer_id != self._prefill.transfer_id:
            return None  # The timer is an earlier attempt's.
        producer, consumer = self._prefill.producer, self._engines.consumer
        if producer and consumer and self._engines.why_no_pair(producer, consumer) is not None:
            return None  # An update has parted them; D begins after P, as in pull.
        return self._push("late")

    def _push(self, when: Literal["at_once", "late"]) -> Next:
        assert self._engines.consumer is not None
        self._outbox.count("pushes", when)
        self._decode.open(self._engines.consumer, self._push_params, is_pushed=True)
        return State.PUSHING

    # --- Pull

    def _pull(self, producer: Engine | None) -> Next:
        if self._prefill.prefilled is not None:
            return self._after_prefill()
        if self._engines.local_reason is not None:
            return self._borrow_or_compute()
        return self._pull_from(producer)

    def _borrow_or_compute(self) -> Next:
        """D computes the prompt, after what another engine lends of it. That is asked for once."""
        loan = None if self._prefill.has_borrowed else self._engines.find_loan()
        if loan is None:
            self._prefill.leave_to_decode(self._engines.why_alone)
            return self._after_prefill()
        self._prefill.borrow(self._body, loan)
        return State.BORROWING

    def on_loan(self, event: LegAnswerEvent) -> Next:
        """BORROWING: whatever the engine answers, D goes on."""
        return self._after_prefill() if self._prefill.take_loan(event) else None

    def _pull_from(self, producer: Engine | None) -> Next:
        if producer is None:
            return self._go_on_alone()
        if not producer.was_asked:
            return self._meet(
                producer, lambda: self._pull_from(self._engines.choose_producer(self._engines.consumer))
            )
        self._prefill.begin(producer)
        self._prefill.wait_till_late()
        return State.PREFILLING

    def _go_on_alone(self) -> Next:
        """No prefill engine is left."""
        reason = self._engines.why_none_fits
        if self._view.settings.on_prefill_failure == "fail" and reason != "other_weights":
            is_tried = self._engines.has_bad_producer
            raise self._view.no_engine("prefill", self._prefill.failure, is_tried=is_tried)
        self._prefill.leave_to_decode(reason)
        return self._after_prefill()

    # --- P's answer

    def on_pulled(self, event: LegAnswerEvent) -> Next:
        """PREFILLING."""
        outcome = self._prefill.read(event)
        if outcome is None:
            return None
        match self._prefill.take(event.leg, outcome, is_pull=True):
            case LegFailure() | Unable() as why:
                return self._pull_from(self._engines.choose_other_producer(is_free=_is_free(why)))
            case Prefilled():
                return self._after_prefill()
            case found:
                return found

    def on_held(self, event: LegAnswerEvent) -> Next:
        """HELD: D's leg follows as in pull."""
        outcome = self._prefill.read(event)
        if outcome is None:
            return None
        self._outbox.count("pushes", "after")
        match self._prefill.take(event.leg, outcome, is_pull=False):
            case LegFailure() | Unable() as why:
                self._engines.choose_other_producer(is_free=_is_free(why))
                return AfterClosing.ATTEMPT
            case Prefilled():
                assert self._engines.consumer is not None
                self._first.choose(event.leg.engine, self._engines.consumer, is_push=False)
                return self._after_prefill()
            case found:
                return found

    def on_pushed(self, event: LegAnswerEvent) -> Next:
        """PUSHING: D's leg is under way."""
        outcome = self._prefill.read(event)
        if outcome is None:
            return None
        assert self._decode.leg is not None
        consumer = self._decode.leg.engine
        match self._prefill.take(event.leg, outcome, is_pull=False):
            case LegFailure() | Unable() as why:
                self._engines.choose_other_producer(is_free=_is_free(why))
                self._engines.forgive(consumer)
                return AfterClosing.ATTEMPT
            case Prefilled():
                return AfterClosing.END if self._prefill.tell_kept_answer(consumer) else State.DECODING
            case found:
                return found

    def _after_prefill(self) -> Next:
        """Choose D again: what P has lent, or shown, may exclude the first choice.

        One that is to compute the prompt itself, because of what it has, stays.
        """
        prefill, producer, prefilled = self._prefill, self._prefill.producer, self._prefill.prefilled
        assert prefilled is not None
        consumer = self._engines.placed_consumer or self._engines.choose_consumer(
            has_begun=self._reply.has_begun, producer=producer if prefilled.ticket else None
        )
        if prefill.tell_kept_answer(consumer):
            return AfterClosing.END
        if consumer is None:  # D went down during the prefill.
            raise self._view.no_engine("decode", self._decode.failure)
        ticket = prefilled.ticket
        if ticket and producer and self._engines.why_no_pair(producer, consumer):
            assert prefill.leg is not None
            is_other = has_other_weights(consumer.kv_identity, prefill.leg.kv_identity)
            self._lending.take_back()
            prefill.leave_to_decode("other_weights" if is_other else "no_pair")
            ticket = None
        self._first.settle(consumer)
        self._decode.open(consumer, ticket, is_pushed=False)
        return State.DECODING


def _is_free(why: LegFailure | Unable) -> bool:
    """Whether another attempt costs no retry. An error or a timeout may mean that P has too much to do."""
    return why.kind != "timeout" if isinstance(why, LegFailure) else why.is_free
