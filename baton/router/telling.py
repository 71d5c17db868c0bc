"""What the client is told of the first token, by whom, and what the other engine is then asked for.

`choose` says which of the `Way`s two engines go. It may change until a token has been shown; from then on the
rest has to come from an engine that can say it, whatever fails. A token is shown once: who says it again has
to agree, or is told to go on behind it.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.router.behind_stream import BehindSieve, OverlapReader
from baton.router.client_answer import ClientAnswer
from baton.router.errors import RouterError
from baton.router.exact import can_go_behind
from baton.router.first_token import FirstToken, FirstTokenReader
from baton.router.fleet import Engine
from baton.router.legs import (
    FIRST_TOKEN,
    GOES_ON,
    decode_body,
    first_token_body,
    is_one_answer,
    is_one_token,
    prefill_body,
    with_seed,
)
from baton.router.metrics import RouterMetrics
from baton.router.running_legs import read_beginning
from baton.router.said_token import SaidToken, behind_body, ending, opening, read_said, said_body
from baton.router.sse import EventSplitter
from baton.router.turns import TurnSieve
from baton.router.upstream import LegAnswer
from baton.router.ways import Way, can_go_on, choose_way

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrefillAsk:
    """What a prefill leg is asked for, and how its answer is to be read."""

    body: dict[str, Any]
    says_first_token: bool = False  # By Baton's means.
    keeps_answer: bool = False


class Disagreement(Exception):
    """D says another first token than the client has been shown; it can be asked to go on behind that."""


class Telling:
    def __init__(
        self,
        body: Mapping[str, Any],
        client: ClientAnswer,
        metrics: RouterMetrics,
        *,
        is_chat: bool,
        may_split: bool,
    ) -> None:
        self._body = dict(body)
        self._seeded = with_seed(body)
        self._client = client
        self._metrics = metrics
        self._is_chat = is_chat
        self._may_agree = may_split and is_one_answer(body)
        self._may_go_behind = self._may_agree and can_go_behind(body, is_chat=is_chat)
        self._way = Way.WHOLE
        self._first: FirstToken | None = None  # As the client has been shown it ...
        self._said: SaidToken | None = None  # ... by either kind of engine.
        self.is_stream = body.get("stream") is True

    # --- Before the legs ---------------------------------------------------------------------------

    @property
    def is_said(self) -> bool:
        """The client has a token that D has to go on behind."""
        return self._said is not None

    def can_go_on(self, engine: Engine) -> bool:
        """Whether this decode engine can say what is left."""
        if self._said is not None:
            return can_go_on(engine, is_chat=self._is_chat)
        return self._first is None or engine.kind == "baton"

    def choose(self, producer: Engine | None, consumer: Engine, *, is_push: bool) -> None:
        if self._said is not None:
            self._way = Way.BEHIND
        elif self._first is None:
            self._way = choose_way(
                producer.kind if producer is not None else None,
                consumer.kind,
                is_push=is_push,
                may_agree=self._may_agree,
                may_go_behind=self._may_go_behind and can_go_on(consumer, is_chat=self._is_chat),
            )

    def settle(self, consumer: Engine) -> None:
        """After a prefill, when it turns out who decodes."""
        if self._way is Way.AGREE and self._first is None and consumer.kind != "baton":
            self._way = Way.WHOLE

    @property
    def needs_no_decode(self) -> bool:
        """P's token is all that is wanted."""
        return self._way is not Way.WHOLE and is_one_token(self._body)

    def ask_prefill(self, producer: Engine, transfer_id: str) -> PrefillAsk:
        match self._way:
            case Way.AGREE if producer.kind == "baton":
                return PrefillAsk(first_token_body(self._seeded, transfer_id), says_first_token=True)
            case Way.BEHIND | Way.OVERLAP if self._said is None:
                body = self._seeded if self._way is Way.OVERLAP else self._body
                return PrefillAsk(said_body(body, transfer_id), keeps_answer=True)
            case Way.AGREE:
                return PrefillAsk(prefill_body(self._seeded, transfer_id))
            case _:
                return PrefillAsk(prefill_body(self._body, transfer_id))

    def ask_decode(self, consumer: Engine, params: Mapping[str, Any] | None) -> dict[str, Any]:
        match self._way:
            case Way.BEHIND if self._said is not None and consumer.kind == "baton":
                return behind_body(self._body, self._said, {**(params or {}), GOES_ON: True})
            case Way.AGREE:
                asked = {**(params or {}), FIRST_TOKEN: True} if self.is_stream else params
                return decode_body(self._seeded, asked)
            case Way.BEHIND if self._said is not None:
                return behind_body(self._body, self._said, params)
            case Way.OVERLAP:
                return decode_body(self._seeded, params)
            case _:
                return decode_body(self._body, params)

    # --- What P says -------------------------------------------------------------------------------

    @property
    def shows_token_ids(self) -> bool:
        return bool(self._body.get("return_token_ids"))

    async def tell(self, head: LegAnswer, first: FirstToken, where: str) -> None:
        """To the client if it is the first to be said; else it has to be the same. Raises RouterError."""
        if self._first is None:
            self._first = first
            await self._client.start(head, {"x-baton-prefill": where})
            await self._client.piece(first.events)
            return
        agrees = (first.token_ids, first.is_last) == (self._first.token_ids, self._first.is_last)
        self._metrics.first_tokens.labels("yes" if agrees else "no").inc()
        if not agrees:
            raise RouterError.gateway(
                "the engines disagree about the first token; the answer is not to be used"
            )

    async def tell_said(self, answer: Mapping[str, Any] | None, consumer: Engine | None) -> bool:
        """P's whole answer, if the client can be shown it. Whether that is all there is to say."""
        if answer is None or self.is_said or self._way not in (Way.BEHIND, Way.OVERLAP):
            return False
        is_fit = consumer is not None and can_go_on(consumer, is_chat=self._is_chat)
        max_model_len = consumer.max_model_len if consumer is not None and is_fit else None
        said = read_said(answer, self._body, is_chat=self._is_chat, max_model_len=max_model_len)
        if said is None:
            self._way = Way.WHOLE
            return False
        self._said = said
        head = LegAnswer(200, {"content-type": "text/event-stream; charset=utf-8"}, b"", None)
        await self._client.start(head, {"x-baton-prefill": "remote"})
        await self._client.piece(opening(said, self._body))
        if said.is_last:
            await self._client.piece(ending(said, self._body))
            await self._client.end()
        return said.is_last

    # --- What D says -------------------------------------------------------------------------------

    async def take_stream(
        self, engine: Engine, answer: LegAnswer, where: str
    ) -> tuple[EventSplitter, TurnSieve]:
        """What of D's stream the client is still to be told, and through what it has to go.

        Raises LegFailure, RouterError, Disagreement.
        """
        match self._way:
            case Way.AGREE if self.is_stream:
                reader = FirstTokenReader(shows_token_ids=self.shows_token_ids)
                first, events = await read_beginning(engine, answer, reader)
                await self.tell(answer, first, where)
                return events, TurnSieve()
            case Way.OVERLAP if self._said is not None:
                overlap = OverlapReader(self._said)
                agrees, events = await read_beginning(engine, answer, overlap)
                self._metrics.first_tokens.labels("yes" if agrees else "no").inc()
                if not agrees:
                    raise Disagreement
                sieve = TurnSieve()
                await self._client.piece(sieve.event(overlap.left_over))
                return events, sieve
            case _:
                events = EventSplitter()
                events.push(answer.body)
                if self._way is Way.BEHIND and self._said is not None:
                    self._metrics.first_tokens.labels("unasked").inc()
                    return events, BehindSieve()
                await self._client.start(answer, {"x-baton-prefill": where})
                return events, TurnSieve()
