"""Token ids to text as they come: what is emitted never changes, and no half character is ever emitted.

A byte-level token may end in the middle of a character; decoded then, it shows U+FFFD at the end. Such an
end is held back until more tokens say what it is. Decoding all tokens anew each time would be quadratic, so a
short *window* of tokens is decoded, and its front is cut off where that provably changes nothing:

    window  | i i i i i i i i | i i i i |
              left              right        cut here if text == decode(left) + decode(right)
"""

from collections.abc import Callable, Sequence

_WINDOW_TOKENS = 12  # Try to cut from this length on ...
_KEPT_TOKENS = 4  # ... keeping this many. A character has at most four bytes, so at most four tokens.
_HELD_CHARS = 3  # An incomplete character of n bytes shows as one U+FFFD, or (byte fallback) as n of them.


class IncrementalDetokenizer:
    """The pieces returned, joined and followed by `flush`, are what decoding all ids at once gives.

    But for one case: sentencepiece's byte fallback decodes a whole run of bytes, and takes back the good
    characters of a run that a later byte spoils. What was emitted stands.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._emitted = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that has become certain; possibly empty."""
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
        """At the end of the stream: what was held back, broken characters included."""
        rest = self._decode(self._window)[self._emitted :]
        self._window = []
        self._emitted = 0
        return rest

    def _cut(self, text: str) -> None:
        left, right = self._window[:-_KEPT_TOKENS], self._window[-_KEPT_TOKENS:]
        left_text, right_text = self._decode(left), self._decode(right)
        # Some decoders drop the space in front of the first word they decode.
        for lost in ("", " "):
            front = len(left_text) + len(lost)
            if right_text and front <= self._emitted and left_text + lost + right_text == text:
                self._window = right
                self._emitted -= front
                return


def _certain_length(text: str) -> int:
    stripped = text.rstrip("\ufffd")
    return max(len(stripped), len(text) - _HELD_CHARS)
