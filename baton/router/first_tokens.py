"""Which engine gives the client the first token, and what both engines are then asked for. No I/O.

`choose` takes the `Mode` of a pair of engines. It may change until a token has been sent to the client. From
then on the rest comes from an engine that can continue the answer, whatever fails. A token is sent once: an
engine that gives it again has to agree, or is told to continue after it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.router.behind_stream import OverlapReader
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
from baton.router.said_token import SaidToken, behind_body, ending, opening, read_said, said_body
from baton.router.ways import Way, can_go_on, choose_way


@dataclass(frozen=True, slots=True)
class PrefillAsk:
    """The body of a prefill leg, and how its answer is read."""

    body: dict[str, Any]
    reads_first_token: bool = False  # P is an engine of ours, and streams its first token.
    keeps_answer: bool = False  # P's whole answer holds the first token.


@dataclass(frozen=True, slots=True)
class Told:
    """Events for the client. `is_last`: they are the whole answer."""

    events: bytes
    is_last: bool


class FirstTokens:
    def __init__(self, body: Mapping[str, Any], *, is_chat: bool, may_split: bool) -> None:
        self._body = dict(body)
        self._seeded = with_seed(body)
        self._is_chat = is_chat
        self._may_agree = may_split and is_one_answer(body)
        self._may_go_behind = self._may_agree and can_go_behind(body, is_chat=is_chat)
        self._way = Way.WHOLE
        self._first: FirstToken | None = None  # As the client has it ...
        self._said: SaidToken | None = None  # ... from either kind of engine.
        self.is_stream = body.get("stream") is True

    @property
    def is_told(self) -> bool:
        """The client has a token that D has to continue after."""
        return self._said is not None

    @property
    def shows_token_ids(self) -> bool:
        return bool(self._body.get("return_token_ids"))

    @property
    def needs_no_decode(self) -> bool:
        """P's token is all that is wanted."""
        return self._way is not Way.WHOLE and is_one_token(self._body)

    def can_continue(self, engine: Engine) -> bool:
        """Whether this decode engine can give what is left of the answer."""
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
        """After a prefill, when D is known."""
        if self._way is Way.AGREE and self._first is None and consumer.kind != "baton":
            self._way = Way.WHOLE

    def prefill_ask(self, producer: Engine, transfer_id: str) -> PrefillAsk:
        match self._way:
            case Way.AGREE if producer.kind == "baton":
                return PrefillAsk(first_token_body(self._seeded, transfer_id), reads_first_token=True)
            case Way.BEHIND | Way.OVERLAP if self._said is None:
                body = self._seeded if self._way is Way.OVERLAP else self._body
                return PrefillAsk(said_body(body, transfer_id), keeps_answer=True)
            case Way.AGREE:
                return PrefillAsk(prefill_body(self._seeded, transfer_id))
            case _:
                return PrefillAsk(prefill_body(self._body, transfer_id))

    def decode_body(self, consumer: Engine, params: Mapping[str, Any] | None) -> dict[str, Any]:
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

    # --- P's token -----------------------------------------------------------------------------------

    def take(self, first: FirstToken) -> bool:
        """Note the first token of an engine of ours. True: it is for the client. False: the client has it.

        Raises RouterError if the client has another one.
        """
        if self._first is None:
            self._first = first
            return True
        if (first.token_ids, first.is_last) != (self._first.token_ids, self._first.is_last):
            raise RouterError.gateway(
                "the engines disagree about the first token; the answer is not to be used"
            )
        return False

    def take_kept_answer(self, answer: Mapping[str, Any] | None, consumer: Engine | None) -> Told | None:
        """The token in P's whole answer, if the client can be shown it. None: D gives it."""
        if answer is None or self.is_told or self._way not in (Way.BEHIND, Way.OVERLAP):
            return None
        is_fit = consumer is not None and can_go_on(consumer, is_chat=self._is_chat)
        max_model_len = consumer.max_model_len if consumer is not None and is_fit else None
        said = read_said(answer, self._body, is_chat=self._is_chat, max_model_len=max_model_len)
        if said is None:
            self._way = Way.WHOLE
            return None
        self._said = said
        events = opening(said, self._body)
        return Told(events + ending(said, self._body) if said.is_last else events, said.is_last)

    # --- D's stream ----------------------------------------------------------------------------------

    def reader_of_decode(self) -> FirstTokenReader | OverlapReader | None:
        """How the first token in D's stream is found. None: the client gets the stream from its beginning."""
        if self._way is Way.AGREE and self.is_stream:
            return FirstTokenReader(shows_token_ids=self.shows_token_ids)
        if self._way is Way.OVERLAP and self._said is not None:
            return OverlapReader(self._said)
        return None

    @property
    def continues_after_told(self) -> bool:
        """D's stream is the rest of an answer that has begun."""
        return self._way is Way.BEHIND and self._said is not None
