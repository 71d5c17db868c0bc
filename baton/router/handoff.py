"""One completion's way through the router, from the first leg to the last byte.

pull    client --> prefill leg on P --ticket--> decode leg on D --> client
push    client --> prefill leg on P and decode leg on D, at once, under one transfer id --> client

    P unreachable, broken, late, 5xx: once more on another P, else D prefills by itself (or the request fails)
    P answers 4xx:                    the client's error, passed on as it is
    D never saw the request:          the same ticket on another D
    D refuses the ticket:             once more without it; the client had no part in it
    D refuses the introduction:       once more with a fresh one, then without
    D failed before its first byte:   both legs again, with a new transfer id
    D failed in a stream:             an error event and [DONE]

In push a leg that fails takes the other one with it, and D's leg may be held back (`late_leg`): if P has
answered meanwhile, the rest goes as in pull. Nothing is said to the client before D's first byte, but
for the first token, and nothing is retried after it.

The first token of a stream comes from P, at once, where the two engines know a way to do that (`ways`). It
may have been shown when D, or P itself, fails: the rest is then tried again as above, from an engine that can
say it. If P's first token ends the answer, P's answer is the answer.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from baton.router.cached_tokens import CachedTokensSieve
from baton.router.client_answer import ClientAnswer
from baton.router.dispatch import Dispatch, Outcome
from baton.router.errors import LegFailure, RouterError
from baton.router.fleet import Engine
from baton.router.incoming import Incoming
from baton.router.judge import (
    Complete,
    FirstSaid,
    Prefilled,
    PrefillOutcome,
    Refused,
    Unable,
    blames_params,
    is_engines_fault,
    is_handed_over,
    prefilled,
)
from baton.router.legs import PARAMS, new_transfer_id, push_params, shape_of
from baton.router.relay import relay
from baton.router.running_legs import DecodeLeg, PrefillLeg
from baton.router.telling import Disagreement, Telling
from baton.router.turns import SESSION_HEADER, Turn, TurnSieve
from baton.router.upstream import LegAnswer

logger = logging.getLogger(__name__)

INTRODUCTIONS_MAX = 2  # As often is D offered one, the second time fresh from P.
CHAT_PATH = "/v1/chat/completions"


class Handoff:
    def __init__(
        self, dispatch: Dispatch, incoming: Incoming, body: Mapping[str, Any], client: ClientAnswer
    ) -> None:
        self._dispatch = dispatch
        self._settings = dispatch.settings
        self._metrics = dispatch.metrics
        self._incoming = incoming
        self._client = client
        shape = shape_of(body)
        self._routed = dispatch.route(shape.prefix_key)
        self._num_prompt_tokens = shape.num_prompt_tokens
        self._local_reason = shape.direct_reason
        if self._local_reason is None and shape.num_prompt_tokens < self._settings.min_prefill_tokens:
            self._local_reason = "short_prompt"
        self._session = incoming.headers.get(SESSION_HEADER)
        self._telling = Telling(
            body,
            client,
            dispatch.metrics,
            is_chat=incoming.path.partition("?")[0] == CHAT_PATH,
            may_split=self._settings.first_token and self._local_reason is None,
        )
        self._tried: list[Engine] = []  # To decode.
        self._bad_producers: list[Engine] = []
        self._num_refused_introductions = 0
        self._prefilled: Prefilled | None = None
        self._failures: dict[str, LegFailure] = {}  # The last one of each role.
        self._legs: list[PrefillLeg | DecodeLeg] = []
        self._lent: tuple[Engine, Mapping[str, Any]] | None = None  # Until a D has come for it.
        self._producer: Engine | None = None  # Of what the running decode leg is to load.
        self._has_come = False  # The D of the running decode leg, for what P lends.
        self._turn: Turn | None = None  # That the last answer of this session left, until a P has it.
        self._was_turn_sent = False
        self._is_over = False

    async def run(self) -> int:
        """Returns the status that the client got; raises RouterError if nothing was sent yet."""
        try:
            # Asked before the prefill too: without a decode engine there is nothing to prefill for.
            while (consumer := self._choose_consumer()) is not None:
                if (status := await self._attempt(consumer)) is not None:
                    return status
            raise self._dispatch.no_engine("decode", self._failures.get("decode"))
        except RouterError as error:
            if self._client.status is None:
                raise
            logger.warning("%s: after the first token: %s", self._incoming.request_id, error)
            await self._client.fail(str(error))
            return self._client.status
        finally:
            self._is_over = True
            self._give_back()
            self._leave_turn()
            await self._close_legs()

    async def _attempt(self, consumer: Engine) -> int | None:
        """None: it was in vain, and the next one may succeed."""
        try:
            producer = None
            await self._dispatch.meet(consumer)
            if self._prefilled is None and self._local_reason is None:
                producer = await self._meet_producer(consumer)
            if not consumer.is_eligible:
                return None  # Found out just now.
            if producer is not None and self._settings.mode == "push" and not self._telling.is_said:
                card = await self._dispatch.introducer.of(producer)
                self._telling.choose(producer, consumer, is_push=True)
                if card is not None and card.introduction is not None and not self._telling.needs_no_decode:
                    return await self._push(producer, consumer, card.engine_id, card.introduction)
            self._telling.choose(producer, consumer, is_push=False)
            return await self._pull(consumer)
        finally:
            await self._close_legs()

    # --- The two ways ------------------------------------------------------------------------------

    async def _pull(self, consumer: Engine) -> int | None:
        if self._prefilled is None and (status := await self._prefill(consumer)) is not None:
            return status
        assert self._prefilled is not None
        engine = self._choose_consumer(self._producer if self._prefilled.ticket else None)
        if await self._telling.tell_said(self._prefilled.answer, engine):
            return 200
        if engine is None:  # Went down during the prefill.
            raise self._dispatch.no_engine("decode", self._failures.get("decode"))
        if self._prefilled.ticket and self._producer and self._dispatch.why_no_pair(self._producer, engine):
            self._give_back()
            self._set_prefilled(Prefilled("local", "no_pair"))
        self._telling.settle(engine)
        decode = self._start_decode(engine, self._prefilled.ticket, is_pushed=False)
        answer = await decode.opened
        if isinstance(answer, LegFailure):
            self._note_decode_failure(answer)
            if answer.was_sent:
                self._prefilled = None  # The ticket may be in use; a new dispatch gets a new one.
            return None
        if self._prefilled.ticket is not None and blames_params(answer):
            self._log_refusal(engine, "ticket", answer)
            self._note_handoff(engine, "refused")
            self._give_back()
            self._set_prefilled(Prefilled("local", "ticket_refused"))
            self._tried.remove(engine)  # Happens once: there is no ticket to refuse any more.
            return None
        return await self._take_answer(engine, answer)

    async def _push(
        self, producer: Engine, engine: Engine, producer_id: str, introduction: str
    ) -> int | None:
        transfer_id = new_transfer_id()
        hold_s = self._dispatch.late_legs.hold_s(producer, engine, self._num_prompt_tokens)
        prefill = self._start_prefill(producer, transfer_id)
        self._producer = producer
        if hold_s != 0.0:
            await asyncio.wait({prefill.outcome}, timeout=hold_s)
            if prefill.outcome.done():
                self._metrics.pushes.labels("after").inc()
                return await self._pull_behind(prefill, engine)
        self._metrics.pushes.labels("at_once" if hold_s == 0.0 else "late").inc()
        params = push_params(transfer_id, engine_id=producer_id, introduction=introduction)
        decode = self._start_decode(engine, params, is_pushed=True)
        either: set[asyncio.Future[Any]] = {prefill.outcome, decode.opened}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if prefill.outcome.done() and not _is_answered(decode):
            status = await self._take_prefill(prefill, prefill.outcome.result())
            if status is not None or self._prefilled is None:
                self._tried.remove(engine)  # It was not at fault.
                return status
            if await self._telling.tell_said(self._prefilled.answer, engine):
                return 200
        else:
            self._set_prefilled(Prefilled("remote"))  # Or D has computed it; P is not waited for.
        answer = await decode.opened
        if isinstance(answer, LegFailure):
            self._note_decode_failure(answer)
            self._give_back()
            self._prefilled = None
            return None
        if blames_params(answer):
            self._log_refusal(engine, "introduction", answer)
            self._note_handoff(engine, "refused")
            self._give_back()
            await self._replace_introduction(producer)
            self._tried.remove(engine)
            return None
        return await self._take_answer(engine, answer, prefill)

    async def _pull_behind(self, prefill: PrefillLeg, engine: Engine) -> int | None:
        """P has answered before D was asked."""
        status = await self._take_prefill(prefill, prefill.outcome.result())
        if status is not None or self._prefilled is None:
            return status
        self._telling.choose(prefill.engine, engine, is_push=False)
        return await self._pull(engine)

    async def _replace_introduction(self, producer: Engine) -> None:
        self._prefilled = None
        self._num_refused_introductions += 1
        if self._num_refused_introductions < INTRODUCTIONS_MAX:
            await self._dispatch.introducer.refresh(producer)
        else:
            self._set_prefilled(Prefilled("local", "introduction_refused"))

    # --- Prefill -----------------------------------------------------------------------------------

    async def _prefill(self, consumer: Engine) -> int | None:
        """Sets what was prefilled; or returns the status if P's answer was all there is to say."""
        if self._local_reason is not None:
            self._set_prefilled(Prefilled("local", self._local_reason))
            return None
        while (producer := await self._meet_producer(consumer)) is not None:
            prefill = self._start_prefill(producer, new_transfer_id())
            self._producer = producer
            status = await self._take_prefill(prefill, await prefill.outcome)
            if status is not None or self._prefilled is not None:
                return status
        if self._settings.on_prefill_failure == "fail":
            failure = self._failures.get("prefill")
            raise self._dispatch.no_engine("prefill", failure, is_tried=bool(self._bad_producers))
        is_paired = self._bad_producers or self._choose_producer(None) is None
        self._set_prefilled(Prefilled("local", "prefill_failed" if is_paired else "no_pair"))
        return None

    async def _take_prefill(self, leg: PrefillLeg, outcome: PrefillOutcome | LegFailure) -> int | None:
        duration_s = time.monotonic() - leg.started_at_s
        self._metrics.prefill_seconds.observe(duration_s)
        if leg.was_alone and isinstance(outcome, Prefilled | FirstSaid | Complete):
            self._dispatch.late_legs.note(leg.engine, self._num_prompt_tokens, duration_s)
        if isinstance(outcome, Prefilled | FirstSaid | Complete):
            self._turn = None  # This P has come for it.
        match outcome:
            case LegFailure():
                self._was_turn_sent = self._was_turn_sent or outcome.was_sent
                logger.warning("%s: prefill leg: %s", self._incoming.request_id, outcome)
                self._failures["prefill"] = outcome
                self._bad_producers.append(leg.engine)
            case Unable(reason):
                logger.warning("%s: prefill leg: %s %s", self._incoming.request_id, leg.engine.url, reason)
                self._bad_producers.append(leg.engine)
            case Refused(answer):
                if self._client.has_started:
                    raise RouterError.gateway("the prefill engine refused what another one had begun")
                return await self._client.whole(answer)
            case Complete(answer):
                return await self._client.whole(answer, {"x-baton-prefill": "remote"})
            case FirstSaid(head, first):
                await self._telling.tell(head, first, "remote")
                if first.is_last:
                    return await self._end_with(leg)
                self._set_prefilled(prefilled(first.params))
            case Prefilled(answer=answer) if answer is not None and self._telling.needs_no_decode:
                self._set_prefilled(Prefilled("remote", answer=answer))
            case Prefilled():
                self._set_prefilled(outcome)
        return None

    async def _end_with(self, leg: PrefillLeg) -> int:
        """What P has said is the whole answer; what follows are the token counts and the end."""
        rest = await leg.rest
        if isinstance(rest, LegFailure):
            raise RouterError.gateway("the prefill engine failed at the end of the answer")
        await self._client.piece(rest)
        await self._client.end()
        assert self._client.status is not None
        return self._client.status

    # --- Decode ------------------------------------------------------------------------------------

    async def _take_answer(
        self, engine: Engine, answer: LegAnswer, prefill: PrefillLeg | None = None
    ) -> int | None:
        """`prefill`: the leg that left with D's."""
        if is_engines_fault(answer) and self._choose_consumer() is not None:
            logger.warning("%s: %s said %d", self._incoming.request_id, engine.url, answer.status)
            self._prefilled = None
            return None
        assert self._prefilled is not None
        if answer.status == 200:
            self._take_handoff(engine, answer)
        where = self._prefilled.where
        if answer.chunks is None:
            if self._client.has_started:
                raise RouterError.gateway(
                    f"the decode engine refused to go on behind the first token ({answer.status})"
                )
            turn = TurnSieve()
            body = CachedTokensSieve(turn, prefill).whole(answer.body)
            self._keep_turn(engine, turn)
            return await self._client.whole(answer, {"x-baton-prefill": where}, body=body)
        try:
            events, sieve = await self._telling.take_stream(engine, answer, where)
        except Disagreement:
            self._set_prefilled(Prefilled("local", "engines_disagree"))
            self._tried.remove(engine)  # It computes as it should, and can go on behind the other's token.
            return None
        except LegFailure as failure:
            self._dispatch.fleet.note_failure(engine, failure)
            self._note_decode_failure(failure)
            self._prefilled = None
            return None
        try:
            await relay(
                self._client,
                events,
                answer.chunks,
                request_id=self._incoming.request_id,
                sieve=CachedTokensSieve(sieve, prefill),
            )
        finally:  # Also when the client has what it wants and goes.
            self._keep_turn(engine, sieve)
        return answer.status

    # --- Parts -------------------------------------------------------------------------------------

    def _choose_producer(self, consumer: Engine | None) -> Engine | None:
        """One that can hand over to this decode engine; None: to any."""

        def is_fit(producer: Engine) -> bool:
            return consumer is None or self._dispatch.why_no_pair(producer, consumer) is None

        return self._dispatch.choose("prefill", self._routed, self._bad_producers, is_fit)

    async def _meet_producer(self, consumer: Engine) -> Engine | None:
        """As `_choose_producer`, with what the engine reports of itself: so it may turn out not to fit."""
        while (producer := self._choose_producer(consumer)) is not None and not producer.was_asked:
            await self._dispatch.meet(producer)
        return producer

    def _choose_consumer(self, producer: Engine | None = None) -> Engine | None:
        """`producer`: one that it can hand over to, if there is such a one."""
        choose, can_go_on = self._dispatch.choose, self._telling.can_go_on

        def is_fit(consumer: Engine) -> bool:
            return can_go_on(consumer) and (
                producer is None or self._dispatch.why_no_pair(producer, consumer) is None
            )

        engine = choose("decode", self._routed, self._tried, is_fit)
        return engine or choose("decode", self._routed, self._tried, can_go_on)

    def _start_prefill(self, engine: Engine, transfer_id: str) -> PrefillLeg:
        if self._bad_producers:
            self._metrics.retries.labels("prefill").inc()
        ask = self._telling.ask_prefill(engine, transfer_id)
        if PARAMS in ask.body:
            self._turn = self._turn or self._dispatch.turns.take(self._session)
            if self._turn is not None:
                ask.body[PARAMS] = {**self._turn.params, **ask.body[PARAMS]}
        self._has_come = False
        leg = PrefillLeg(
            self._dispatch.upstream,
            engine,
            self._dispatch.leg(self._incoming, ask.body, self._settings.timeouts.prefill_s),
            says_first_token=ask.says_first_token,
            shows_token_ids=self._telling.shows_token_ids,
            keeps_answer=ask.keeps_answer,
            on_lent=self._hear_lent,
        )
        self._legs.append(leg)
        return leg

    def _start_decode(
        self, engine: Engine, params: Mapping[str, Any] | None, *, is_pushed: bool
    ) -> DecodeLeg:
        if self._tried:
            self._metrics.retries.labels("decode").inc()
        self._tried.append(engine)
        self._has_come = False
        timeouts = self._settings.timeouts
        wait_s = timeouts.first_byte_s if self._telling.is_stream else timeouts.answer_s
        if is_pushed:
            wait_s += timeouts.prefill_s  # D waits for P as well.
        request = self._dispatch.leg(self._incoming, self._telling.ask_decode(engine, params), wait_s)
        leg = DecodeLeg(self._dispatch.upstream, engine, request)
        self._legs.append(leg)
        return leg

    def _hear_lent(self, producer: Engine, params: Mapping[str, Any]) -> None:
        """At the moment at which P's answer is read, whatever this request waits for, or if it is over."""
        if self._has_come:
            return  # D had the blocks before P's leg ended.
        self._give_back()
        self._lent = (producer, params)
        if self._is_over:
            self._give_back()

    def _give_back(self) -> None:
        """No D will come any more; of one that has come all the same, P takes nothing away."""
        lent, self._lent = self._lent, None
        if lent is not None:
            self._dispatch.loans.give_back(*lent)

    def _take_handoff(self, engine: Engine, answer: LegAnswer) -> None:
        """D has begun to answer: it has loaded what P lent, or will never do so."""
        handed_over = is_handed_over(answer)
        if self._prefilled is None or self._prefilled.where == "local" or self._producer is None:
            return
        if handed_over is False:
            self._note_handoff(engine, "computed")
            self._give_back()
            return
        if handed_over:
            self._note_handoff(engine, "handed_over")
        self._lent, self._has_come = None, True

    def _note_handoff(self, engine: Engine, outcome: Outcome) -> None:
        if self._producer is not None:
            self._dispatch.note_handoff(self._producer, engine, outcome)

    def _keep_turn(self, keeper: Engine, sieve: TurnSieve) -> None:
        if sieve.params is not None:
            self._dispatch.turns.put(self._session, Turn(keeper, sieve.params))

    def _leave_turn(self) -> None:
        """Of the last answer's blocks, if no P has come for them."""
        turn, self._turn = self._turn, None
        if turn is None:
            return
        if self._was_turn_sent:
            self._dispatch.loans.give_back(*turn)
        else:
            self._dispatch.turns.put(self._session, turn)

    def _set_prefilled(self, prefilled: Prefilled) -> None:
        self._prefilled = prefilled
        self._metrics.prefills.labels(prefilled.where, prefilled.reason).inc()

    def _note_decode_failure(self, failure: LegFailure) -> None:
        """Raises RouterError if another engine would fail in the same way."""
        logger.warning("%s: decode leg: %s", self._incoming.request_id, failure)
        self._failures["decode"] = failure
        if failure.kind == "too_large":
            raise self._dispatch.no_engine("decode", failure)

    def _log_refusal(self, engine: Engine, what: str, answer: LegAnswer) -> None:
        logger.error("%s: %s refused the %s: %r", self._incoming.request_id, engine.url, what, answer.body)

    async def _close_legs(self) -> None:
        legs, self._legs = self._legs, []
        for leg in legs:
            leg.cancel()  # All of them before anything is waited for: the wait may be cancelled itself.
        for leg in legs:
            await leg.wait_closed()


def _is_answered(leg: DecodeLeg) -> bool:
    if not leg.opened.done():
        return False
    answer = leg.opened.result()
    return isinstance(answer, LegAnswer) and answer.status == 200
