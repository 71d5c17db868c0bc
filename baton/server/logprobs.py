"""Log-probabilities in the two shapes that the two APIs have for them."""

from collections.abc import Sequence

from baton.engine.api import TokenLogprob, TokenLogprobs
from baton.server.protocol.chat import ChatLogprobs, ChatTokenLogprob, TopLogprob
from baton.server.protocol.completion import CompletionLogprobs
from baton.server.tokens import Tokenizer

LOGPROB_MIN = -9999.0  # Stands for minus infinity, which JSON cannot say. vLLM's value.


class LogprobFormat:
    """Shows tokens as text: each decoded alone, special ones by their names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def _token(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)

    def completion(
        self, logprobs: Sequence[TokenLogprobs], *, num_top: int, offset: int
    ) -> CompletionLogprobs:
        """`offset`: characters of tokens before these."""
        tokens = [self._token(entry.chosen.token_id) for entry in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[_finite(entry.chosen) for entry in logprobs],
            tokens=tokens,
            top_logprobs=[self._top_by_token(entry, num_top) for entry in logprobs],
        )

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
            content.append(ChatTokenLogprob(token, _finite(entry.chosen), list(token.encode()), top))
        return ChatLogprobs(content)

    def _top(self, candidate: TokenLogprob) -> TopLogprob:
        token = self._token(candidate.token_id)
        return TopLogprob(token, _finite(candidate), list(token.encode()))


def _finite(entry: TokenLogprob) -> float:
    return max(entry.logprob, LOGPROB_MIN)
