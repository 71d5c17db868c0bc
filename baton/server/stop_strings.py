"""Stop strings in a stream of text: holds back text that may still become a stop string.

    fed      "the answer is 4"  "2\\nO"           "bs"            "erver"
    shown    "the answer is 4"  "2"  (held "\\nO") ""  (held "\\nObs")  found "\\nObserver": end

The text ends with the stop string that is complete first, or with the longer of two that end together. So the
result does not depend on how the text is cut into pieces.
"""

from collections.abc import Sequence


class StopStringFinder:
    """Takes pieces of text and returns what may be shown. No more text may be fed after a match."""

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
