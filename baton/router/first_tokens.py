"""The first token of one request: the engine that gives it, and what both engines are asked for. No I/O.

`choose` takes the mode of a pair of engines. It may change until a token has been sent to the client. From
then on the rest comes from an engine that can continue the answer, whatever fails. A token is sent once: an
engine that gives it again has to agree, or is told to continue after it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.router.continued_stream import OverlapReader
from baton.router.errors import RouterError
from baton.router.exact import can_split
from baton.router.first_token import FirstToken, FirstTokenReader
from baton.router.fleet import Engine
from baton.router.kept_token import KeptToken, continuation_body, ending, kept_body, opening, read_kept
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
from baton.router.modes import FirstTokenMode, can_continue, choose_mode


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
    def __init__(self, body: Mapping[str, Any], *, is_chat: bool, is_text: bool, may_split: bool) -> None:
        self._body = dict(body)
        self._seeded = with_seed(body)
        self._is_chat = is_chat
        self._may_verify = may_split and is_one_answer(body)
        # D is given a chat in tokens to continue it, which vLLM takes for chats of text only.
        self._may_continue = self._may_verify and is_text and can_split(body, is_chat=is_chat)
        self._mode = FirstTokenMode.WHOLE
        self._first: FirstToken | None = None  # As the client has it ...
        self._kept: KeptToken | None = None  # ... from either kind of engine.
        self.is_stream = body.get("stream") is True

    @property
    def is_told(self) -> bool:
        """The client has a token that D has to continue after."""
        return self._kept is not None

    @property
    def shows_token_ids(self) -> bool:
        return bool(self._body.get("return_token_ids"))

    @property
    def needs_no_decode(self) -> bool:
        """P's token is all that is wanted."""
        return self._mode is not FirstTokenMode.WHOLE and is_one_token(self._body)

    def can_continue(self, engine: Engine) -> bool:
        """Whether this decode engine can give what is left of the answer."""
        if self._kept is not None:
            return can_continue(engine, is_chat=self._is_chat)
        return self._first is None or engine.kind == "baton"

    def choose(self, producer: Engine | None, consumer: Engine, *, is_push: bool) -> None:
        if self._kept is not None:
            self._mode = FirstTokenMode.CONTINUE
        elif self._first is None:
            self._mode = choose_mode(
                producer.kind if producer is not None else None,
                consumer.kind,
                is_push=is_push,
                may_verify=self._may_verify,
                may_continue=self._may_continue and can_continue(consumer, is_chat=self._is_chat),
            )

    def settle(self, consumer: Engine) -> None:
        """After a prefill, when D is known."""
        if self._mode is FirstTokenMode.VERIFY and self._first is None and consumer.kind != "baton":
            self._mode = FirstTokenMode.WHOLE

    def prefill_ask(self, producer: Engine, transfer_id: str) -> PrefillAsk:
        match self._mode:
            case FirstTokenMode.VERIFY if producer.kind == "baton":
                return PrefillAsk(first_token_body(self._seeded, transfer_id), reads_first_token=True)
            case FirstTokenMode.CONTINUE | FirstTokenMode.OVERLAP if self._kept is None:
                body = self._seeded if self._mode is FirstTokenMode.OVERLAP else self._body
                return PrefillAsk(kept_body(body, transfer_id), keeps_answer=True)
            case FirstTokenMode.VERIFY:
                return PrefillAsk(prefill_body(self._seeded, transfer_id))
            case _:
                return PrefillAsk(prefill_body(self._body, transfer_id))

    def decode_body(self, consumer: Engine, params: Mapping[str, Any] | None) -> dict[str, Any]:
        match self._mode:
            case FirstTokenMode.CONTINUE if self._kept is not None and consumer.kind == "baton":
                return continuation_body(self._body, self._kept, {**(params or {}), GOES_ON: True})
            case FirstTokenMode.VERIFY:
                asked = {**(params or {}), FIRST_TOKEN: True} if self.is_stream else params
                return decode_body(self._seeded, asked)
            case FirstTokenMode.CONTINUE if self._kept is not None:
                return continuation_body(self._body, self._kept, params)
            case FirstTokenMode.OVERLAP:
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
        if (
            answer is None
            or self.is_told
            or self._mode not in (FirstTokenMode.CONTINUE, FirstTokenMode.OVERLAP)
        ):
            return None
        is_fit = consumer is not None and can_continue(consumer, is_chat=self._is_chat)
        max_model_len = consumer.max_model_len if consumer is not None and is_fit else None
        kept = read_kept(answer, self._body, is_chat=self._is_chat, max_model_len=max_model_len)
        if kept is None:
            self._mode = FirstTokenMode.WHOLE
            return None
        self._kept = kept
        events = opening(kept, self._body)
        return Told(events + ending(kept, self._body) if kept.is_last else events, kept.is_last)

    # --- D's stream ----------------------------------------------------------------------------------

    def reader_of_decode(self) -> FirstTokenReader | OverlapReader | None:
        """How the first token in D's stream is found. None: the client gets the stream from its beginning."""
        if self._mode is FirstTokenMode.VERIFY and self.is_stream:
            return FirstTokenReader(shows_token_ids=self.shows_token_ids)
        if self._mode is FirstTokenMode.OVERLAP and self._kept is not None:
            return OverlapReader(self._kept)
        return None

    @property
    def continues_after_told(self) -> bool:
        """D's stream is the rest of an answer that has begun."""
        return self._mode is FirstTokenMode.CONTINUE and self._kept is not None
