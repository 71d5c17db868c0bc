"""Log-probabilities in the formats of the two APIs."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec

from baton.engine.api import PromptLogprobs, TokenLogprob, TokenLogprobs
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
    """Formats tokens as text, each decoded alone and special ones by name, or all as `token_id:<id>`."""

    def __init__(self, tokenizer: Tokenizer, *, as_token_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids

    def _token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else self._tokenizer.token_text(token_id)

    def num_chars(self, token_ids: Sequence[int]) -> int:
        """Return the characters of tokens, for the offset of those after them."""
        return sum(len(self._token(token_id)) for token_id in token_ids)

    def completion(
        self, logprobs: Sequence[TokenLogprobs], *, num_top: int, offset: int = 0
    ) -> CompletionLogprobs:
        """`offset`: characters of the tokens before these."""
        tokens = [self._token(entry.chosen.token_id) for entry in logprobs]
        return CompletionLogprobs(
            text_offset=_offsets(tokens, offset),
            token_logprobs=[_finite(entry.chosen) for entry in logprobs],
            tokens=tokens,
            top_logprobs=[self._top_by_token(entry, num_top) for entry in logprobs],
        )

    async def echo(
        self, first_token_id: int, prompt: PromptLogprobs, output: Sequence[TokenLogprobs], *, num_top: int
    ) -> CompletionLogprobs:
        """Format a whole prompt, whose first token has no log-probability, and the output after it."""
        tokens = [self._token(first_token_id)]
        token_logprobs: list[float | None] = [None]
        top_logprobs: list[dict[str, float] | None] = [None]
        async for entries in _slices(prompt, output):
            part = self.completion(entries, num_top=num_top)
            tokens += part.tokens
            token_logprobs += part.token_logprobs
            top_logprobs += part.top_logprobs
        return CompletionLogprobs(
            text_offset=_offsets(tokens, 0),
            token_logprobs=token_logprobs,
            tokens=tokens,
            top_logprobs=top_logprobs,
        )

    async def prompt(self, logprobs: PromptLogprobs) -> msgspec.Raw:
        """Format all tokens of a prompt as JSON, in slices; the first token has no log-probability."""
        rows = [b"null"]
        async for entries in _slices(logprobs):
            rows += (msgspec.json.encode(self._of_prompt(entry)) for entry in entries)
        return msgspec.Raw(b"[%b]" % b",".join(rows))

    def _of_prompt(self, entry: TokenLogprobs) -> dict[int, PromptLogprob]:
        return {
            candidate.token_id: PromptLogprob(
                _finite(candidate), candidate.rank, self._tokenizer.token_text(candidate.token_id)
            )
            for candidate in (entry.chosen, *entry.top)
        }

    def _top_by_token(self, entry: TokenLogprobs, num_top: int) -> dict[str, float]:
        """Map the most likely tokens to their log-probabilities.

        As in OpenAI's API, the chosen token is included even if it is not among the most likely.
        """
        shown: dict[str, float] = {}
        for candidate in (*entry.top[:num_top], entry.chosen):
            # Two tokens can have the same text; the likelier one is kept.
            shown.setdefault(self._token(candidate.token_id), _finite(candidate))
        return shown

    def chat(self, logprobs: Sequence[TokenLogprobs], *, num_top: int) -> ChatLogprobs:
        content = []
        for entry in logprobs:
            token = self._token(entry.chosen.token_id)
            top = [self._top(candidate) for candidate in entry.top[:num_top]]
            # As in vLLM, the bytes are those of the text.
            text = self._tokenizer.token_text(entry.chosen.token_id)
            content.append(ChatTokenLogprob(token, _finite(entry.chosen), list(text.encode()), top))
        return ChatLogprobs(content)

    def _top(self, candidate: TokenLogprob) -> TopLogprob:
        token = self._token(candidate.token_id)
        return TopLogprob(token, _finite(candidate), list(token.encode()))


async def _slices(
    prompt: PromptLogprobs, output: Sequence[TokenLogprobs] = ()
) -> AsyncIterator[Sequence[TokenLogprobs]]:
    """Yield a few rows at a time, so that the event loop can run between them."""
    for start in range(0, len(prompt), ROWS_AT_ONCE):
        yield prompt.rows(start, start + ROWS_AT_ONCE)
        await asyncio.sleep(0)
    yield output


def _offsets(tokens: Sequence[str], offset: int) -> list[int]:
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return offsets


def _finite(entry: TokenLogprob) -> float:
    return max(entry.logprob, LOGPROB_MIN)
