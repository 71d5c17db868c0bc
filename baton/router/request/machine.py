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
                                      event of the dialect. Tokens of two versions are never one answer
    P or D lacks the path:            another engine, or one engine gets the next request whole

In a push a leg that fails takes the other one with it, and D's leg may be held back (`late_leg`): if P has
answered meanwhile, the rest goes as in pull. The client gets nothing before D's first byte except the first
token, which P may give (`FirstTokenMode`). After that only an engine that can continue the answer is asked,
and only for the rest. If P's first token ends the answer, P's answer is the answer.

    Machine    the state, admission, and the end
    Attempt    engines are chosen and met, and legs go to them   --> Prefill, Decode
    Prefill    P's legs and answers                              --> Engines, Lending, Reply, OpenLegs
    Decode     D's leg and answer                                --> Prefill, and the same

`TABLE` has the transitions, the part that has each step, and the states that may follow. A step returns what
follows, and only `Machine` changes the state. An event of a leg that has been closed changes nothing.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from baton.router.fleet.admission import NO_OBJECTIVE, Objective, Ticket
from baton.router.fleet.view import FleetView
from baton.router.request.attempt import Attempt
from baton.router.request.decode import Decode
from baton.router.request.engines import Engines
from baton.router.request.events import (
    Admitted,
    ClientGone,
    Closed,
    Draining,
    Effect,
    Event,
    Failed,
    Found,
    HoldOver,
    Met,
    Opened,
    Over,
    Piece,
    Rejected,
    Stopped,
    StreamEnded,
)
from baton.router.request.lending import Lending
from baton.router.request.lookups import look_for
from baton.router.request.open_legs import OpenLegs
from baton.router.request.prefill import Prefill, Shared
from baton.router.request.reply import Reply
from baton.router.request.step import AfterClosing, Next, Outbox, State
from baton.router.request.tokens.first_tokens import FirstTokens
from baton.router.values.dialects import Dialect
from baton.router.values.errors import RouterError
from baton.router.values.legs import shape_of
from baton.router.values.settings import Role

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """A client's completion. `session`: of its X-Session-Id (`turns.session_of`)."""

    id: str
    body: Mapping[str, Any]
    dialect: Dialect
    session: str | None
    received_at_s: float
    objective: Objective = NO_OBJECTIVE


class Machine:
    """`begin`, then `on` for each event; both return effects. `Over` is the last one."""

    def __init__(self, view: FleetView, request: Request) -> None:
        self._view, self._request = view, request
        self.request_id, self.dialect = request.id, request.dialect
        self._state = State.OVER
        self._then = AfterClosing.ATTEMPT  # What follows CLOSING.
        self._shape = shape = shape_of(request.body, request.dialect)
        model, priority = request.body.get("model"), request.objective.priority
        path = request.dialect.path if request.dialect.is_optional else None
        routed = view.route(shape.prefix_key, model, shape.num_prompt_tokens, priority, path)
        local_reason = shape.direct_reason
        if local_reason is None and shape.num_prompt_tokens < view.settings.min_prefill_tokens:
            local_reason = "short_prompt"
        self._first = first = FirstTokens(
            request.body,
            request.dialect,
            is_text=shape.is_text,
            may_split=view.settings.first_token and local_reason is None,
            may_resume=view.settings.resumes > 0 and shape.direct_reason is None,
        )
        self._outbox = outbox = Outbox(view.fleet.roster, request.id)
        self._reply = reply = Reply(outbox, first, request.id, request.received_at_s)
        self._lending = lending = Lending(view.turns, request.session, outbox)
        self._legs = legs = OpenLegs(view, outbox, routed)
        self._engines = engines = Engines(
            view, outbox, first, routed, local_reason, lambda producer: self._prefill.lent_by(producer)
        )
        shared = Shared(view, outbox, legs, engines, first, reply, lending)
        self._prefill = prefill = Prefill(shared)
        self._decode = decode = Decode(shared, prefill)
        self._attempt = Attempt(shared, prefill, decode, request.body)
        self._parts = {Machine: self, Attempt: self._attempt, Prefill: prefill, Decode: decode}

    @property
    def num_output_tokens(self) -> int | None:
        """Tokens that the client has of a stream. None: it has none of a stream."""
        if self._reply.status != 200 or not self._first.is_stream:
            return None
        known = self._first.num_known
        if known is not None or self._decode.leg is None:
            return known
        return self._decode.num_chunks  # One chunk, one token: the engine names none.

    def begin(self, now_s: float) -> Sequence[Effect]:
        self._view.retries.note_request(now_s)
        return self._run(now_s, Machine._ask_admission, self)

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
        return self._run(now_s, transition.step, self._parts[transition.part], event)

    def _run(self, now_s: float, step: Callable[..., Next], *arguments: Any) -> Sequence[Effect]:
        self._outbox.now_s = now_s
        try:
            found = step(*arguments)
            if found is not None:  # Most events are pieces of D's stream, by which the state stays.
                self._go_to(found)
        except RouterError as error:
            self._reply.refuse(error)
            self._go_to(AfterClosing.END)
        return self._outbox.take()

    def _go_to(self, found: Next) -> None:
        """Change the state, as a step has decided."""
        while isinstance(found, AfterClosing):
            found = self._close(found)
        if found is not None:
            self._state = found

    def _report_unexpected(self, event: Event) -> None:
        """No row of TABLE: a fault of ours, which costs this request nothing. The tests fail by it."""
        logger.error("%s: unexpected %s in %s", self._request.id, type(event).__name__, self._state.name)

    def ignore(self, event: Event) -> Next:
        """The event comes too late."""
        return None

    # --- Before the first attempt

    def _ask_admission(self) -> Next:
        if self._view.admission is None:
            return self._look()
        objective, routed = self._request.objective, self._engines.routed
        ticket = Ticket(
            self._view.fleet.models.pool_of(routed),
            objective.priority,
            objective.tenant,
            self._request.received_at_s,
            self._request.received_at_s + objective.ttft_s,
            routed.num_tokens,
            min(objective.max_output, routed.num_output_tokens),
        )
        return self._look() if self._legs.ask_admission(ticket) else State.QUEUED

    def on_admitted(self, event: Admitted) -> Next:
        self._outbox.count("admissions", "after_waiting")
        self._outbox.count("queue_seconds", value=self._outbox.now_s - self._request.received_at_s)
        return self._look()

    def on_rejected(self, event: Rejected) -> Next:
        self._outbox.count("admissions", "given_up")
        raise event.error

    def _look(self) -> Next:
        request, look = self._request, None
        if self._engines.local_reason is None:
            look = look_for(
                self._view,
                request.body,
                self._shape,
                self._engines.routed,
                self._outbox.now_s,
                request.dialect,
            )
        if look is None:
            return self._attempt.start()
        self._outbox.emit(look)
        return State.LOOKING

    def on_found(self, event: Found) -> Next:
        self._engines.note_found(event)
        return self._attempt.start()

    # --- The end

    def _close(self, then: AfterClosing) -> Next:
        """Close this attempt's legs, then go on."""
        if then is AfterClosing.END:
            self._decode.keep_turn()
            self._lending.take_back()
            self._lending.leave_turn()
        self._then = then
        self._legs.close_all()
        return State.CLOSING if self._legs.is_any_open else self._after_closing()

    def _after_closing(self) -> Next:
        match self._then:
            case AfterClosing.ATTEMPT:
                return self._attempt.start()
            case AfterClosing.MEET_AGAIN:
                return self._attempt.meet_again()
            case AfterClosing.END:
                self._legs.leave_queue(self._decode.num_chunks)
                self._outbox.emit(Over(self._reply.status, self._reply.error))
                return State.OVER

    def on_closed(self, event: Closed) -> Next:
        self._lending.take_back_unseen(event.leg, is_last=event.leg is self._prefill.leg)
        self._legs.note_closed(event.leg)
        is_last = self._state is State.CLOSING and not self._legs.is_any_open
        return self._after_closing() if is_last else None

    @property
    def _is_ending(self) -> bool:
        return self._state is State.CLOSING and self._then is AfterClosing.END

    def on_client_gone(self, event: ClientGone) -> Next:
        if self._is_ending:
            return None
        self._reply.leave()
        return AfterClosing.END

    def on_stopped(self, event: Stopped) -> Next:
        if self._is_ending:
            return None
        self._reply.stop(is_done=self._decode.is_done)
        return AfterClosing.END


LEG_EVENTS = (Opened, Piece, StreamEnded, Failed, Draining, Closed)


class Transition(NamedTuple):
    part: type  # The part of the machine that has the step.
    step: Callable[[Any, Any], Next]
    to: frozenset[State]  # The states that may follow.


_S = State
_Key = tuple[State, type, Role | None]
_ANSWER = (Opened, Piece, StreamEnded, Failed)
_AFTER_P = (_S.DECODING, _S.ENDING, _S.CLOSING)
_UNDER_WAY = tuple(state for state in State if state is not State.OVER)
_WITH_LEGS = tuple(state for state in _UNDER_WAY if state not in (State.QUEUED, State.LOOKING))
# The states after engines are chosen, by an attempt that may find none.
_ATTEMPT = (_S.MEETING, _S.PREFILLING, _S.BORROWING, _S.HELD, _S.PUSHING, _S.DECODING, _S.CLOSING, _S.OVER)


def _rows(
    states: Iterable[State],
    events: Iterable[type],
    role: Role | None,
    part: type,
    step: Callable[[Any, Any], Next],
    *to: State,
    stays: bool = False,
) -> dict[_Key, Transition]:
    """`stays`: the state may also stay."""
    return {
        (state, event, role): Transition(part, step, frozenset((*to, state) if stays else to))
        for state in states
        for event in events
    }


def _late_rows() -> dict[_Key, Transition]:
    """Events that come too late to change anything: the state has moved on since what they answer."""
    late = _rows(State, (HoldOver,), None, Machine, Machine.ignore, stays=True)
    # P's first token ends an answer that was pushed: D's leg is not read any more.
    late |= _rows((_S.CLOSING, _S.ENDING), _ANSWER, "decode", Machine, Machine.ignore, stays=True)
    late |= _rows(
        (_S.CLOSING, _S.OVER), (Admitted, Rejected, Found, Met), None, Machine, Machine.ignore, stays=True
    )
    late |= _rows((_S.OVER,), (ClientGone, Stopped), None, Machine, Machine.ignore, stays=True)
    for role in get_args(Role):
        late |= _rows(State, (Draining,), role, Machine, Machine.ignore, stays=True)
    return late


# An event without a row is a fault of ours.
TABLE: Mapping[_Key, Transition] = {
    **_late_rows(),
    **_rows((_S.QUEUED,), (Admitted,), None, Machine, Machine.on_admitted, _S.LOOKING, *_ATTEMPT),
    **_rows((_S.QUEUED,), (Rejected,), None, Machine, Machine.on_rejected, _S.OVER),
    **_rows((_S.LOOKING,), (Found,), None, Machine, Machine.on_found, *_ATTEMPT),
    **_rows((_S.MEETING,), (Met,), None, Attempt, Attempt.on_met, *_ATTEMPT),
    **_rows((_S.HELD,), (HoldOver,), None, Attempt, Attempt.on_hold_over, _S.PUSHING, stays=True),
    **_rows((_S.PREFILLING,), (HoldOver,), None, Prefill, Prefill.on_late, stays=True),
    **_rows((_S.PREFILLING,), _ANSWER, "prefill", Attempt, Attempt.on_pulled, _S.ENDING, *_ATTEMPT),
    **_rows((_S.HELD,), _ANSWER, "prefill", Attempt, Attempt.on_held, *_AFTER_P, stays=True),
    **_rows((_S.PUSHING,), _ANSWER, "prefill", Attempt, Attempt.on_pushed, *_AFTER_P, stays=True),
    **_rows(
        (_S.BORROWING,), _ANSWER, "prefill", Attempt, Attempt.on_loan, _S.DECODING, _S.CLOSING, stays=True
    ),
    **_rows((_S.ENDING,), _ANSWER[1:], "prefill", Prefill, Prefill.on_ending, _S.CLOSING, stays=True),
    **_rows((_S.ENDING,), (Opened,), "prefill", Prefill, Prefill.on_unawaited, stays=True),
    **_rows(
        (_S.DECODING, _S.COMPARING, _S.RELAYING),
        _ANSWER,
        "prefill",
        Prefill,
        Prefill.on_unawaited,
        stays=True,
    ),
    **_rows((_S.CLOSING, _S.OVER), _ANSWER, "prefill", Prefill, Prefill.on_closing, stays=True),
    **_rows(
        (_S.PUSHING, _S.DECODING),
        (Opened,),
        "decode",
        Decode,
        Decode.on_opened,
        *(_S.COMPARING, _S.RELAYING, _S.CLOSING),
    ),
    **_rows(
        (_S.PUSHING, _S.DECODING, _S.COMPARING),
        (Failed,),
        "decode",
        Decode,
        Decode.on_failed,
        _S.CLOSING,
    ),
    **_rows(
        (_S.COMPARING,),
        (Piece,),
        "decode",
        Decode,
        Decode.on_compared_piece,
        *(_S.RELAYING, _S.CLOSING),
        stays=True,
    ),
    **_rows((_S.COMPARING,), (StreamEnded,), "decode", Decode, Decode.on_compared_end, _S.CLOSING),
    **_rows((_S.RELAYING,), _ANSWER[1:], "decode", Decode, Decode.on_relayed, _S.CLOSING, stays=True),
    **_rows((_S.RELAYING,), (Draining,), "decode", Decode, Decode.on_draining, _S.CLOSING, stays=True),
    **_rows(_WITH_LEGS, (Closed,), "prefill", Machine, Machine.on_closed, stays=True),
    **_rows(_WITH_LEGS, (Closed,), "decode", Machine, Machine.on_closed, stays=True),
    **_rows((_S.CLOSING,), (Closed,), "prefill", Machine, Machine.on_closed, *_ATTEMPT),
    **_rows((_S.CLOSING,), (Closed,), "decode", Machine, Machine.on_closed, *_ATTEMPT),
    **_rows(_UNDER_WAY, (ClientGone,), None, Machine, Machine.on_client_gone, _S.CLOSING, _S.OVER),
    **_rows(_UNDER_WAY, (Stopped,), None, Machine, Machine.on_stopped, _S.CLOSING, _S.OVER),
}
