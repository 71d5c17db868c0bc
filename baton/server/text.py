"""One sample's tokens as text: decoded as they come, stop strings found, the stop token left out."""

from collections.abc import Sequence
from typing import Protocol

from baton.server.stop_strings import StopStringFinder


class Detokenizer(Protocol):
    """`baton.engine.text.tokenizer.IncrementalDetokenizer`: holds back incomplete characters."""

    def push(self, token_ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class SampleText:
    """Feed it tokens in order; `stopped_by` tells the stop string that ended it."""

    def __init__(self, detokenizer: Detokenizer, stops: StopStringFinder, *, min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def stopped_by(self) -> str | None:
        return self._stops.found

    def skip(self, token_id: int) -> None:
        """A token that somebody else has said and shown: it decides only how the next one is written."""
        self._detokenizer.push([token_id])

    def feed(self, token_id: int) -> str:
        """The text that may be shown now."""
        self._num_tokens += 1
        text = self._detokenizer.push([token_id])
        if self._num_tokens < self._min_tokens:
            return text  # Too early to end, so not looked at.
        return self._stops.feed(text)

    def finish(self) -> str:
        """What was held back, once the tokens have ended for another reason than a stop string.

        The rest of an incomplete character can still complete a stop string.
        """
        rest = self._stops.feed(self._detokenizer.flush())
        return rest if self.stopped_by is not None else rest + self._stops.flush()
