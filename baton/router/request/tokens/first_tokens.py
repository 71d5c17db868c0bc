"""The tokens of one answer that several engines give in turn, and the bodies that ask for them. No I/O.

`choose` chooses the mode of a pair of engines, which decides where the first token comes from:

WHOLE      D gives all tokens.
VERIFY     P gives the first token and stops after it (`baton_first_token`). D gives it too, and has to give
           the same. Exact for every request, since each engine sees the whole request.
CONTINUE   P gives the first token in an answer of one token. D continues after it as after a prompt
           (`continuation`). The engines cannot disagree. Exact for requests that `can_split` accepts.
OVERLAP    Like CONTINUE, but D's leg left before P had answered: D gives the token too. If D gives another
           token, the router asks it again, to continue after P's. Not for models with recurrent states: a D
           that has to give the first token cannot use P's state after the whole prompt.

The mode may change until a token has been sent to the client. From then on only an engine that can continue
the answer gives the rest, whatever fails. The client gets each token once: an engine that gives it again has
to agree, or is told to continue after it. When a stream breaks, `given` is the part that the client has.
After `resume_after` the bodies ask for the rest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from baton.router.fleet.engine import Engine
from baton.router.fleet.turns import TurnSieve
from baton.router.request.tokens.continuation import (
    ContinuedSieve,
    KeptToken,
    OverlapReader,
    PromptIds,
    can_split,
    continuation_body,
    ending,
    kept_body,
    opening,
    read_kept,
)
from baton.router.request.tokens.stream import FirstToken, FirstTokenReader, TokenRecord
from baton.router.values.dialects import Dialect
from baton.router.values.errors import RouterError
from baton.router.values.identity import Kind
from baton.router.values.legs import (
    FIRST_TOKEN,
    OUTPUT_TOKEN_IDS,
    TOKEN_IDS,
    decode_body,
    first_token_body,
    is_one_answer,
    is_one_token,
    prefill_body,
    with_seed,
)


class FirstTokenMode(Enum):
    WHOLE = auto()
    VERIFY = auto()
    CONTINUE = auto()
    OVERLAP = auto()


def choose_mode(
    producer: Kind | None,
    consumer: Kind | None,
    *,
    is_push: bool,
    may_verify: bool,
    may_continue: bool,
    has_states: bool = False,
) -> FirstTokenMode:
    if producer == consumer == "baton" and may_verify:
        return FirstTokenMode.VERIFY
    if producer is not None and consumer == "vllm" and may_continue and not (is_push and has_states):
        return FirstTokenMode.OVERLAP if is_push else FirstTokenMode.CONTINUE
    # These kinds draw unlike tokens even with equal seeds, so they cannot overlap in a push.
    if producer == "vllm" and consumer == "baton" and may_continue and not is_push:
        return FirstTokenMode.CONTINUE
    return FirstTokenMode.WHOLE


def can_continue(consumer: Engine) -> bool:
    """Whether D can continue after tokens of another engine. A Baton engine reports its length if it can."""
    return consumer.kind == "vllm" or (consumer.kind == "baton" and consumer.max_model_len is not None)


@dataclass(frozen=True, slots=True)
class PrefillAsk:
    """The body of a prefill leg, and how its answer is read."""

    body: dict[str, Any]
    reads_first_token: bool = False  # P is a Baton engine, and streams its first token.
    keeps_answer: bool = False  # P's whole answer holds the first token.


@dataclass(frozen=True, slots=True)
class Told:
    """Events for the client. `is_last`: they are the whole answer."""

    events: bytes
    is_last: bool


@dataclass(frozen=True, slots=True)
class Given:
    """The part of an answer that the client has when the stream breaks.

    `kind`: the kind of engines that gave it. `has_begun`: the client has an event, perhaps without a token.
    """

    kind: Kind
    has_begun: bool
    token_ids: Sequence[int]
    prompt_token_ids: PromptIds | None


def can_follow(given: Given, engine: Engine) -> bool:
    """Whether this engine can give the rest, and only the rest."""
    return engine.kind == "baton" if given.kind == "baton" else can_continue(engine)


class FirstTokens:
    def __init__(
        self,
        body: Mapping[str, Any],
        dialect: Dialect,
        *,
        is_text: bool,
        may_split: bool,
        may_resume: bool = False,
    ) -> None:
        """`may_split`: P may give the first token. `may_resume`: another engine may continue the stream."""
        self._body = dict(body)
        self._seeded = with_seed(body)
        self.dialect = dialect
        may_split, may_resume = may_split and dialect.has_token_ids, may_resume and dialect.has_token_ids
        self._may_verify = may_split and is_one_answer(body)
        # D gets a chat as tokens to continue it. vLLM accepts that for chats of text only.
        is_exact = is_text and can_split(body, dialect)
        self._may_continue = self._may_verify and is_exact
        self._may_resume_vllm = may_resume and is_exact
        is_alone = is_one_answer(body) and not body.get("echo")
        self._may_resume = may_resume and body.get("stream") is True and is_alone
        self._mode = FirstTokenMode.WHOLE
        # The first token that the client has: `_first` from a Baton engine, `_kept` from P's whole answer.
        self._first: FirstToken | None = None
        self._kept: KeptToken | None = None
        self._given: Given | None = None
        self._record: TokenRecord | None = None  # Tokens of the running decode leg's stream.
        self.is_stream = body.get("stream") is True

    @property
    def is_told(self) -> bool:
        """Whether the client has tokens after which D has to continue."""
        return self._kept is not None or self._given is not None

    @property
    def is_resumed(self) -> bool:
        """Whether a stream has broken and the rest of it follows."""
        return self._given is not None

    @property
    def shows_token_ids(self) -> bool:
        return bool(self._body.get("return_token_ids"))

    @property
    def needs_no_decode(self) -> bool:
        """Whether P's token is the whole answer."""
        return self._mode is not FirstTokenMode.WHOLE and is_one_token(self._body)

    @property
    def takes_prefills_token(self) -> bool:
        """Whether the answer continues after the token that P samples."""
        return self._mode is not FirstTokenMode.WHOLE and not self.is_told

    def can_continue(self, engine: Engine) -> bool:
        """Whether this decode engine can give the rest of the answer."""
        if self._given is not None:
            return can_follow(self._given, engine)
        if self.is_told:
            return can_continue(engine)
        return self._first is None or engine.kind == "baton"

    def choose(self, producer: Engine | None, consumer: Engine, *, is_push: bool) -> None:
        if self.is_told:
            self._mode = FirstTokenMode.CONTINUE
        elif self._first is None:
            card = producer.introduction if producer is not None else None
            has_states = card is not None and card.has_states
            self._mode = choose_mode(
                producer.kind if producer is not None else None,
                consumer.kind,
                is_push=is_push,
                may_verify=self._may_verify,
                may_continue=self._may_continue and can_continue(consumer),
                has_states=has_states,
            )

    def settle(self, consumer: Engine) -> None:
        """Settle the mode after a prefill, when D is known."""
        if self._mode is FirstTokenMode.VERIFY and self._first is None and consumer.kind != "baton":
            self._mode = FirstTokenMode.WHOLE

    def prefill_ask(self, producer: Engine, transfer_id: str) -> PrefillAsk:
        match self._mode:
            case FirstTokenMode.VERIFY if producer.kind == "baton":
                return PrefillAsk(first_token_body(self._seeded, transfer_id), reads_first_token=True)
            case FirstTokenMode.CONTINUE | FirstTokenMode.OVERLAP if not self.is_told:
                body = self._seeded if self._mode is FirstTokenMode.OVERLAP else self._body
                return PrefillAsk(kept_body(body, transfer_id, self.dialect), keeps_answer=True)
            case FirstTokenMode.VERIFY:
                return PrefillAsk(prefill_body(self._seeded, transfer_id, self.dialect))
            case _:
                return PrefillAsk(prefill_body(self._body, transfer_id, self.dialect))

    def decode_body(self, consumer: Engine, params: Mapping[str, Any] | None) -> dict[str, Any]:
        self._record, body = None, self._body
        if consumer.kind == "baton":
            asked = dict(params or {})
            if self._may_resume or self.is_told:  # Another engine draws the same tokens from the same seed.
                body = self._seeded
            if self._may_resume:
                asked[TOKEN_IDS] = True
                self._record = TokenRecord(consumer.kind, shows_token_ids=self.shows_token_ids)
            if self.is_told and (told_ids := self._told_ids):
                asked[OUTPUT_TOKEN_IDS] = told_ids
            elif self._mode is FirstTokenMode.VERIFY:
                body = self._seeded
                if self.is_stream:
                    asked[FIRST_TOKEN] = True
            return decode_body(body, asked or None)
        if self._mode in (FirstTokenMode.VERIFY, FirstTokenMode.OVERLAP):
            body = self._seeded
        if consumer.kind == "vllm" and self._may_resume_vllm:
            body = {**body, "return_token_ids": True}
            self._record = TokenRecord(consumer.kind, shows_token_ids=self.shows_token_ids)
        if self.is_told and (told_ids := self._told_ids):
            prompt = self._prompt_token_ids
            assert prompt is not None
            return continuation_body(body, prompt, told_ids, params, self.dialect)
        return decode_body(body, params)

    @property
    def _told_ids(self) -> list[int]:
        """Tokens of the answer that the client has when a decode leg begins, or when its stream begins."""
        if self._given is not None:
            return list(self._given.token_ids)
        if self._kept is not None:
            return [self._kept.token_id]
        return [] if self._first is None else list(self._first.token_ids)

    @property
    def _prompt_token_ids(self) -> PromptIds | None:
        if self._given is not None:
            return self._given.prompt_token_ids
        return None if self._kept is None else self._kept.prompt_token_ids

    # --- P's token -----------------------------------------------------------------------------------

    def take(self, first: FirstToken) -> bool:
        """Note the first token of a Baton engine. True: send it to the client. False: the client has it.

        Raises RouterError if the client has another token.
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
        """The token in P's whole answer, if the client can get it from P. None: D gives it."""
        if (
            answer is None
            or self.is_told
            or self._mode not in (FirstTokenMode.CONTINUE, FirstTokenMode.OVERLAP)
        ):
            return None
        is_fit = consumer is not None and can_continue(consumer)
        max_model_len = consumer.max_model_len if consumer is not None and is_fit else None
        kept = read_kept(answer, self._body, self.dialect, max_model_len=max_model_len)
        if kept is None:
            self._mode = FirstTokenMode.WHOLE
            return None
        self._kept = kept
        events = opening(kept, self._body)
        return Told(events + ending(kept, self._body) if kept.is_last else events, kept.is_last)

    # --- D's stream ----------------------------------------------------------------------------------

    def reader_of_decode(self) -> FirstTokenReader | OverlapReader | None:
        """Reader of the first token in D's stream. None: the client gets the stream from its beginning."""
        if self.continues_after_told:
            return None
        if self._mode is FirstTokenMode.VERIFY and self.is_stream:
            return FirstTokenReader(shows_token_ids=self.shows_token_ids)
        if self._mode is FirstTokenMode.OVERLAP and self._kept is not None:
            return OverlapReader(self._kept)
        return None

    @property
    def continues_after_told(self) -> bool:
        """Whether D's stream is the rest of an answer that has begun."""
        return self._mode is FirstTokenMode.CONTINUE and self.is_told

    @property
    def num_given(self) -> int:
        """Tokens of the answer after which a Baton engine is told to continue."""
        return len(self._told_ids) if self.continues_after_told else 0

    def sieve_of_decode(self, consumer: Engine) -> TurnSieve:
        if not self.continues_after_told or (self._given is not None and not self._given.has_begun):
            return TurnSieve()
        # A Baton engine counts the tokens that it was given as answer, vLLM counts them as prompt.
        return ContinuedSieve(0 if consumer.kind == "baton" else len(self._told_ids))

    @property
    def num_known(self) -> int | None:
        """Tokens that the client has. None: the engine does not name them."""
        record = self._record
        if record is None:
            return len(self._told_ids) if self.is_told else None
        return len(self._told_ids) + len(record.token_ids) if record.is_complete else None

    @property
    def is_finished(self) -> bool:
        """Whether the client has all tokens and the finish reason."""
        is_first_last = self._first is not None and self._first.is_last
        return is_first_last or (self._record is not None and self._record.is_finished)

    @property
    def wants_usage(self) -> bool:
        return bool((self._body.get("stream_options") or {}).get("include_usage"))

    @property
    def record(self) -> TokenRecord | None:
        """Record of the running decode leg's stream. None: it cannot be resumed."""
        return self._record

    def given(self) -> Given | None:
        """The part of the answer that the client has now. None: no engine can give only the rest.

        A Baton engine takes the tokens as output of its own. vLLM takes them as prompt, so the text must
        not end inside a character.
        """
        record = self._record
        if record is None or not record.is_complete or self.is_finished:
            return None
        kind = record.kind
        told_ids, prompt = self._told_ids, self._prompt_token_ids or record.prompt_token_ids
        num_new = len(record.token_ids)
        if "vllm" in (kind, self._origin):
            kind, num_new = "vllm", record.num_shown
            if prompt is None or (self.shows_token_ids and num_new < len(record.token_ids)):
                return None
        has_begun = bool(told_ids or record.num_events or (self._given and self._given.has_begun))
        token_ids = [*told_ids, *record.token_ids[:num_new]]
        limit = self.dialect.limit_of(self._body)
        if limit is not None and len(token_ids) >= limit:
            return None  # The engine has not ended the answer at its limit.
        return Given(kind, has_begun, token_ids, prompt)

    def resume_after(self, given: Given) -> None:
        """Ask another engine for the rest from now on."""
        self._given, self._mode, self._record = given, FirstTokenMode.CONTINUE, None

    @property
    def _origin(self) -> Kind | None:
        """Kind of the engines that gave what the client has."""
        if self._given is not None:
            return self._given.kind
        return "vllm" if self._kept is not None else None
