"""One completion on its way through the router: a state machine without I/O.

    pull    client --> prefill leg on P --ticket--> decode leg on D --> client
    push    client --> prefill leg on P and decode leg on D, at once, under one transfer id --> client

    P unreachable, broken, late, 5xx: once more on another P, else D prefills by itself (or the request fails)
    P much later than predicted:      in pull another P computes the prompt as well; the first answer counts
    P answers 4xx:                    the client's error, passed on as it is
    D never received the request:     the same ticket on another D
    D refuses the ticket:             once more without it; it is no fault of the client
    D refuses the introduction:       once more with a fresh one, then without
    D's weights are not P's:          D computes the prompt. It is no fault: an update is under way
    D failed before its first byte:   both legs again, with a new transfer id
    D failed in a stream, or drains:  another D gives the rest, if that is the same answer; else an error
                                      event and [DONE]. Tokens of two versions are never one answer

In a push a leg that fails takes the other one with it, and D's leg may be held back (`late_leg`): if P has
answered meanwhile, the rest goes as in pull. The client gets nothing before D's first byte except the first
token, which P may give (`modes`). After that only an engine that can continue the answer is asked, and only
for the rest (`first_tokens`). If P's first token ends the answer, P's answer is the answer.

`TABLE` has the transitions, and the states that may follow each. An event of a leg that has been closed
changes nothing.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, NamedTuple, get_args

from baton.core.errors import PeerError
from baton.core.identity import KVIdentity
from baton.router import sse
from baton.router.admission import NO_OBJECTIVE, Objective, Ticket
from baton.router.answers import (
    GIVEN_HEADER,
    WEIGHTS_HEADER,
    Complete,
    DecodeAnswer,
    FirstTokenRead,
    LegAnswer,
    Prefilled,
    PrefillOutcome,
    PrefillReader,
    Refused,
    Unable,
    blames_params,
    end_to_end,
    is_closed,
    is_engines_fault,
    is_handed_over,
    outcome_of,
    prefilled,
    retry_after_s,
)
from baton.router.errors import LegFailure, RouterError, error_event
from baton.router.event_log import Kind as EventKind
from baton.router.events import (
    Admitted,
    ClientGone,
    Close,
    Closed,
    Count,
    Doubt,
    Draining,
    Effect,
    Event,
    Failed,
    Found,
    Head,
    Hold,
    HoldOver,
    Leg,
    Meet,
    Met,
    Opened,
    Over,
    Piece,
    Queue,
    Rejected,
    Send,
    Stopped,
    StreamEnded,
)
from baton.router.first_token import FirstToken
from baton.router.first_tokens import FirstTokens, PrefillAsk
from baton.router.fleet.engine import Engine
from baton.router.fleet_view import FleetView
from baton.router.identity import has_other_weights
from baton.router.learning import (
    SAMPLE_CHUNKS,
    loaded,
    note_answer,
    note_chunks,
    note_closed,
    note_outpaced,
    note_start,
)
from baton.router.legs import PARAMS, push_params, shape_of, stored_body
from baton.router.lookups import look_for
from baton.router.notes import Outcome
from baton.router.request.engines import Engines
from baton.router.request.lending import Lending
from baton.router.settings import Role

logger = logging.getLogger(__name__)

BORROW_S = 2.0  # A lender that computes answers after its step. More than that is not worth it.
INTRODUCTIONS_MAX = 2  # Times that D is offered one; the second one is fresh from P.
CLIENT_CLOSED_REQUEST = 499  # nginx's; for the metrics only, the client does not receive it.
SHUTTING_DOWN = "the router is shutting down"
EVENT_STREAM = LegAnswer(200, {"content-type": "text/event-stream; charset=utf-8"}, b"", is_stream=True)


@dataclass(frozen=True, slots=True)
class Request:
    """A client's completion. `session`: of its X-Session-Id (`turns.session_of`)."""

    id: str
    body: Mapping[str, Any]
    is_chat: bool
    session: str | None
    received_at_s: float
    objective: Objective = NO_OBJECTIVE


class State(Enum):
    QUEUED = "the engines have enough to do"
    LOOKING = "the engines that have the prompt are looked up"
    MEETING = "an engine is asked what it is"
    PREFILLING = "P computes the prompt"
    BORROWING = "an engine is asked to lend what it has of the prompt"
    HELD = "push: P computes the prompt, and D's leg is held back"
    PUSHING = "push: both legs are under way"
    DECODING = "D's answer has not begun"
    COMPARING = "D's stream has begun, and its first token is compared with P's"
    RELAYING = "D's stream goes to the client"
    ENDING = "the end of P's stream goes to the client: its first token ends the answer"
    CLOSING = "legs are being closed"
    OVER = "nothing is left to do"

    __hash__ = object.__hash__  # Each event looks one up; Enum's own is written in Python.


class Machine:
    """`begin`, then `on` for each event; both return effects. `Over` is the last one."""

    def __init__(self, view: FleetView, request: Request) -> None:
        self._view, self._settings, self._request = view, view.settings, request
        self._state = State.OVER
        self._now_s = 0.0
        self._effects: list[Effect] = []
        self.request_id = request.id
        self._then: Callable[[], None] = self._attempt  # The step after MEETING or CLOSING.
        self._shape = shape = shape_of(request.body)
        model, priority = request.body.get("model"), request.objective.priority
        routed = view.route(shape.prefix_key, model, shape.num_prompt_tokens, priority)
        local_reason = shape.direct_reason
        if local_reason is None and shape.num_prompt_tokens < self._settings.min_prefill_tokens:
            local_reason = "short_prompt"
        self._first = FirstTokens(
            request.body,
            is_chat=request.is_chat,
            is_text=shape.is_text,
            may_split=self._settings.first_token and local_reason is None,
            may_resume=self._settings.resumes > 0 and shape.direct_reason is None,
        )
        self._engines = Engines(view, self._first, routed, local_reason, self._lent_by)
        self._ticket: Ticket | None = None  # The place in the queue or the engines, until the request ends.
        self._num_refused_introductions = 0
        self._prefilled: Prefilled | None = None
        self._failures: dict[Role, LegFailure] = {}  # The last one of each role.
        self._prefill: Leg | None = None  # The last one of either role.
        self._hedge: Leg | None = None  # A second prefill leg, as long as neither one has its outcome.
        self._was_hedged = False
        self._has_borrowed = False
        self._decode: Leg | None = None
        self._open_legs: list[Leg] = []
        self._transfer_id = ""
        self._push_params: Mapping[str, Any] = {}  # Params of a decode leg that leaves with the prefill leg.
        self._is_pushed = False  # The decode leg left with the prefill leg.
        self._lending = Lending(view.turns, request.session, self._emit)
        self._producer: Engine | None = None  # The lender of what the running decode leg is to load.
        self._is_first_counted = False
        self._answer: DecodeAnswer | None = None  # D's stream, once it has begun ...
        self._head = EVENT_STREAM  # ... with this status and these headers.
        self._status: int | None = None  # Status of the client's answer, once it has begun.
        self._error: RouterError | None = None  # The answer of a client that has been sent nothing.

    @property
    def num_output_tokens(self) -> int | None:
        """Tokens that the client has of a stream. None: it has none of a stream."""
        if self._status != 200 or not self._first.is_stream:
            return None
        known, leg = self._first.num_known, self._decode
        if known is not None or leg is None:
            return known
        return leg.num_chunks_before + leg.num_chunks  # One chunk, one token: the engine names none.

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def begin(self, now_s: float) -> Sequence[Effect]:
        self._view.retries.note_request(now_s)
        return self._run(now_s, Machine._ask_admission)

    def _ask_admission(self) -> None:
        admission, objective = self._view.admission, self._request.objective
        if admission is None:
            return self._look()
        ticket = Ticket(
            self._view.fleet.models.pool_of(self._engines.routed),
            objective.priority,
            objective.tenant,
            self._request.received_at_s,
            self._request.received_at_s + objective.ttft_s,
            self._engines.routed.num_tokens,
            min(objective.max_output, self._engines.routed.num_output_tokens),
        )
        try:
            displaced = admission.ask(ticket, self._now_s)
        except RouterError:
            self._count("admissions", "refused")
            raise
        self._ticket = ticket
        if displaced is None:
            self._count("admissions", "at_once")
            return self._look()
        self._state = State.QUEUED
        self._effects.append(Queue(ticket, displaced))
        return None

    def _on_admitted(self, event: Admitted) -> None:
        self._count("admissions", "after_waiting")
        self._count("queue_seconds", value=self._now_s - self._request.received_at_s)
        self._look()

    def _on_rejected(self, event: Rejected) -> None:
        self._count("admissions", "given_up")
        raise event.error

    def _leave_queue(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None and self._view.admission is not None:
            leg = self._decode
            num_output = (leg.num_chunks_before + leg.num_chunks if leg is not None else 0) or None
            self._view.admission.leave(ticket, self._now_s, num_output)

    def _look(self) -> None:
        body, is_chat, look = self._request.body, self._request.is_chat, None
        if self._engines.local_reason is None:
            look = look_for(self._view, body, self._shape, self._engines.routed, self._now_s, is_chat=is_chat)
        if look is None:
            return self._attempt()
        self._state = State.LOOKING
        self._effects.append(look)
        return None

    def _on_found(self, event: Found) -> None:
        routed = self._engines.routed
        num_tokens = event.num_tokens or routed.num_tokens
        self._engines.routed = replace(routed, num_tokens=num_tokens, cached=event.cached, home=event.home)
        self._attempt()

    def on(self, event: Event, now_s: float) -> Sequence[Effect]:
        role = None
        if isinstance(event, LEG_EVENTS):
            role = event.leg.role
            if event.leg.is_broken and not isinstance(event, Closed):
                return ()
        transition = TABLE.get((self._state, type(event), role))
        if transition is None:
            self._report_unexpected(event)
            return ()
        return self._run(now_s, transition.step, event)

    def _run(self, now_s: float, step: Callable[..., None], *event: Event) -> Sequence[Effect]:
        self._now_s = now_s
        try:
            step(self, *event)
        except RouterError as error:
            self._refuse(error)
        effects, self._effects = self._effects, []
        return effects

    def _ignore(self, event: Event) -> None:
        """The event comes too late."""

    def _report_unexpected(self, event: Event) -> None:
        """No row of TABLE: a fault of ours, which costs this request nothing. The tests fail by it."""
        logger.error("%s: unexpected %s in %s", self._request.id, type(event).__name__, self._state.name)

    # --- An attempt: engines, then legs --------------------------------------------------------------

    def _attempt(self) -> None:
        # D is chosen before the prefill: without a decode engine there is nothing to prefill for.
        is_open = self._prefilled is None and self._status is None
        consumer = self._engines.place(self._now_s, is_open=is_open) or self._choose_consumer()
        self._engines.consumer = consumer
        if consumer is None:
            raise self._view.no_engine("decode", self._failures.get("decode"))
        if consumer.role == "prefill":
            self._engines.local_reason = "no_decode_engine"
        self._meet(consumer, self._find_producer)

    def _meet(self, engine: Engine, then: Callable[[], None], *, is_again: bool = False) -> None:
        if engine.is_up and (is_again or not engine.was_asked):
            self._state, self._then = State.MEETING, then
            self._effects.append(Meet(engine))
        else:
            then()

    def _on_met(self, event: Event) -> None:
        self._then()

    def _find_producer(self) -> None:
        assert self._engines.consumer is not None
        if self._prefilled is not None or self._engines.local_reason is not None:
            return self._choose_way(None)
        producer = self._choose_producer()
        if producer is None or producer.was_asked:
            return self._choose_way(producer)
        return self._meet(producer, self._find_producer)  # P may turn out not to fit.

    def _choose_way(self, producer: Engine | None) -> None:
        """Pull or push, now that both engines are known."""
        consumer = self._engines.consumer
        assert consumer is not None
        if not self._view.fleet.models.may_take(consumer, self._engines.routed):
            return self._attempt()  # What it says of itself excludes it.
        if producer is None or self._settings.mode == "pull" or self._first.is_told:
            self._first.choose(producer, consumer, is_push=False)
            return self._pull()
        return self._meet(
            producer, lambda: self._push_or_pull(producer, consumer), is_again=not producer.is_introduced
        )

    def _push_or_pull(self, producer: Engine, consumer: Engine) -> None:
        if self._why_no_pair(producer, consumer) is not None:
            return self._attempt()  # P has introduced itself again.
        self._first.choose(producer, consumer, is_push=True)
        card = producer.introduction
        if card is None or card.introduction is None or self._first.needs_no_decode:
            self._first.choose(producer, consumer, is_push=False)
            return self._pull()
        hold_s = self._view.late_legs.hold_s(producer, consumer, self._engines.routed.num_tokens)
        self._transfer_id = self._view.new_transfer_id()
        self._push_params = push_params(
            self._transfer_id,
            engine_id=card.engine_id,
            introduction=card.introduction,
            continues=self._first.takes_prefills_token,
        )
        self._open_prefill(producer)
        if hold_s == 0.0:
            return self._push("at_once")
        self._state = State.HELD
        if hold_s is not None:
            self._effects.append(Hold(hold_s, self._transfer_id))
        return None

    def _on_hold_over(self, event: HoldOver) -> None:
        if event.transfer_id != self._transfer_id:
            return  # The timer is an earlier attempt's.
        producer, consumer = self._producer, self._engines.consumer
        if producer is None or consumer is None or self._why_no_pair(producer, consumer) is None:
            self._push("late")  # Else an update has parted them; D begins after P, as in pull.

    def _push(self, when: Literal["at_once", "late"]) -> None:
        assert self._engines.consumer is not None
        self._count("pushes", when)
        self._open_decode(self._engines.consumer, self._push_params, is_pushed=True)
        self._state = State.PUSHING

    # --- Prefill -------------------------------------------------------------------------------------

    def _pull(self) -> None:
        if self._prefilled is not None:
            return self._after_prefill()
        if self._engines.local_reason is not None:
            return self._borrow_or_compute()
        return self._next_producer()

    def _borrow_or_compute(self) -> None:
        """D computes the prompt, after what another engine lends of it. That is asked for once."""
        assert self._engines.local_reason is not None
        loan = None if self._has_borrowed else self._engines.find_loan(self._now_s)
        if loan is None:
            self._set_prefilled(Prefilled("local", self._engines.why_alone))
            return self._after_prefill()
        self._has_borrowed = True
        reader = PrefillReader(reads_first_token=False, shows_token_ids=False, keeps_answer=False)
        self._producer = loan.lender
        self._lending.begin_leg()
        body = stored_body(
            self._request.body, self._view.new_transfer_id() if loan.is_through_cache else None
        )
        self._prefill = self._open("prefill", loan.lender, body, BORROW_S, 0, reader)
        self._state = State.BORROWING
        return None

    def _on_loan(self, event: Opened | Piece | StreamEnded | Failed) -> None:
        """BORROWING: whatever the engine answers, D goes on."""
        assert self._engines.local_reason is not None
        if isinstance(event, Failed) and event.failure.kind == "timeout":
            event.failure.is_noted = True  # BORROW_S is the router's patience; the engine may only be busy.
        outcome = self._read_prefill(event)
        if outcome is None:
            return
        is_lent = isinstance(outcome, Prefilled) and outcome.ticket is not None
        self._count(
            "stored_loans", "lent" if is_lent else "nothing" if isinstance(outcome, Prefilled) else "failed"
        )
        if isinstance(outcome, Prefilled) and is_lent:
            self._set_prefilled(outcome)
        else:
            self._set_prefilled(Prefilled("local", self._engines.why_alone))
        self._after_prefill()

    def _next_producer(self) -> None:
        producer = self._choose_producer()
        if producer is not None and not producer.was_asked:
            return self._meet(producer, self._next_producer)
        if producer is not None:
            self._transfer_id = self._view.new_transfer_id()
            self._open_prefill(producer)
            self._state = State.PREFILLING
            return self._wait_till_late()
        assert self._engines.consumer is not None
        reason = self._engines.why_none_fits(self._engines.consumer, self._now_s)
        if self._settings.on_prefill_failure == "fail" and reason != "other_weights":
            failure = self._failures.get("prefill")
            raise self._view.no_engine("prefill", failure, is_tried=bool(self._engines.bad_producers))
        self._set_prefilled(Prefilled("local", reason))
        return self._after_prefill()

    def _wait_till_late(self) -> None:
        """Start the timer of `_on_late`."""
        assert self._prefill is not None
        expected_s = self._prefill.expected_s
        if self._settings.hedge_prefill and expected_s is not None:
            self._effects.append(Hold(self._view.lateness.late_after_s(expected_s), self._transfer_id))

    def _on_late(self, event: HoldOver) -> None:
        """PREFILLING: P is late. Another one computes the prompt as well."""
        first = self._prefill
        assert first is not None
        if event.transfer_id != self._transfer_id:
            return  # The timer is an earlier attempt's.
        self._view.fleet.health.note_late(first.engine, self._now_s)
        if self._was_hedged or self._lending.has_turn:
            return  # A turn is for one engine.
        engine = self._engines.choose_hedge(first, self._now_s)
        if engine is None:
            return
        if not self._view.retries.take(self._now_s):
            return self._count("retries_refused")
        self._was_hedged = True
        self._count("hedges")
        self._report("hedge", first.engine, f"a prompt is late; {engine.url} computes it as well")
        ask = self._first.prefill_ask(engine, self._view.new_transfer_id())
        self._hedge = self._send_prefill(engine, ask, ask.body)

    def _end_hedge(self, leg: Leg, *, is_failed: bool) -> None:
        """One of two prefill legs has its outcome. If it failed, the other one is waited for, else closed."""
        first, hedge, self._hedge = self._prefill, self._hedge, None
        assert first is not None
        assert hedge is not None
        other = first if leg is hedge else hedge
        if not is_failed:
            self._effects.append(Close(other))
            if leg is hedge:
                self._count("hedges_won")
                note_outpaced(first, self._now_s)
                self._note_computed(first)  # The slower engine's time is a sample all the same.
        self._prefill = other if is_failed else leg
        self._producer = self._prefill.engine

    def _on_prefill(self, event: Opened | Piece | StreamEnded | Failed) -> None:
        """P's leg, while the request waits for it: PREFILLING, HELD, PUSHING."""
        outcome = self._read_prefill(event)
        if outcome is None:
            return None
        if self._state is State.HELD:
            self._count("pushes", "after")
        is_failed, is_hedged = isinstance(outcome, LegFailure | Unable), self._hedge is not None
        if is_hedged:
            self._end_hedge(event.leg, is_failed=is_failed)
        is_over = self._take_prefill(event.leg, outcome)
        if is_over or (is_hedged and is_failed):
            return None
        if isinstance(outcome, LegFailure | Unable):
            self._pay_for_retry(outcome)
        if self._state is State.PREFILLING:
            return self._next_producer() if self._prefilled is None else self._after_prefill()
        if self._prefilled is None:
            if self._state is State.PUSHING:
                assert self._decode is not None
                self._engines.tried.remove(self._decode.engine)  # D was not at fault.
            return self._again()
        if self._state is State.HELD:
            assert self._engines.consumer is not None
            self._first.choose(event.leg.engine, self._engines.consumer, is_push=False)
            return self._after_prefill()
        self._state = State.DECODING
        assert self._decode is not None
        if self._tell_kept_answer(self._decode.engine):
            return self._finish()
        return None

    def _read_prefill(
        self, event: Opened | Piece | StreamEnded | Failed
    ) -> PrefillOutcome | LegFailure | None:
        """Return what P's answer means, once it is known. In every state: P may have lent something."""
        leg = event.leg
        assert leg.reader is not None
        outcome: PrefillOutcome | LegFailure | None
        try:
            match event:
                case Opened(answer=answer):
                    self._note_answer(leg, answer)
                    outcome = leg.reader.open(answer)
                case Piece(data=data):
                    outcome = leg.reader.feed(data)
                case StreamEnded():
                    outcome = leg.reader.finish()
                case Failed(failure=failure):
                    self._note_failure(leg, failure)
                    outcome = failure
        except PeerError as error:
            outcome = _broken(leg, str(error))
            leg.outcome, leg.is_broken = outcome.kind, True
            self._note_failure(leg, outcome)
            self._effects.append(Close(leg))
        leg.has_told = leg.has_told or isinstance(outcome, Prefilled | Complete | Refused | Unable)
        if isinstance(outcome, Prefilled | Complete) and outcome.ticket:
            self._take_loan(leg, outcome.ticket)
        elif isinstance(outcome, FirstTokenRead) and outcome.first.params:
            leg.has_told = True
            self._take_loan(leg, outcome.first.params)
        if outcome is not None and self._state is not State.BORROWING:
            self._lending.settle_turn(outcome)
        return outcome

    def _on_late_prefill(self, event: Opened | Piece | StreamEnded | Failed) -> None:
        """P's leg, while nothing waits for it: it may lend, and reports its cache hits."""
        self._read_prefill(event)

    def _take_prefill(self, leg: Leg, outcome: PrefillOutcome | LegFailure) -> bool:
        """Set what was prefilled, or note why it was not. True: all that is left is the end of the answer."""
        duration_s = self._now_s - leg.started_at_s
        self._effects.append(Count("prefill_seconds", value=duration_s))
        match outcome:
            case LegFailure():
                self._log("prefill leg: %s", outcome)
                self._failures["prefill"] = outcome
                self._engines.bad_producers.append(leg.engine)
                return False
            case Unable(reason):
                self._log("prefill leg: %s %s", leg.engine.url, reason)
                self._engines.bad_producers.append(leg.engine)
                return False
            case Refused(answer):
                if self._status is not None:
                    raise RouterError.gateway("the prefill engine refused what another one had begun")
                if (
                    self._engines.consumer is not None
                    and self._engines.consumer.max_model_len != leg.engine.max_model_len
                ):
                    # The prompt may be too long for P alone. If it is wrong, D refuses it as well.
                    self._set_prefilled(Prefilled("local", "prefill_failed"))
                    return False
                self._send_whole(answer, {})
                self._finish()
                return True
        if self._state is State.PREFILLING and leg.expected_s is not None:
            self._view.lateness.note(leg.expected_s, duration_s)
        if leg.was_alone:
            self._view.late_legs.note(leg.engine, self._engines.routed.num_tokens, duration_s)
        match outcome:
            case Complete(answer):
                self._send_whole(answer, {"x-baton-prefill": "remote"})
                self._finish()
                return True
            case FirstTokenRead() if self._engines.has_other_weights(leg):
                # The client has the token of an earlier prefill, and P was updated since.
                self._lending.take_back()
                self._set_prefilled(Prefilled("local", "other_weights"))
            case FirstTokenRead(head, first):
                if first.is_last or leg.is_as_chosen:
                    self._tell_first(head, first, "remote", leg)
                if first.is_last:
                    self._end_with(leg)
                    return True
                self._set_prefilled(prefilled(first.params))
            case Prefilled(answer=kept) if kept is not None and self._first.needs_no_decode:
                self._set_prefilled(Prefilled("remote", answer=kept))
            case Prefilled():
                self._set_prefilled(outcome)
        return False

    def _pay_for_retry(self, outcome: LegFailure | Unable) -> None:
        """An error or a timeout of P may mean that it has too much to do. Without a budget D prefills."""
        is_free = outcome.kind != "timeout" if isinstance(outcome, LegFailure) else outcome.is_free
        if is_free or self._choose_producer() is None or self._view.retries.take(self._now_s):
            return
        self._count("retries_refused")
        self._engines.may_retry_prefill = False

    def _end_with(self, leg: Leg) -> None:
        """P's first token is the last one: token counts and [DONE] follow."""
        self._state = State.ENDING
        self._relay_end(leg)

    def _on_ending(self, event: Piece | StreamEnded | Failed) -> None:
        if event.leg is not self._prefill:
            return self._on_late_prefill(event)
        outcome = self._read_prefill(event)
        if isinstance(outcome, LegFailure):
            raise RouterError.gateway("the prefill engine failed at the end of the answer")
        return self._relay_end(event.leg)

    def _relay_end(self, leg: Leg) -> None:
        assert leg.reader is not None
        if (rest := leg.reader.rest) is not None:
            if not leg.reader.is_done:
                raise RouterError.gateway("the prefill engine ended the stream without [DONE]")
            self._send(rest, is_last=True)
            self._finish()

    # --- Decode --------------------------------------------------------------------------------------

    def _after_prefill(self) -> None:
        """Choose D again: what P has lent, or shown, may exclude the first choice.

        One that is to compute the prompt itself, because of what it has, stays.
        """
        assert self._prefilled is not None
        engine = self._engines.placed_consumer or self._choose_consumer(
            self._producer if self._prefilled.ticket else None
        )
        if self._tell_kept_answer(engine):
            return self._finish()
        if engine is None:  # D went down during the prefill.
            raise self._view.no_engine("decode", self._failures.get("decode"))
        if self._prefilled.ticket and self._producer and self._why_no_pair(self._producer, engine):
            assert self._prefill is not None
            is_other = has_other_weights(engine.kv_identity, self._prefill.kv_identity)
            self._lending.take_back()
            self._set_prefilled(Prefilled("local", "other_weights" if is_other else "no_pair"))
        self._first.settle(engine)
        self._open_decode(engine, self._prefilled.ticket, is_pushed=False)
        self._state = State.DECODING
        return None

    def _on_decode_opened(self, event: Opened) -> None:
        """D's answer has begun: DECODING, PUSHING."""
        leg, answer = event.leg, event.answer
        self._note_answer(leg, answer)
        assert self._decode is not None
        if self._state is State.PUSHING:
            self._set_prefilled(Prefilled("remote"))  # Or D has computed it. P is not waited for.
        assert self._prefilled is not None
        is_refused = (self._is_pushed or self._prefilled.ticket is not None) and blames_params(answer)
        if is_refused:
            return self._take_refusal(leg.engine, answer)
        is_params_fault = blames_params(answer)  # D blames what the router adds without a ticket.
        is_free = is_params_fault or is_closed(answer)
        if (is_engines_fault(answer) or is_params_fault) and self._may_ask_another(is_free=is_free):
            self._log("%s answered with %d", leg.engine.url, answer.status)
            self._prefilled = None
            return self._again()
        if is_params_fault and self._status is None:
            raise RouterError.gateway("the decode engine refused what the router adds to the request")
        if answer.status == 200:
            self._note_loaded(leg.engine, answer)
        where = self._prefilled.where
        if not answer.is_stream:
            if self._status is not None:
                raise RouterError.gateway(
                    f"the decode engine refused to continue after the first token ({answer.status})"
                )
            reader = DecodeAnswer(self._first, leg.engine)
            body = reader.whole(answer.body, self._lent_in_push)
            self._send_whole(answer, {"x-baton-prefill": where}, body=body)
            self._lending.keep_turn(leg, reader, self._now_s)
            return self._finish()
        num_given = self._first.num_given if leg.engine.kind == "baton" else 0
        if num_given and answer.headers.get(GIVEN_HEADER) != str(num_given):
            why = "it does not continue answers; it is of an older version"
            return self._on_decode_failed(Failed(leg, _broken(leg, why)))
        if self._engines.has_other_weights(leg):
            # An update that this router did not know of is no fault. The client has tokens of other weights.
            self._log("%s has other weights than the engine that began the answer", leg.engine.url)
            self._prefilled = None
            return self._again()
        self._answer, self._head = DecodeAnswer(self._first, leg.engine), answer
        self._state = State.COMPARING
        return self._compare(leg, answer.body)

    def _take_refusal(self, engine: Engine, answer: LegAnswer) -> None:
        what = "introduction" if self._is_pushed else "ticket"
        self._log("%s refused the %s: %r", engine.url, what, answer.body)
        self._note_handoff(engine, "refused")
        self._lending.take_back()
        self._engines.tried.remove(engine)
        if not self._is_pushed:
            self._set_prefilled(Prefilled("local", "ticket_refused"))  # Once: no ticket is left to refuse.
            return self._again()
        self._prefilled = None
        self._num_refused_introductions += 1
        if self._num_refused_introductions < INTRODUCTIONS_MAX:
            assert self._producer is not None
            self._producer.is_introduced = False
            # D, too, may have other weights than it had.
            return self._close(lambda: self._meet(engine, self._attempt, is_again=True))
        self._set_prefilled(Prefilled("local", "introduction_refused"))
        return self._again()

    def _on_decode_failed(self, event: Failed) -> None:
        """D fails before its answer begins (DECODING, PUSHING) or its first token is read (COMPARING)."""
        failure = event.failure
        self._note_failure(event.leg, failure)
        if self._state is State.PUSHING:
            self._set_prefilled(Prefilled("remote"))
        self._log("decode leg: %s", failure)
        self._failures["decode"] = failure
        if failure.kind == "too_large":
            raise self._view.no_engine("decode", failure)  # Another engine would fail in the same way.
        if failure.kind == "timeout" and not self._may_ask_another():
            raise self._view.no_engine("decode", failure)
        if self._is_pushed or failure.was_sent:
            if self._is_pushed:
                self._lending.take_back()
            self._prefilled = None  # The ticket may be in use; a new dispatch gets a new one.
        return self._again()

    def _may_ask_another(self, *, is_free: bool = False) -> bool:
        """Whether there is another decode engine, and a retry left: this one may have too much to do."""
        if self._choose_consumer() is None:
            return False
        if is_free or self._view.retries.take(self._now_s):
            return True
        self._count("retries_refused")
        return False

    def _on_compared_piece(self, event: Piece) -> None:
        self._compare(event.leg, event.data)

    def _compare(self, leg: Leg, data: bytes) -> None:
        """COMPARING: find the first token in D's stream, unless the client gets all of the stream."""
        assert self._answer is not None
        assert self._prefilled is not None
        try:
            if not self._answer.compare(data):
                return None
        except PeerError as error:
            return self._on_decode_failed(Failed(leg, _broken(leg, str(error))))
        match self._answer.found:
            case FirstToken() as first:
                self._tell_first(self._head, first, self._prefilled.where, leg)
            case False:
                self._count("first_tokens", "no")
                self._set_prefilled(Prefilled("local", "engines_disagree"))
                self._engines.tried.remove(
                    leg.engine
                )  # D computes as it should, and can continue after P's token.
                return self._again()
            case True:
                self._count("first_tokens", "yes")
                self._send(self._answer.left_over)
            case None if self._first.is_resumed:
                pass
            case None if self._first.continues_after_told:
                self._count("first_tokens", "unasked")
            case None:
                self._begin_answer(self._head, {"x-baton-prefill": self._prefilled.where})
        self._state = State.RELAYING
        return self._relay()

    def _on_compared_end(self, event: StreamEnded) -> None:
        why = "the stream ended without a first token"
        self._on_decode_failed(Failed(event.leg, _broken(event.leg, why)))

    def _on_relayed(self, event: Piece | StreamEnded | Failed) -> None:
        """RELAYING: whole events go to the client as they come."""
        assert self._answer is not None
        match event:
            case Piece(leg=leg, data=data):
                leg.num_chunks += data.count(b"\n\n")
                if leg.num_chunks >= SAMPLE_CHUNKS:
                    note_chunks(leg, self._now_s)
                self._answer.push(data)
                return self._relay()
            case StreamEnded():
                self._answer.finish()
                self._relay()
                if self._state is not State.RELAYING:
                    return None
                if self._answer.is_done:
                    return self._end_answer(event.leg)
                event.leg.outcome = "broken"
                return self._resume_or_break("the decode engine ended the stream without [DONE]", event.leg)
            case Failed(failure=failure):
                self._note_failure(event.leg, failure)
                if self._answer.is_done:
                    event.leg.outcome = "200"
                    return self._end_answer(event.leg)  # All that matters had arrived.
                self._log("decode leg, in the stream: %s", failure)
                message = f"the decode engine failed in the middle of the answer ({failure.kind})"
                return self._resume_or_break(message, event.leg)

    def _relay(self) -> None:
        assert self._answer is not None
        assert self._decode is not None
        try:
            ready = self._answer.ready(self._lent_in_push)
        except PeerError as error:
            self._log("decode leg, in the stream: %s", error)
            self._decode.outcome = "broken"
            message = f"the decode engine failed in the middle of the answer ({error})"
            return self._resume_or_break(message, self._decode)
        self._send(ready)
        event = self._answer.take_error()
        if event is not None:
            self._decode.outcome = "broken"
        if event is None or self._resume(self._decode, "the decode engine reports an error"):
            return None
        self._send(event)
        return self._relay()

    def _resume_or_break(self, message: str, leg: Leg) -> None:
        if self._first.is_finished and not self._first.wants_usage:
            self._send(sse.DONE_EVENT)  # Nothing else is missing.
            return self._end_answer(leg)
        if self._resume(leg, message):
            return None
        return self._break_stream(message, leg.engine)

    def _on_draining(self, event: Draining) -> None:
        self._resume(event.leg, "it drains", is_planned=True)

    def _resume(self, leg: Leg, why: str, *, is_planned: bool = False) -> bool:
        """Another engine gives the rest of D's stream, if one can give the same answer.

        `is_planned`: D could go on. Only another decode engine takes its place then.
        """
        given = self._first.given()
        if given is None or (not is_planned and len(self._engines.broken) >= self._settings.resumes):
            return False
        if leg.is_outdated:
            return False  # What the client has may be of two versions; no engine has both.
        if not self._engines.can_be_followed(leg, given, self._now_s, is_planned=is_planned):
            return False
        self._first.resume_after(given)
        self._engines.giver = leg
        if not is_planned:
            self._engines.broken.append(leg.engine)
        self._count("resumed_streams", "planned" if is_planned else "broken")
        self._report("resume", leg.engine, why)
        self._prefilled = None
        self._engines.forget_failures()
        self._again()
        return True

    def _end_answer(self, leg: Leg) -> None:
        self._send(b"", is_last=True)
        self._finish()

    def _break_stream(self, message: str, engine: Engine | None = None) -> None:
        self._count("broken_streams")
        self._report("broken_stream", engine, message)
        self._send(error_event(message), is_last=True)
        self._finish()

    @property
    def _lent_in_push(self) -> Mapping[str, Any] | None:
        """What P has reported so far, whose cache hits D does not know."""
        reader = self._prefill.reader if self._is_pushed and self._prefill is not None else None
        return reader.lent if reader is not None else None

    # --- The client ----------------------------------------------------------------------------------

    @property
    def _is_ending(self) -> bool:
        return self._state is State.CLOSING and self._then == self._end

    def _on_client_gone(self, event: ClientGone) -> None:
        if self._is_ending:
            return
        self._status = CLIENT_CLOSED_REQUEST
        self._finish()

    def _on_stopped(self, event: Stopped) -> None:
        if self._is_ending:
            return
        if self._status is None:
            self._error = RouterError.unavailable(SHUTTING_DOWN)
        elif self._answer is not None and self._answer.is_done:
            self._send(b"", is_last=True)  # All that matters has been sent.
        else:
            self._send(error_event(SHUTTING_DOWN, status=503), is_last=True)
        self._finish()

    def _refuse(self, error: RouterError) -> None:
        """No attempt is left."""
        if self._status is None:
            self._error = error
        else:
            self._log("after the first token: %s", error)
            self._count("broken_streams")
            self._report("broken_stream", None, str(error))
            self._send(error_event(str(error)), is_last=True)
        self._finish()

    def _begin_answer(self, answer: LegAnswer, extra: Mapping[str, str]) -> None:
        assert self._status is None
        self._status = answer.status
        self._count("first_byte_seconds", value=self._now_s - self._request.received_at_s)
        headers = {**end_to_end(answer.headers), "x-request-id": self._request.id, **extra}
        self._effects.append(Head(answer.status, headers))

    def _send_whole(self, answer: LegAnswer, extra: Mapping[str, str], *, body: bytes | None = None) -> None:
        body = answer.body if body is None else body
        self._begin_answer(answer, {**extra, "content-length": str(len(body))})
        self._send(body, is_last=True)

    def _tell_first(self, head: LegAnswer, first: FirstToken, where: str, giver: Leg) -> None:
        """Send an engine's first token, unless the client has it. RouterError: it has another one."""
        try:
            is_for_client = self._first.take(first)
        except RouterError:
            self._count("first_tokens", "no")
            raise
        if not is_for_client:
            return self._count("first_tokens", "yes")
        self._engines.giver = giver
        self._begin_answer(head, {"x-baton-prefill": where})
        return self._send(first.events)

    def _tell_kept_answer(self, consumer: Engine | None) -> bool:
        """Send P's token out of its whole answer, if D can continue after it. True: it is all."""
        assert self._prefilled is not None
        giver = self._prefill
        # A token that may be of other weights than D's is given by D again.
        is_fit = giver is None or giver.is_as_chosen
        told = self._first.take_kept_answer(self._prefilled.answer if is_fit else None, consumer)
        if told is None:
            return False
        self._engines.giver = giver
        self._begin_answer(EVENT_STREAM, {"x-baton-prefill": "remote"})
        self._send(told.events, is_last=told.is_last)
        return told.is_last

    def _send(self, data: bytes, *, is_last: bool = False) -> None:
        if data or is_last:
            self._effects.append(Send(data, is_last=is_last))

    # --- Engines -------------------------------------------------------------------------------------

    def _choose_consumer(self, producer: Engine | None = None) -> Engine | None:
        return self._engines.choose_consumer(
            self._now_s, has_begun=self._status is not None, producer=producer
        )

    def _choose_producer(self) -> Engine | None:
        return self._engines.choose_producer(self._engines.consumer, self._now_s)

    def _why_no_pair(self, producer: Engine, consumer: Engine) -> str | None:
        return self._engines.why_no_pair(producer, consumer, self._now_s)

    def _lent_by(self, producer: Engine) -> KVIdentity | None:
        leg = self._prefill
        if leg is None or leg.engine is not producer:
            return None
        return leg.kv_identity if self._prefilled is not None or leg in self._open_legs else None

    # --- Legs ----------------------------------------------------------------------------------------

    def _open_prefill(self, engine: Engine) -> None:
        if self._engines.bad_producers:
            self._count("retries", "prefill")
        ask = self._first.prefill_ask(engine, self._transfer_id)
        body = ask.body
        if PARAMS in body:
            turn = self._lending.params_of_turn(engine.kv_identity, self._now_s)
            body = {**body, PARAMS: {**turn, **body[PARAMS]}}
        self._producer = engine
        self._lending.begin_leg()
        self._prefill = self._send_prefill(engine, ask, body)

    def _send_prefill(self, engine: Engine, ask: PrefillAsk, body: Mapping[str, Any]) -> Leg:
        reader = PrefillReader(
            reads_first_token=ask.reads_first_token,
            shows_token_ids=self._first.shows_token_ids,
            keeps_answer=ask.keeps_answer,
        )
        wait_s, num_tokens = self._settings.timeouts.prefill_s, self._engines.num_to_compute(engine)
        expected_s = self._view.fleet.choice.prefill_s(engine, num_tokens)
        leg = self._open("prefill", engine, body, wait_s, num_tokens, reader)
        leg.expected_s = expected_s
        return leg

    def _open_decode(self, engine: Engine, params: Mapping[str, Any] | None, *, is_pushed: bool) -> None:
        if self._engines.tried:
            self._count("retries", "decode")
        self._engines.tried.append(engine)
        self._is_pushed = is_pushed
        self._lending.begin_leg()
        timeouts = self._settings.timeouts
        wait_s = timeouts.first_byte_s if self._first.is_stream else timeouts.answer_s
        if is_pushed:
            wait_s += timeouts.prefill_s  # D waits for P as well.
        num_tokens = self._engines.num_to_compute(engine) if params is None else 0
        if params is not None and self._has_borrowed and self._engines.local_reason is not None:
            named = params.get("remote_num_tokens")
            num_lent = named if isinstance(named, int) else 0
            num_tokens = max(0, self._engines.routed.num_tokens - num_lent)
        body = self._first.decode_body(engine, params)
        self._decode = self._open("decode", engine, body, wait_s, num_tokens)

    def _open(
        self,
        role: Role,
        engine: Engine,
        body: Mapping[str, Any],
        wait_s: float,
        num_tokens: int,
        reader: PrefillReader | None = None,
    ) -> Leg:
        """`num_tokens`: that the engine has to compute."""
        was_alone = not engine.load
        num_before = engine.queued_tokens
        priority = self._engines.routed.priority
        leg = Leg(
            role,
            engine,
            body,
            wait_s,
            self._now_s,
            was_alone,
            num_tokens,
            num_before,
            reader=reader,
            priority=priority,
        )
        if self._ticket is not None and self._view.admission is not None:
            self._view.admission.note_start(self._ticket)
        # D's whole answer takes longer than its prompt.
        note_start(leg, self._now_s, shows_first=role == "prefill" or self._first.is_stream)
        self._view.fleet.note_start(engine, num_tokens, priority)
        self._open_legs.append(leg)
        self._effects.append(leg)
        return leg

    def _note_answer(self, leg: Leg, answer: LegAnswer) -> None:
        leg.outcome = outcome_of(answer)
        leg.weights_id = answer.headers.get(WEIGHTS_HEADER, "")
        self._view.fleet.health.note_answer(leg.engine, answer.status, self._now_s, retry_after_s(answer))
        note_answer(leg, answer, self._now_s)
        self._note_computed(leg)

    def _note_computed(self, leg: Leg) -> None:
        num_tokens, leg.num_queued_tokens = leg.num_queued_tokens, 0
        if num_tokens:
            self._view.fleet.note_computed(leg.engine, num_tokens, leg.priority)
            if self._view.admission is not None:
                self._view.admission.on_room()

    def _note_failure(self, leg: Leg, failure: LegFailure) -> None:
        leg.outcome = failure.kind
        self._view.fleet.health.note_failure(leg.engine, failure, self._now_s)

    def _again(self) -> None:
        """Close this attempt's legs, then choose engines anew."""
        self._answer = None
        self._close(self._attempt)

    def _finish(self) -> None:
        if self._answer is not None and self._decode is not None:
            self._lending.keep_turn(self._decode, self._answer, self._now_s)
        self._lending.take_back()
        self._lending.leave_turn(self._now_s)
        self._close(self._end)

    def _close(self, then: Callable[[], None]) -> None:
        self._state, self._then = State.CLOSING, then
        self._effects += [Close(leg) for leg in self._open_legs]
        if not self._open_legs:
            then()

    def _on_closed(self, event: Closed) -> None:
        note_closed(event.leg, self._view.fleet.choice.outputs)
        self._note_computed(event.leg)
        self._view.fleet.health.note_outcome(
            event.leg.engine, event.leg.outcome, self._now_s, self._engines.routed.model
        )
        self._view.fleet.note_end(event.leg.engine)
        self._open_legs.remove(event.leg)
        self._lending.take_back_unseen(event.leg, is_last=event.leg is self._prefill)
        self._count("legs", event.leg.role, event.leg.engine.url, event.leg.outcome)
        if not self._open_legs and self._state is State.CLOSING:
            self._then()

    def _end(self) -> None:
        self._leave_queue()
        self._state = State.OVER
        self._effects.append(Over(self._status, self._error))

    # --- What P lends ---------------------------------------------------------------------------------

    def _take_loan(self, leg: Leg, params: Mapping[str, Any]) -> None:
        """P has lent: also if the request has ended meanwhile."""
        self._lending.take(
            leg,
            params,
            is_wanted=leg in (self._prefill, self._hedge),
            is_over=self._state in (State.CLOSING, State.OVER),
        )

    def _note_loaded(self, engine: Engine, answer: LegAnswer) -> None:
        """D has begun to answer: it has loaded what P lent, or will never do so."""
        if self._prefilled is None or self._prefilled.where == "local" or self._producer is None:
            return
        handed_over = is_handed_over(answer)
        if handed_over is False:
            is_late = self._is_pushed and self._prefill in self._open_legs and not self._prefill.has_told
            self._note_handoff(engine, "late" if is_late else "computed")
            self._lending.take_back()
            return
        if handed_over:
            assert self._decode is not None
            sample = (0, 0.0) if self._is_pushed else loaded(self._decode, answer, self._now_s)
            self._note_handoff(engine, "handed_over", *sample)
        self._lending.note_used(self._prefill)

    def _note_handoff(
        self, engine: Engine, outcome: Outcome, num_loaded: int = 0, took_s: float = 0.0
    ) -> None:
        lent, used = self._prefill, self._decode
        if self._producer is None or lent is None or used is None:
            return
        if outcome != "handed_over" and None not in (lent.kv_identity, used.kv_identity):
            self._effects.append(Doubt(lent, used, outcome))
            return
        self._count("handoffs", self._producer.url, engine.url, outcome)
        self._view.note_handoff(self._producer, engine, outcome, self._now_s, num_loaded, took_s)

    def _set_prefilled(self, prefilled: Prefilled) -> None:
        self._prefilled = prefilled
        self._count("prefills", prefilled.where, prefilled.reason)

    def _count(self, metric: str, *labels: str, value: float | None = None) -> None:
        if metric == "first_tokens" and labels != ("no",):
            if self._is_first_counted:
                return  # Once for each stream, also if several decode engines had to be asked.
            self._is_first_counted = True
        self._effects.append(Count(metric, labels, value))

    def _report(self, kind: EventKind, engine: Engine | None, why: str) -> None:
        self._view.fleet.roster.report_event(kind, engine, why, self._request.id)

    def _log(self, message: str, *values: object) -> None:
        logger.warning("%s: " + message, self._request.id, *values)


def _broken(leg: Leg, why: str) -> LegFailure:
    return LegFailure("broken", leg.engine.url, why, was_sent=True)


LEG_EVENTS = (Opened, Piece, StreamEnded, Failed, Draining, Closed)


class Transition(NamedTuple):
    step: Callable[[Machine, Any], None]
    to: frozenset[State]  # The states that may follow.


_S = State
_Key = tuple[State, type, Role | None]
_ANSWER = (Opened, Piece, StreamEnded, Failed)
_UNDER_WAY = tuple(state for state in State if state is not State.OVER)
_WITH_LEGS = tuple(state for state in _UNDER_WAY if state not in (State.QUEUED, State.LOOKING))
# The states after engines are chosen, by an attempt that may find none.
_ATTEMPT = (_S.MEETING, _S.PREFILLING, _S.BORROWING, _S.HELD, _S.PUSHING, _S.DECODING, _S.CLOSING, _S.OVER)


def _rows(
    states: Iterable[State],
    events: Iterable[type],
    role: Role | None,
    step: Callable[[Machine, Any], None],
    *to: State,
    stays: bool = False,
) -> dict[_Key, Transition]:
    """`stays`: the state may also stay."""
    return {
        (state, event, role): Transition(step, frozenset((*to, state) if stays else to))
        for state in states
        for event in events
    }


def _late_rows() -> dict[_Key, Transition]:
    """Events that come too late to change anything: the state has moved on since what they answer."""
    late = _rows(State, (HoldOver,), None, Machine._ignore, stays=True)
    # P's first token ends an answer that was pushed: D's leg is not read any more.
    late |= _rows((_S.CLOSING, _S.ENDING), _ANSWER, "decode", Machine._ignore, stays=True)
    late |= _rows((_S.CLOSING, _S.OVER), (Admitted, Rejected, Found, Met), None, Machine._ignore, stays=True)
    late |= _rows((_S.OVER,), (ClientGone, Stopped), None, Machine._ignore, stays=True)
    for role in get_args(Role):
        late |= _rows(State, (Draining,), role, Machine._ignore, stays=True)
    return late


# An event without a row is a fault of ours.
TABLE: Mapping[_Key, Transition] = {
    **_late_rows(),
    **_rows((_S.QUEUED,), (Admitted,), None, Machine._on_admitted, _S.LOOKING, *_ATTEMPT),
    **_rows((_S.QUEUED,), (Rejected,), None, Machine._on_rejected, _S.OVER),
    **_rows((_S.LOOKING,), (Found,), None, Machine._on_found, *_ATTEMPT),
    **_rows((_S.MEETING,), (Met,), None, Machine._on_met, *_ATTEMPT),
    **_rows((_S.HELD,), (HoldOver,), None, Machine._on_hold_over, _S.PUSHING, stays=True),
    **_rows((_S.PREFILLING,), (HoldOver,), None, Machine._on_late, stays=True),
    **_rows((_S.PREFILLING,), _ANSWER, "prefill", Machine._on_prefill, _S.ENDING, *_ATTEMPT),
    **_rows(
        (_S.HELD, _S.PUSHING),
        _ANSWER,
        "prefill",
        Machine._on_prefill,
        *(_S.DECODING, _S.ENDING, _S.CLOSING),
        stays=True,
    ),
    **_rows((_S.BORROWING,), _ANSWER, "prefill", Machine._on_loan, _S.DECODING, _S.CLOSING, stays=True),
    **_rows((_S.ENDING,), _ANSWER[1:], "prefill", Machine._on_ending, _S.CLOSING, stays=True),
    **_rows((_S.ENDING,), (Opened,), "prefill", Machine._on_late_prefill, stays=True),
    **_rows(
        (_S.DECODING, _S.COMPARING, _S.RELAYING, _S.CLOSING, _S.OVER),
        _ANSWER,
        "prefill",
        Machine._on_late_prefill,
        stays=True,
    ),
    **_rows(
        (_S.PUSHING, _S.DECODING),
        (Opened,),
        "decode",
        Machine._on_decode_opened,
        *(_S.COMPARING, _S.RELAYING, _S.CLOSING),
    ),
    **_rows(
        (_S.PUSHING, _S.DECODING, _S.COMPARING),
        (Failed,),
        "decode",
        Machine._on_decode_failed,
        _S.CLOSING,
    ),
    **_rows(
        (_S.COMPARING,),
        (Piece,),
        "decode",
        Machine._on_compared_piece,
        *(_S.RELAYING, _S.CLOSING),
        stays=True,
    ),
    **_rows((_S.COMPARING,), (StreamEnded,), "decode", Machine._on_compared_end, _S.CLOSING),
    **_rows((_S.RELAYING,), _ANSWER[1:], "decode", Machine._on_relayed, _S.CLOSING, stays=True),
    **_rows((_S.RELAYING,), (Draining,), "decode", Machine._on_draining, _S.CLOSING, stays=True),
    **_rows(_WITH_LEGS, (Closed,), "prefill", Machine._on_closed, stays=True),
    **_rows(_WITH_LEGS, (Closed,), "decode", Machine._on_closed, stays=True),
    **_rows((_S.CLOSING,), (Closed,), "prefill", Machine._on_closed, *_ATTEMPT),
    **_rows((_S.CLOSING,), (Closed,), "decode", Machine._on_closed, *_ATTEMPT),
    **_rows(_UNDER_WAY, (ClientGone,), None, Machine._on_client_gone, _S.CLOSING, _S.OVER),
    **_rows(_UNDER_WAY, (Stopped,), None, Machine._on_stopped, _S.CLOSING, _S.OVER),
}
