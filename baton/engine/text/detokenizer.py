"""Incremental detokenizer: emitted text never changes, and no partial character is emitted.

A byte-level token may end in the middle of a character. Decoded then, the text ends with U+FFFD. Such an
end is held back until more tokens complete it. Decoding all tokens for every token would be quadratic, so a
short *window* of tokens is decoded. Its front is cut off where this provably does not change the text:

    window  | i i i i i i i i | i i i i |
              left              right        cut here if text == decode(left) + decode(right)
"""

from collections.abc import Callable, Sequence

_WINDOW_TOKENS = 12  # Try to cut from this length on ...
_KEPT_TOKENS = 4  # ... keeping this many. A character has at most four bytes, so at most four tokens.
_HELD_CHARS = 3  # An incomplete character of n bytes shows as one U+FFFD, or (byte fallback) as n of them.


class IncrementalDetokenizer:
    """The returned pieces, joined and followed by `flush`, equal the decoding of all ids at once.

    There is one exception: sentencepiece's byte fallback decodes a whole sequence of bytes, and a later
    invalid byte changes its earlier characters. Emitted characters do not change.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._emitted = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens. Returns the text that can no longer change; possibly empty."""
        pieces = []
        for token_id in token_ids:
            self._window.append(token_id)
            text = self._decode(self._window)
            certain = _certain_length(text)
            if certain > self._emitted:
                pieces.append(text[self._emitted : certain])
                self._emitted = certain
            if len(self._window) >= _WINDOW_TOKENS:
                self._cut(text)
        return "".join(pieces)

    def flush(self) -> str:
        """Return the held-back text at the end of the stream, including broken characters."""
        rest = self._decode(self._window)[self._emitted :]
        self._window = []
        self._emitted = 0
        return rest

    def _cut(self, text: str) -> None:
        left, right = self._window[:-_KEPT_TOKENS], self._window[-_KEPT_TOKENS:]
        left_text, right_text = self._decode(left), self._decode(right)
        # Some decoders drop the space before the first word.
        for lost in ("", " "):
            front = len(left_text) + len(lost)
            if right_text and front <= self._emitted and left_text + lost + right_text == text:
                self._window = right
                self._emitted -= front
                return


def _certain_length(text: str) -> int:
    stripped = text.rstrip("\ufffd")
    return max(len(stripped), len(text) - _HELD_CHARS)
