"""Log-probabilities in the formats of the two APIs."""

import asyncio
import codecs
from collections.abc import AsyncIterator, Iterable, Sequence

import msgspec

from baton.engine.api import PromptLogprobs, TokenLogprob, TokenLogprobs
from baton.engine.text.detokenizer import BROKEN
from baton.engine.text.tokenizer import Tokenizer
from baton.server.protocol.chat import ChatLogprobs, ChatTokenLogprob, TopLogprob
from baton.server.protocol.completion import CompletionLogprobs

ROWS_AT_ONCE = 64  # Rows of a prompt, with 21 tokens each: about 5 ms.
LOGPROB_MIN = -9999.0  # Stands for minus infinity, which JSON cannot represent. vLLM's value.


class PromptLogprob(msgspec.Struct, frozen=True):
    """Entry of `prompt_logprobs` in an answer, in vLLM's format.

    The answer has a list with one element per token of the prompt: null for the first, else an object from
    token ids to entries, the token itself first, then the most likely ones. Answers hold the list as JSON.
    """

    logprob: float
    rank: int  # 1 is the most likely token.
    decoded_token: str


class LogprobFormat:
    """Formats the tokens of one text, which are given in order.

    A token that ends within a character has no text; that of the character is with the token that completes
    it, as in vLLM. Both have their own bytes. An offset is the number of characters before the token's text,
    or before the character that it is a part of.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, as_token_ids: bool = False, skip_special_tokens: bool = True
    ) -> None:
        """`as_token_ids`: show tokens as `token_id:<id>`."""
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids
        self._skips_special = skip_special_tokens
        self._begin(0)

    def _begin(self, num_chars: int) -> None:
        """Begin a text after `num_chars` characters."""
        self._num_chars = num_chars
        self._decoder = _new_decoder()  # Has the bytes of an incomplete character.
        self._is_first = True

    def read(self, token_ids: Iterable[int]) -> None:
        """Take tokens that are not shown."""
        for token_id in token_ids:
            self._read(token_id)

    def completion(
        self, logprobs: Sequence[TokenLogprobs], *, num_top: int, text_end: int | None = None
    ) -> CompletionLogprobs:
        """`text_end`: characters of the whole text, if it has ended, for example before a stop string."""
        tokens: list[str] = []
        offsets: list[int] = []
        tops: list[dict[str, float] | None] = []
        for entry in logprobs:
            tokens.append(self._token(entry.chosen.token_id))
            tops.append(self._top_by_token(entry, num_top))
            offsets.append(self._read(entry.chosen.token_id))
        return CompletionLogprobs(
            text_offset=offsets if text_end is None else [min(offset, text_end) for offset in offsets],
            token_logprobs=[_finite(entry.chosen) for entry in logprobs],
            tokens=tokens,
            top_logprobs=tops,
        )

    async def echo(
        self, text: str, first_token_id: int, prompt: PromptLogprobs, *, num_top: int
    ) -> CompletionLogprobs:
        """Format a whole prompt, whose first token has no log-probability. `text`: what is shown of it."""
        shown = CompletionLogprobs(
            text_offset=[0], token_logprobs=[None], tokens=[self._token(first_token_id)], top_logprobs=[None]
        )
        self._read(first_token_id, text)
        async for entries in _slices(prompt):
            for entry in entries:
                shown.tokens.append(self._token(entry.chosen.token_id))
                shown.top_logprobs.append(self._top_by_token(entry, num_top))
                shown.token_logprobs.append(_finite(entry.chosen))
                shown.text_offset.append(min(self._read(entry.chosen.token_id, text), len(text)))
        self._begin(len(text))
        return shown

    async def prompt(self, first_token_id: int, logprobs: PromptLogprobs) -> msgspec.Raw:
        """Format all tokens of a prompt as JSON, in slices; the first token has no log-probability."""
        rows = [b"null"]
        self._read(first_token_id)
        async for entries in _slices(logprobs):
            for entry in entries:
                rows.append(msgspec.json.encode(self._of_prompt(entry)))
                self._read(entry.chosen.token_id)
        return msgspec.Raw(b"[%b]" % b",".join(rows))

    def _of_prompt(self, entry: TokenLogprobs) -> dict[int, PromptLogprob]:
        return {
            candidate.token_id: PromptLogprob(
                _finite(candidate), candidate.rank, self._text(candidate.token_id)
            )
            for candidate in (entry.chosen, *entry.top)
        }

    def _top_by_token(self, entry: TokenLogprobs, num_top: int) -> dict[str, float]:
        """Map the most likely tokens to their log-probabilities.

        As in OpenAI's API, the chosen token is included even if it is not among the most likely. Its key is
        its entry in `tokens`. Another token whose text is incomplete, or is that of a likelier one, is shown
        as `bytes:\\xe4\\xb8`, and as `token_id:<id>` if that is taken too.
        """
        chosen = entry.chosen.token_id
        own_key = self._token(chosen)
        shown: dict[str, float] = {}
        for candidate in (*entry.top[:num_top], entry.chosen):
            key = own_key
            if (token_id := candidate.token_id) != chosen:
                key = self._token(token_id)
                if not key or BROKEN in key or key == own_key or key in shown:
                    key = "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._bytes(token_id))
                if key == own_key or key in shown:
                    key = _as_token_id(token_id)
            shown[key] = _finite(candidate)
        return shown

    def chat(self, logprobs: Sequence[TokenLogprobs], *, num_top: int) -> ChatLogprobs:
        content = []
        for entry in logprobs:
            top = [self._top(candidate) for candidate in entry.top[:num_top]]
            own = self._top(entry.chosen)
            content.append(ChatTokenLogprob(own.token, own.logprob, own.bytes, top))
            self._read(entry.chosen.token_id)
        return ChatLogprobs(content)

    def _top(self, candidate: TokenLogprob) -> TopLogprob:
        token_id = candidate.token_id
        return TopLogprob(self._token(token_id), _finite(candidate), list(self._bytes(token_id)))

    # --- One token, at the present position ------------------------------------------------------

    def _token(self, token_id: int) -> str:
        return _as_token_id(token_id) if self._as_token_ids else self._text(token_id)

    def _bytes(self, token_id: int) -> bytes:
        if self._skips_special and self._tokenizer.special_text(token_id) is not None:
            return b""
        return self._tokenizer.token_bytes(token_id, is_first=self._is_first)

    def _text(self, token_id: int) -> str:
        """Text of a token here: a special one by name, incomplete characters with those that end them."""
        if (name := self._tokenizer.special_text(token_id)) is not None:
            return name
        own = self._tokenizer.token_bytes(token_id, is_first=self._is_first)
        try:
            return own.decode()
        except UnicodeDecodeError:
            decoder = _new_decoder()
            decoder.setstate(self._decoder.getstate())
            return decoder.decode(own)

    def _read(self, token_id: int, echo: str | None = None) -> int:
        """Move to the end of the token, and return its offset. `echo`: the text, if it is known."""
        name = self._tokenizer.special_text(token_id)
        if name is not None:
            is_shown = not self._skips_special if echo is None else echo.startswith(name, self._num_chars)
            if not is_shown:
                return self._num_chars
        own = self._tokenizer.token_bytes(token_id, is_first=self._is_first)
        start = self._num_chars
        self._num_chars += len(self._decoder.decode(own))
        self._is_first = False
        try:
            return max(start, self._num_chars - len(own.decode()))
        except UnicodeDecodeError:
            return start


def _new_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def _as_token_id(token_id: int) -> str:
    return f"token_id:{token_id}"


async def _slices(prompt: PromptLogprobs) -> AsyncIterator[Sequence[TokenLogprobs]]:
    """Yield a few rows at a time, so that the event loop can run between them."""
    for start in range(0, len(prompt), ROWS_AT_ONCE):
        yield prompt.rows(start, start + ROWS_AT_ONCE)
        await asyncio.sleep(0)


def _finite(entry: TokenLogprob) -> float:
    return max(entry.logprob, LOGPROB_MIN)
