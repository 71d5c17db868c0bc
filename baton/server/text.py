"""Text of one sample: decodes tokens as they come, finds stop strings, and leaves out the stop token."""

from collections.abc import Sequence
from typing import Protocol

from baton.server.stop_strings import StopStringFinder


class Detokenizer(Protocol):
    """Implemented by `baton.engine.text.tokenizer.IncrementalDetokenizer`: holds back incomplete
    characters.
    """

    def push(self, token_ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class SampleText:
    """Decodes tokens fed in order; `stopped_by` is the stop string that ended the text."""

    def __init__(self, detokenizer: Detokenizer, stops: StopStringFinder, *, min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def stopped_by(self) -> str | None:
        return self._stops.found

    def skip(self, token_id: int) -> None:
        """Take a token that another engine generated and showed; it affects only how the next one is
        decoded.
        """
        self._detokenizer.push([token_id])

    def feed(self, token_id: int) -> str:
        """Return the text that may be shown now."""
        self._num_tokens += 1
        text = self._detokenizer.push([token_id])
        if self._num_tokens < self._min_tokens:
            return text  # Before min_tokens no stop string is looked for.
        return self._stops.feed(text)

    def finish(self) -> str:
        """Return the text held back, after the tokens have ended without a stop string.

        The rest of an incomplete character can still complete a stop string.
        """
        rest = self._stops.feed(self._detokenizer.flush())
        return rest if self.stopped_by is not None else rest + self._stops.flush()
