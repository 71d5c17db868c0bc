"""Log-probabilities in the two shapes that the two APIs have for them."""

from collections.abc import Sequence

from baton.engine.api import TokenLogprob, TokenLogprobs
from baton.server.protocol.chat import ChatLogprobs, ChatTokenLogprob, TopLogprob
from baton.server.protocol.completion import CompletionLogprobs
from baton.server.protocol.logprob import PromptLogprob, PromptLogprobs
from baton.server.tokens import Tokenizer

LOGPROB_MIN = -9999.0  # Stands for minus infinity, which JSON cannot say. vLLM's value.


class LogprobFormat:
    """Shows tokens as text: each decoded alone, special ones by their names. Or all as `token_id:<id>`."""

    def __init__(self, tokenizer: Tokenizer, *, as_token_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids

    def _token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else self._tokenizer.token_text(token_id)

    def completion(
        self,
        logprobs: Sequence[TokenLogprobs],
        *,
        num_top: int,
        offset: int = 0,
        first_token_id: int | None = None,
    ) -> CompletionLogprobs:
        """`offset`: characters of tokens before these. `first_token_id`: a prompt's first token, which comes
        before those of `logprobs` and has no log-probability."""
        tokens = [self._token(entry.chosen.token_id) for entry in logprobs]
        token_logprobs: list[float | None] = [_finite(entry.chosen) for entry in logprobs]
        top_logprobs: list[dict[str, float] | None] = [
            self._top_by_token(entry, num_top) for entry in logprobs
        ]
        if first_token_id is not None:
            tokens.insert(0, self._token(first_token_id))
            token_logprobs.insert(0, None)
            top_logprobs.insert(0, None)
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=token_logprobs,
            tokens=tokens,
            top_logprobs=top_logprobs,
        )

    def prompt(self, logprobs: Sequence[TokenLogprobs]) -> PromptLogprobs:
        """Of all tokens of a prompt; `logprobs` are those of all but the first."""
        return [None, *(self._of_prompt(entry) for entry in logprobs)]

    def _of_prompt(self, entry: TokenLogprobs) -> dict[int, PromptLogprob]:
        return {
            candidate.token_id: PromptLogprob(
                _finite(candidate), candidate.rank, self._tokenizer.token_text(candidate.token_id)
            )
            for candidate in (entry.chosen, *entry.top)
        }

    def _top_by_token(self, entry: TokenLogprobs, num_top: int) -> dict[str, float]:
        """OpenAI's: the chosen token is among them even if it is not one of the most likely."""
        shown: dict[str, float] = {}
        for candidate in (*entry.top[:num_top], entry.chosen):
            # Two tokens can look the same; the likelier one stands.
            shown.setdefault(self._token(candidate.token_id), _finite(candidate))
        return shown

    def chat(self, logprobs: Sequence[TokenLogprobs], *, num_top: int) -> ChatLogprobs:
        content = []
        for entry in logprobs:
            token = self._token(entry.chosen.token_id)
            top = [self._top(candidate) for candidate in entry.top[:num_top]]
            text = self._tokenizer.token_text(
                entry.chosen.token_id
            )  # As in vLLM, the bytes stay those of text.
            content.append(ChatTokenLogprob(token, _finite(entry.chosen), list(text.encode()), top))
        return ChatLogprobs(content)

    def _top(self, candidate: TokenLogprob) -> TopLogprob:
        token = self._token(candidate.token_id)
        return TopLogprob(token, _finite(candidate), list(token.encode()))


def _finite(entry: TokenLogprob) -> float:
    return max(entry.logprob, LOGPROB_MIN)
