"""Prefill of one request: P's legs, with a hedge or a stored loan, and what has been computed of the prompt.

begin     a leg to P, which computes the prompt
borrow    a leg to an engine that may lend what it has of the prompt; D computes the rest
on_late   P is late: another one computes the prompt as well, and the first answer counts
read      an event of a leg -> the outcome of the leg, once it is known
take      an outcome -> `prefilled`, a failure, or the end of the request
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from baton.core.errors import PeerError
from baton.core.identity import KVIdentity
from baton.router.fleet.choice import Loan
from baton.router.fleet.engine import Engine
from baton.router.fleet.view import FleetView
from baton.router.request.answers import (
    Complete,
    FirstTokenRead,
    Prefilled,
    PrefillOutcome,
    PrefillReader,
    Refused,
    Unable,
    prefilled,
)
from baton.router.request.engines import Engines
from baton.router.request.events import Close, Failed, Hold, HoldOver, Leg, Opened, Piece, StreamEnded
from baton.router.request.learning import note_outpaced
from baton.router.request.lending import Lending
from baton.router.request.open_legs import OpenLegs
from baton.router.request.reply import EVENT_STREAM, Reply
from baton.router.request.step import AfterClosing, LegAnswerEvent, Next, Outbox, State
from baton.router.request.tokens.first_tokens import FirstTokens, PrefillAsk
from baton.router.values.errors import LegFailure, RouterError
from baton.router.values.legs import PARAMS, LocalReason, stored_body

BORROW_S = 2.0  # A lender that computes answers after its step. More than that is not worth it.


def broken(leg: Leg, why: str) -> LegFailure:
    return LegFailure("broken", leg.engine.url, why, was_sent=True)


class Shared(NamedTuple):
    """What the parts of one machine share."""

    view: FleetView
    outbox: Outbox
    legs: OpenLegs
    engines: Engines
    first: FirstTokens
    reply: Reply
    lending: Lending


class Prefill:
    def __init__(self, shared: Shared) -> None:
        self._view, self._outbox, self._legs, self._engines, self._first, self._reply, self._lending = shared
        self._hedge: Leg | None = None  # A second prefill leg, as long as neither one has its outcome.
        self._was_hedged = False
        self._loan_leg: Leg | None = None  # The leg of `borrow`.
        self.leg: Leg | None = None  # The last one: its engine is the lender of what D is to load.
        self.transfer_id = ""
        self.prefilled: Prefilled | None = None
        self.failure: LegFailure | None = None  # The last one.

    @property
    def producer(self) -> Engine | None:
        return self.leg.engine if self.leg is not None else None

    @property
    def has_borrowed(self) -> bool:
        return self._loan_leg is not None

    @property
    def lent(self) -> Mapping[str, Any] | None:
        """What P has reported so far."""
        reader = self.leg.reader if self.leg is not None else None
        return reader.lent if reader is not None else None

    def lent_by(self, producer: Engine) -> KVIdentity | None:
        """The identity of the KV that an engine lends to this request. None: it lends none."""
        leg = self.leg
        if leg is None or leg.engine is not producer:
            return None
        return leg.kv_identity if self.prefilled is not None or leg in self._legs else None

    def settle(self, found: Prefilled) -> None:
        self.prefilled = found
        self._outbox.count("prefills", found.where, found.reason)

    def leave_to_decode(self, reason: LocalReason) -> None:
        self.settle(Prefilled("local", reason))

    def assume_computed(self) -> Prefilled:
        """D answers. In a push P is not waited for any more: it has computed the prompt, or D has."""
        if self.prefilled is None:
            self.settle(Prefilled("remote"))
        assert self.prefilled is not None
        return self.prefilled

    def forget(self) -> None:
        """The next attempt begins with a prefill."""
        self.prefilled = None

    # --- Legs

    def begin(self, producer: Engine) -> None:
        self.transfer_id = self._view.new_transfer_id()
        if self._engines.has_bad_producer:
            self._outbox.count("retries", "prefill")
        ask = self._first.prefill_ask(producer, self.transfer_id)
        body = ask.body
        if PARAMS in body:
            turn = self._lending.params_of_turn(producer.kv_identity)
            body = {**body, PARAMS: {**turn, **body[PARAMS]}}
        self._lending.begin_leg()
        self.leg = self._send(producer, ask, body)

    def _send(self, producer: Engine, ask: PrefillAsk, body: Mapping[str, Any]) -> Leg:
        reader = PrefillReader(
            reads_first_token=ask.reads_first_token,
            shows_token_ids=self._first.shows_token_ids,
            keeps_answer=ask.keeps_answer,
        )
        wait_s, num_tokens = self._view.settings.timeouts.prefill_s, self._engines.num_to_compute(producer)
        expected_s = self._view.fleet.choice.prefill_s(producer, num_tokens)
        leg = self._legs.open("prefill", producer, body, wait_s, num_tokens, reader)
        leg.expected_s = expected_s
        return leg

    def borrow(self, body: Mapping[str, Any], loan: Loan) -> None:
        """Ask an engine for what it has of the prompt. `body`: the client's."""
        reader = PrefillReader(reads_first_token=False, shows_token_ids=False, keeps_answer=False)
        self._lending.begin_leg()
        transfer_id = self._view.new_transfer_id() if loan.is_through_cache else None
        asked = stored_body(body, transfer_id, self._first.dialect)
        self.leg = self._loan_leg = self._legs.open("prefill", loan.lender, asked, BORROW_S, 0, reader)

    def wait_till_late(self) -> None:
        """Start the timer of `on_late`."""
        assert self.leg is not None
        expected_s = self.leg.expected_s
        if self._view.settings.hedge_prefill and expected_s is not None:
            self._outbox.emit(Hold(self._view.lateness.late_after_s(expected_s), self.transfer_id))

    def on_late(self, event: HoldOver) -> Next:
        """PREFILLING: P is late. Another one computes the prompt as well."""
        first, now_s = self.leg, self._outbox.now_s
        assert first is not None
        if event.transfer_id != self.transfer_id:
            return None  # The timer is an earlier attempt's.
        self._view.fleet.health.note_late(first.engine, now_s)
        if self._was_hedged or self._lending.has_turn:
            return None  # A turn is for one engine.
        engine = self._engines.choose_hedge(first)
        if engine is None:
            return None
        if not self._view.retries.take(now_s):
            self._outbox.count("retries_refused")
            return None
        self._was_hedged = True
        self._outbox.count("hedges")
        self._outbox.report("hedge", first.engine, f"a prompt is late; {engine.url} computes it as well")
        ask = self._first.prefill_ask(engine, self._view.new_transfer_id())
        self._hedge = self._send(engine, ask, ask.body)
        return None

    def _end_hedge(self, leg: Leg, *, is_failed: bool) -> bool:
        """One of two prefill legs has its outcome. If it failed, the other one is waited for, else closed.

        True: it is waited for.
        """
        first, hedge, self._hedge = self.leg, self._hedge, None
        if hedge is None:
            return False
        assert first is not None
        other = first if leg is hedge else hedge
        if not is_failed:
            self._outbox.emit(Close(other))
            if leg is hedge:
                self._outbox.count("hedges_won")
                note_outpaced(first, self._outbox.now_s)
                self._legs.note_computed(first)  # The slower engine's time is a sample all the same.
        self.leg = other if is_failed else leg
        return is_failed

    # --- Answers

    def read(self, event: LegAnswerEvent, *, is_over: bool = False) -> PrefillOutcome | LegFailure | None:
        """Return what P's answer means, once it is known. In every state: P may have lent something.

        `is_over`: legs are being closed, so no D will come for it.
        """
        leg = event.leg
        assert leg.reader is not None
        outcome: PrefillOutcome | LegFailure | None
        try:
            match event:
                case Opened(answer=answer):
                    self._legs.note_answer(leg, answer)
                    if self._engines.note_lacking(leg.engine, answer):
                        outcome = Unable("lacks the path", is_free=True)
                    else:
                        outcome = leg.reader.open(answer)
                case Piece(data=data):
                    outcome = leg.reader.feed(data)
                case StreamEnded():
                    outcome = leg.reader.finish()
                case Failed(failure=failure):
                    self._legs.note_failure(leg, failure)
                    outcome = failure
        except PeerError as error:
            outcome = broken(leg, str(error))
            leg.is_broken = True
            self._legs.note_failure(leg, outcome)
            self._outbox.emit(Close(leg))
        leg.has_told = leg.has_told or isinstance(outcome, Prefilled | Complete | Refused | Unable)
        params = None
        if isinstance(outcome, Prefilled | Complete):
            params = outcome.ticket
        elif isinstance(outcome, FirstTokenRead):
            params = outcome.first.params
        if params:
            leg.has_told = True
            is_wanted = leg in (self.leg, self._hedge)
            self._lending.take(leg, params, is_wanted=is_wanted, is_over=is_over)
        if outcome is not None and leg is not self._loan_leg:
            self._lending.settle_turn(outcome)
        return outcome

    def on_unawaited(self, event: LegAnswerEvent) -> Next:
        """No step waits for the leg: it may lend, and reports its cache hits."""
        self.read(event)
        return None

    def on_closing(self, event: LegAnswerEvent) -> Next:
        self.read(event, is_over=True)
        return None

    def take_loan(self, event: LegAnswerEvent) -> bool:
        """BORROWING. True: the lender has answered, or failed."""
        if isinstance(event, Failed) and event.failure.kind == "timeout":
            event.failure.is_noted = True  # BORROW_S is the router's patience; the engine may only be busy.
        outcome = self.read(event)
        if outcome is None:
            return False
        if isinstance(outcome, Prefilled) and outcome.ticket is not None:
            self._outbox.count("stored_loans", "lent")
            self.settle(outcome)
        else:
            self._outbox.count("stored_loans", "nothing" if isinstance(outcome, Prefilled) else "failed")
            self.leave_to_decode(self._engines.why_alone)
        return True

    def take(
        self, leg: Leg, outcome: PrefillOutcome | LegFailure, *, is_pull: bool
    ) -> Next | Prefilled | LegFailure | Unable:
        """Take the outcome of a leg that is waited for.

        Return what was prefilled, or why it was not; or what follows if that is settled.
        """
        is_failed = isinstance(outcome, LegFailure | Unable)
        is_awaited = self._end_hedge(leg, is_failed=is_failed)
        duration_s = self._outbox.now_s - leg.started_at_s
        self._outbox.count("prefill_seconds", value=duration_s)
        match outcome:
            case LegFailure() | Unable():
                if isinstance(outcome, LegFailure):
                    self._outbox.log("prefill leg: %s", outcome)
                    self.failure = outcome
                else:
                    self._outbox.log("prefill leg: %s %s", leg.engine.url, outcome.reason)
                self._engines.note_bad(leg.engine)
                return None if is_awaited else outcome
            case Refused(answer):
                if self._reply.has_begun:
                    raise RouterError.gateway("the prefill engine refused what another one had begun")
                consumer, is_alike = self._engines.consumer, self._first.dialect.refuses_alike
                if consumer is None or (is_alike and consumer.max_model_len == leg.engine.max_model_len):
                    self._reply.send_whole(answer, None)
                    return AfterClosing.END
                # The prompt may be too long for P alone. If it is wrong, D refuses it as well.
                self.leave_to_decode("prefill_failed")
                return self.prefilled
        if is_pull and leg.expected_s is not None:
            self._view.lateness.note(leg.expected_s, duration_s)
        if leg.was_alone:
            self._view.late_legs.note(leg.engine, self._engines.routed.num_tokens, duration_s)
        match outcome:
            case Complete(answer):
                self._reply.send_whole(answer, "remote")
                return AfterClosing.END
            case FirstTokenRead() if self._engines.has_other_weights(leg):
                # The client has the token of an earlier prefill, and P was updated since.
                self._lending.take_back()
                self.leave_to_decode("other_weights")
            case FirstTokenRead(head, first):
                if (first.is_last or leg.is_as_chosen) and self._reply.tell_first(head, first, "remote"):
                    self._engines.follow(leg)
                if first.is_last:
                    return self._relay_end(leg)
                self.settle(prefilled(first.params))
            case Prefilled(answer=kept) if kept is not None and self._first.needs_no_decode:
                self.settle(Prefilled("remote", answer=kept))
            case Prefilled():
                self.settle(outcome)
        return self.prefilled

    def on_ending(self, event: LegAnswerEvent) -> Next:
        if event.leg is not self.leg:
            return self.on_unawaited(event)
        if isinstance(self.read(event), LegFailure):
            raise RouterError.gateway("the prefill engine failed at the end of the answer")
        return self._relay_end(event.leg)

    def _relay_end(self, leg: Leg) -> Next:
        """P's first token is the last one: token counts and [DONE] follow."""
        assert leg.reader is not None
        if leg.reader.rest is None:
            return State.ENDING
        if not leg.reader.is_done:
            raise RouterError.gateway("the prefill engine ended the stream without [DONE]")
        self._reply.send(leg.reader.rest, is_last=True)
        return AfterClosing.END

    def tell_kept_answer(self, consumer: Engine | None) -> bool:
        """Send P's token out of its whole answer, if D can continue after it. True: it is all."""
        assert self.prefilled is not None
        giver = self.leg
        # A token that may be of other weights than D's is given by D again.
        is_fit = giver is None or giver.is_as_chosen
        told = self._first.take_kept_answer(self.prefilled.answer if is_fit else None, consumer)
        if told is None:
            return False
        if giver is not None:
            self._engines.follow(giver)
        self._reply.begin(EVENT_STREAM, "remote")
        self._reply.send(told.events, is_last=told.is_last)
        return told.is_last
