"""Decode of one request: D's leg, the comparison of its first token with P's, and its stream to the client.

A step returns what follows. When D fails or its stream breaks, that is another attempt, as long as an engine
can give the rest with the same answer. The prefill of the attempt before is kept, or forgotten.
"""

from collections.abc import Mapping
from typing import Any

from baton.core.errors import PeerError
from baton.router.fleet.engine import Engine
from baton.router.fleet.notes import Outcome
from baton.router.request.answers import (
    GIVEN_HEADER,
    DecodeAnswer,
    LegAnswer,
    blames_params,
    is_closed,
    is_engines_fault,
    is_handed_over,
)
from baton.router.request.events import Doubt, Draining, Failed, Leg, Opened, Piece, StreamEnded
from baton.router.request.learning import SAMPLE_CHUNKS, loaded, note_chunks
from baton.router.request.prefill import Prefill, Shared, broken
from baton.router.request.reply import EVENT_STREAM
from baton.router.request.step import AfterClosing, Next, State
from baton.router.request.tokens.stream import FirstToken
from baton.router.values import sse
from baton.router.values.errors import LegFailure, RouterError

INTRODUCTIONS_MAX = 2  # Times that D is offered one; the second one is fresh from P.


class Decode:
    def __init__(self, shared: Shared, prefill: Prefill) -> None:
        self._view, self._outbox, self._legs, self._engines, self._first, self._reply, self._lending = shared
        self._prefill = prefill
        self._num_refused_introductions = 0
        self._is_pushed = False  # The decode leg left with the prefill leg.
        self._answer: DecodeAnswer | None = None  # D's answer, once it has begun.
        self._head = EVENT_STREAM  # Status and headers of D's answer.
        self.leg: Leg | None = None
        self.failure: LegFailure | None = None  # The last one.

    @property
    def num_chunks(self) -> int:
        """Chunks of the last leg's stream."""
        return 0 if self.leg is None else self.leg.num_chunks_before + self.leg.num_chunks

    @property
    def is_done(self) -> bool:
        """Whether [DONE] has gone to the client."""
        return self._answer is not None and self._answer.is_done

    def open(self, engine: Engine, params: Mapping[str, Any] | None, *, is_pushed: bool) -> None:
        self._engines.note_asked(engine)
        self._is_pushed = is_pushed
        self._lending.begin_leg()
        timeouts, is_stream = self._view.settings.timeouts, self._first.is_stream
        wait_s = timeouts.first_byte_s if is_stream else timeouts.answer_s
        if is_pushed:
            wait_s += timeouts.prefill_s  # D waits for P as well.
        num_tokens = self._engines.num_to_compute(engine) if params is None else 0
        if params is not None and self._prefill.has_borrowed and self._engines.local_reason is not None:
            named = params.get("remote_num_tokens")
            num_lent = named if isinstance(named, int) else 0
            num_tokens = max(0, self._engines.routed.num_tokens - num_lent)
        body = self._first.decode_body(engine, params)
        # D's whole answer takes longer than its prompt.
        self.leg = self._legs.open("decode", engine, body, wait_s, num_tokens, shows_first=is_stream)

    def keep_turn(self) -> None:
        """The request ends."""
        if self._answer is not None and self.leg is not None:
            self._lending.keep_turn(self.leg, self._answer)

    def _again(self) -> Next:
        self._answer = None
        return AfterClosing.ATTEMPT

    def _prefill_again(self) -> Next:
        self._prefill.forget()
        return self._again()

    # --- Before D's first token

    def on_opened(self, event: Opened) -> Next:
        """D's answer has begun: DECODING, PUSHING."""
        leg, answer = event.leg, event.answer
        self._legs.note_answer(leg, answer)
        prefilled = self._prefill.assume_computed()
        if self._engines.note_lacking(leg.engine, answer):
            self._engines.forgive(leg.engine)
            if self._may_ask_another(is_free=True):
                return self._prefill_again()
        is_params_fault = blames_params(answer)
        if is_params_fault and (self._is_pushed or prefilled.ticket is not None):
            return self._take_refusal(leg.engine, answer)
        # D may blame what the router adds without a ticket.
        is_free = is_params_fault or is_closed(answer)
        if (is_engines_fault(answer) or is_params_fault) and self._may_ask_another(is_free=is_free):
            self._outbox.log("%s answered with %d", leg.engine.url, answer.status)
            return self._prefill_again()
        if is_params_fault and not self._reply.has_begun:
            raise RouterError.gateway("the decode engine refused what the router adds to the request")
        if answer.status == 200:
            self._note_loaded(leg.engine, answer)
        if not answer.is_stream:
            if self._reply.has_begun:
                raise RouterError.gateway(
                    f"the decode engine refused to continue after the first token ({answer.status})"
                )
            self._answer = DecodeAnswer(self._first, leg.engine)
            body = self._answer.whole(answer.body, self._lent_in_push)
            self._reply.send_whole(answer, prefilled.where, body=body)
            return AfterClosing.END
        num_given = self._first.num_given if leg.engine.kind == "baton" else 0
        if num_given and answer.headers.get(GIVEN_HEADER) != str(num_given):
            return self._fail(leg, "it does not continue answers; it is of an older version")
        if self._engines.has_other_weights(leg):
            # An update that this router did not know of is no fault. The client has tokens of other weights.
            self._outbox.log("%s has other weights than the engine that began the answer", leg.engine.url)
            return self._prefill_again()
        self._answer, self._head = DecodeAnswer(self._first, leg.engine), answer
        return self._compare(leg, answer.body) or State.COMPARING

    def _take_refusal(self, engine: Engine, answer: LegAnswer) -> Next:
        what = "introduction" if self._is_pushed else "ticket"
        self._outbox.log("%s refused the %s: %r", engine.url, what, answer.body)
        self._note_handoff(engine, "refused")
        self._lending.take_back()
        self._engines.forgive(engine)
        if not self._is_pushed:
            self._prefill.leave_to_decode("ticket_refused")  # Once: no ticket is left to refuse.
            return self._again()
        self._num_refused_introductions += 1
        if self._num_refused_introductions >= INTRODUCTIONS_MAX:
            self._prefill.leave_to_decode("introduction_refused")
            return self._again()
        producer = self._prefill.producer
        assert producer is not None
        producer.is_introduced = False
        self._prefill.forget()
        return AfterClosing.MEET_AGAIN  # D, too, may have other weights than it had.

    def on_failed(self, event: Failed) -> Next:
        """D fails before its answer begins (DECODING, PUSHING) or its first token is read (COMPARING)."""
        failure = event.failure
        self._legs.note_failure(event.leg, failure)
        self._prefill.assume_computed()
        self._outbox.log("decode leg: %s", failure)
        self.failure = failure
        if failure.kind == "too_large":
            raise self._view.no_engine("decode", failure)  # Another engine would fail in the same way.
        if failure.kind == "timeout" and not self._may_ask_another(is_free=False):
            raise self._view.no_engine("decode", failure)
        if self._is_pushed:
            self._lending.take_back()
        if self._is_pushed or failure.was_sent:
            return self._prefill_again()  # The ticket may be in use; a new dispatch gets a new one.
        return self._again()

    def _fail(self, leg: Leg, why: str) -> Next:
        return self.on_failed(Failed(leg, broken(leg, why)))

    def _may_ask_another(self, *, is_free: bool) -> bool:
        return self._engines.may_ask_another(has_begun=self._reply.has_begun, is_free=is_free)

    def on_compared_piece(self, event: Piece) -> Next:
        return self._compare(event.leg, event.data)

    def on_compared_end(self, event: StreamEnded) -> Next:
        return self._fail(event.leg, "the stream ended without a first token")

    def _compare(self, leg: Leg, data: bytes) -> Next:
        """COMPARING: find the first token in D's stream, unless the client gets all of the stream."""
        prefilled = self._prefill.prefilled
        assert self._answer is not None
        assert prefilled is not None
        try:
            if not self._answer.compare(data):
                return None
        except PeerError as error:
            return self._fail(leg, str(error))
        match self._answer.found:
            case FirstToken() as first:
                if self._reply.tell_first(self._head, first, prefilled.where):
                    self._engines.follow(leg)
            case False:
                self._reply.count_first("no")
                self._prefill.leave_to_decode("engines_disagree")
                # D computes as it should, and can continue after P's token.
                self._engines.forgive(leg.engine)
                return self._again()
            case True:
                self._reply.count_first("yes")
                self._reply.send(self._answer.left_over)
            case None if self._first.is_resumed:
                pass
            case None if self._first.continues_after_told:
                self._reply.count_first("unasked")
            case None:
                self._reply.begin(self._head, prefilled.where)
        return self._relay(leg) or State.RELAYING

    # --- D's stream

    def on_relayed(self, event: Piece | StreamEnded | Failed) -> Next:
        """RELAYING: whole events go to the client as they come."""
        assert self._answer is not None
        leg = event.leg
        match event:
            case Piece(data=data):
                leg.num_chunks += data.count(b"\n\n")
                if leg.num_chunks >= SAMPLE_CHUNKS:
                    note_chunks(leg, self._outbox.now_s)
                self._answer.push(data)
                return self._relay(leg)
            case StreamEnded():
                self._answer.finish()
                if (found := self._relay(leg)) is not None:
                    return found
                if self._answer.is_done:
                    return self._end_answer()
                leg.outcome = "broken"
                return self._resume_or_break(
                    f"the decode engine ended the stream without {self._first.dialect.end}", leg
                )
            case Failed(failure=failure):
                self._legs.note_failure(leg, failure)
                if self._answer.is_done:
                    leg.outcome = "200"
                    return self._end_answer()  # All that matters had arrived.
                self._outbox.log("decode leg, in the stream: %s", failure)
                message = f"the decode engine failed in the middle of the answer ({failure.kind})"
                return self._resume_or_break(message, leg)

    def _relay(self, leg: Leg) -> Next:
        assert self._answer is not None
        try:
            ready = self._answer.ready(self._lent_in_push)
        except PeerError as error:
            self._outbox.log("decode leg, in the stream: %s", error)
            leg.outcome = "broken"
            message = f"the decode engine failed in the middle of the answer ({error})"
            return self._resume_or_break(message, leg)
        self._reply.send(ready)
        event = self._answer.take_error()
        if event is None:
            return None
        leg.outcome = "broken"
        if (found := self._resume(leg, "the decode engine reports an error")) is not None:
            return found
        self._reply.send(event)
        return self._relay(leg)

    def on_draining(self, event: Draining) -> Next:
        return self._resume(event.leg, "it drains", is_planned=True)

    def _resume_or_break(self, message: str, leg: Leg) -> Next:
        if self._first.is_finished and not self._first.wants_usage:
            self._reply.send(sse.DONE_EVENT)  # Nothing else is missing.
            return self._end_answer()
        return self._resume(leg, message) or self._break_off(message, leg.engine)

    def _resume(self, leg: Leg, why: str, *, is_planned: bool = False) -> Next:
        """Another engine gives the rest of D's stream. None: none can give the same answer."""
        given = self._first.given()
        if given is None or not self._engines.can_be_followed(leg, given, is_planned=is_planned):
            return None
        self._first.resume_after(given)
        self._engines.resume_after(leg, is_planned=is_planned)
        self._outbox.count("resumed_streams", "planned" if is_planned else "broken")
        self._outbox.report("resume", leg.engine, why)
        return self._prefill_again()

    def _end_answer(self) -> Next:
        self._reply.send(b"", is_last=True)
        return AfterClosing.END

    def _break_off(self, message: str, engine: Engine) -> Next:
        self._reply.break_off(message, engine)
        return AfterClosing.END

    # --- What P has lent

    @property
    def _lent_in_push(self) -> Mapping[str, Any] | None:
        """What P has reported so far, whose cache hits D does not know."""
        return self._prefill.lent if self._is_pushed else None

    def _note_loaded(self, engine: Engine, answer: LegAnswer) -> None:
        """D has begun to answer: it has loaded what P lent, or will never do so."""
        prefilled, lent = self._prefill.prefilled, self._prefill.leg
        if prefilled is None or prefilled.where == "local" or lent is None:
            return
        handed_over = is_handed_over(answer)
        if handed_over is False:
            is_late = self._is_pushed and lent in self._legs and not lent.has_told
            self._note_handoff(engine, "late" if is_late else "computed")
            self._lending.take_back()
            return
        if handed_over:
            assert self.leg is not None
            sample = (0, 0.0) if self._is_pushed else loaded(self.leg, answer, self._outbox.now_s)
            self._note_handoff(engine, "handed_over", *sample)
        self._lending.note_used(lent)

    def _note_handoff(
        self, engine: Engine, outcome: Outcome, num_loaded: int = 0, took_s: float = 0.0
    ) -> None:
        lent, used = self._prefill.leg, self.leg
        if lent is None or used is None:
            return
        if outcome != "handed_over" and None not in (lent.kv_identity, used.kv_identity):
            self._outbox.emit(Doubt(lent, used, outcome))
            return
        self._outbox.count("handoffs", lent.engine.url, engine.url, outcome)
        self._view.note_handoff(lent.engine, engine, outcome, self._outbox.now_s, num_loaded, took_s)
