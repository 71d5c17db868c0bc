"""Grammars that constrain an answer: llguidance compiles them, and computes which tokens may come next.

    JSON schema, regex, choice, EBNF --compile_job--> text of a grammar: SamplingParams.grammar
    the text and a vocabulary        --Grammars.begin--> GrammarState: allowed tokens, the chosen one, ...

A state is a function of the grammar and of the tokens of the answer so far. So an engine that computes an
answer again, or goes on with one that another engine has begun, allows the same tokens.

A text of MAX_GRAMMAR_CHARS takes llguidance up to 0.15 s to compile; a prompt of that length takes an engine
longer. LIMITS bound the work for one token: with llguidance's own limits, an ambiguous grammar takes a
quarter of a second for each token of a long answer, and every request of the batch waits for it.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from baton.core.config import ModelConfig
from baton.core.errors import UserError
from baton.engine.api import RequestError
from baton.engine.text.tokenizer import Tokenizer

MAX_GRAMMAR_CHARS = 1 << 17
LIMITS = LLParserLimits(
    max_items_in_row=400,  # Alternatives at one place: tools, for example.
    step_max_items=20_000,
    step_lexer_fuel=50_000,
    verbose_errors=False,
)
NUM_PROBED = 16  # Bytes of an answer that are tried before a grammar is accepted.
NUM_CACHED = 64  # Compiled grammars that are kept.
_SILENT = 0


def compile_job(kind: str, text: str) -> str:
    """The grammar for `SamplingParams.grammar`.

    `kind` and `text`: those of `baton.server.protocol.structured.Constraint`. Raises UserError if the grammar
    is wrong, is too costly, or allows no answer. Runs in a worker process of the server, with the vocabulary
    of bytes: whether a grammar can be compiled does not depend on the tokens.
    """
    if len(text) > MAX_GRAMMAR_CHARS:
        raise UserError(f"has {len(text)} characters as text; at most {MAX_GRAMMAR_CHARS} are allowed")
    try:
        match kind:
            case "regex" | "choice":
                grammar = grammar_from(kind, text)
            case "ebnf":
                grammar = grammar_from("grammar", text)
            case _:
                spaces = kind == "schema"
                grammar = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": spaces})
    except ValueError as error:
        raise UserError(f"cannot constrain an answer: {error}") from error
    probe = _begun(grammar, LLTokenizer("byte"))
    for _ in range(NUM_PROBED):  # A grammar that is too wide fails where its alternatives begin.
        allowed = _allowed(probe)
        if probe.is_stopped() or not allowed.any():
            break
        probe.consume_token(int(allowed.argmax()))
        _check(probe)
    return grammar


def _begun(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Raises UserError."""
    matcher = LLMatcher(tokenizer, grammar, log_level=_SILENT, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # A grammar that allows no answer is noticed now.
    _check(matcher)
    return matcher


def _check(matcher: LLMatcher) -> None:
    """Raises UserError."""
    if matcher.is_error():
        raise UserError(f"cannot constrain an answer: {matcher.get_error()}")


def _allowed(matcher: LLMatcher) -> npt.NDArray[np.bool_]:
    """Bool, for each token of the matcher's vocabulary. An error allows ends only."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(bits, bitorder="little").view(np.bool_)


class Grammars:
    """Grammars over the vocabulary of one model; its tokenizer is read when needed. Not thread-safe."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def begin(self, grammar: str) -> "GrammarState | NoState":
        """The state before the first token. A grammar that no server has checked may have an error."""
        try:
            compiled = self._compiled.get(grammar)
            if compiled is None:
                compiled = self._compiled[grammar] = _begun(grammar, self._vocabulary())
                if len(self._compiled) > NUM_CACHED:
                    self._compiled.popitem(last=False)
        except UserError as error:
            return NoState(RequestError.of_user(error), self._model.vocab_size)
        self._compiled.move_to_end(grammar)
        return GrammarState(compiled, self._model.vocab_size)

    def _vocabulary(self) -> LLTokenizer:
        """Raises UserError."""
        if self._tokenizer is None:
            model = self._model
            if not model.eos_token_ids:
                raise UserError("the model has no end of sequence, so no constrained answer could end")
            tokenizer = Tokenizer.from_folder(model.model)
            size = max(model.vocab_size, tokenizer.vocab_size)
            ends = list(model.eos_token_ids)
            self._tokenizer = LLTokenizer(tokenizer.json_text(), n_vocab=size, eos_token=ends)
        return self._tokenizer


class NoState:
    """Stands for the state of a request that cannot begin; it has to end with `error`."""

    def __init__(self, error: RequestError, vocab_size: int) -> None:
        self.error = error
        self._vocab_size = vocab_size

    def restart(self, output: Sequence[int]) -> None:
        pass

    def accept(self, token_id: int) -> None:
        pass

    def allowed(self) -> npt.NDArray[np.bool_]:
        return np.ones(self._vocab_size, np.bool_)


class GrammarState:
    """State of one answer. After an error it allows every token, and the request must end with `error`."""

    def __init__(self, pristine: LLMatcher, vocab_size: int) -> None:
        self._pristine, self._vocab_size = pristine, vocab_size
        self._matcher = pristine.deep_copy()  # Takes microseconds.
        self._fits_given = True  # The tokens that the answer began with belong to the grammar.

    def restart(self, output: Sequence[int]) -> None:
        """Go to the state after these tokens, from the beginning."""
        self._matcher = self._pristine.deep_copy()
        self._fits_given = self._matcher.consume_tokens(list(output))

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Bool [V]: tokens that may come next. After the grammar's end these are the ends of a sequence."""
        allowed = _allowed(self._matcher)[: self._vocab_size]
        return np.ones_like(allowed) if self._matcher.is_error() else allowed

    @property
    def error(self) -> RequestError | None:
        """Why the answer cannot go on."""
        if not self._matcher.is_error():
            return None
        if not self._fits_given:
            return RequestError("the answer began in another engine, with tokens that its grammar forbids")
        return RequestError(
            f"the grammar is too costly at this place of the answer: {self._matcher.get_error()}",
            is_users=True,
        )
