"""Text of one sample: decodes tokens as they come, finds stop strings, and leaves out the stop token."""

from collections.abc import Sequence

from baton.engine.text.detokenizer import IncrementalDetokenizer


class StopStringFinder:
    r"""Takes pieces of text and returns what may be shown: holds back what may still become a stop string.

        fed      "the answer is 4"  "2\nO"           "bs"            "erver"
        shown    "the answer is 4"  "2"  (held "\nO") ""  (held "\nObs")  found "\nObserver": end

    The text ends with the stop string that is complete first, or with the longer of two that end together. So
    the result does not depend on how the text is cut into pieces. No more text may be fed after a match.
    """

    def __init__(self, strings: Sequence[str], *, include_in_output: bool = False) -> None:
        self._strings = tuple(strings)
        self._include = include_in_output
        self._held = ""
        self.found: str | None = None  # The stop string that ended the text.

    def feed(self, text: str) -> str:
        assert self.found is None, "the text has ended"
        if not self._strings:
            return text
        text = self._held + text
        if (match := self._first_match(text)) is not None:
            start, end = match
            self.found, self._held = text[start:end], ""
            return text[: end if self._include else start]
        held_from = len(text) - self._num_undecided(text)
        self._held = text[held_from:]
        return text[:held_from]

    def flush(self) -> str:
        """Return the text held back, after the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int] | None:
        """Return (start, end) of the occurrence that ends first."""
        found = ((text.find(string), len(string)) for string in self._strings)
        end, start = min(((start + length, start) for start, length in found if start >= 0), default=(0, -1))
        return (start, end) if start >= 0 else None

    def _num_undecided(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        longest = 0
        for string in self._strings:
            start = text.find(string[0], max(0, len(text) - len(string) + 1))
            while 0 <= start < len(text) - longest:
                if string.startswith(text[start:]):
                    longest = len(text) - start
                    break
                start = text.find(string[0], start + 1)
        return longest


class SampleText:
    """Decodes tokens fed in order; `stopped_by` is the stop string that ended the text."""

    def __init__(
        self, detokenizer: IncrementalDetokenizer, stops: StopStringFinder, *, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.num_chars = 0  # Length of the text that was returned.

    @property
    def stopped_by(self) -> str | None:
        return self._stops.found

    def feed(self, token_id: int) -> str:
        """Return the text that may be shown now."""
        self._num_tokens += 1
        text = self._detokenizer.push([token_id])
        if self._num_tokens >= self._min_tokens:  # No stop string is looked for in earlier tokens.
            text = self._stops.feed(text)
        self.num_chars += len(text)
        return text

    def finish(self) -> str:
        """Return the text held back, after the tokens have ended without a stop string.

        The rest of an incomplete character can still complete a stop string.
        """
        rest = self._stops.feed(self._detokenizer.flush())
        if self.stopped_by is None:
            rest += self._stops.flush()
        self.num_chars += len(rest)
        return rest
