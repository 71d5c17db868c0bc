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
BROKEN = "\ufffd"  # Stands for bytes that are no character.
_HELD_CHARS = 3  # An incomplete character of n bytes shows as one U+FFFD, or (byte fallback) as n of them.


class IncrementalDetokenizer:
    """The returned pieces, joined and followed by `flush`, equal the decoding of all ids at once.

    There is one exception: sentencepiece's byte fallback decodes a whole sequence of bytes, and a later
    invalid byte changes its earlier characters. Emitted characters do not change.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = ""  # The window's text.

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens. Returns the text that can no longer change; possibly empty."""
        pieces = []
        for token_id in token_ids:
            self._window.append(token_id)
            text = self._decode(self._window)
            pieces.append(new := _text_after(self._shown, text, num_held=_HELD_CHARS))
            self._shown += new
            if len(self._window) >= _WINDOW_TOKENS:
                self._cut(text)
        return "".join(pieces)

    def flush(self) -> str:
        """Return the held-back text at the end of the stream, including broken characters."""
        rest = _text_after(self._shown, self._decode(self._window), num_held=0)
        self._window = []
        self._shown = ""
        return rest

    def _cut(self, text: str) -> None:
        left, right = self._window[:-_KEPT_TOKENS], self._window[-_KEPT_TOKENS:]
        left_text, right_text = self._decode(left), self._decode(right)
        # Some decoders drop the space before the first word.
        for lost in ("", " "):
            front = len(left_text) + len(lost)
            if right_text and front <= len(self._shown) and left_text + lost + right_text == text:
                self._window = right
                self._shown = self._shown[front:]
                return


def _text_after(shown: str, text: str, *, num_held: int) -> str:
    """What of `text` follows the text that is shown, without up to `num_held` bytes that may still change."""
    num_whole = len(text.rstrip(BROKEN))
    if num_whole >= len(shown):
        return text[len(shown) : max(num_whole, len(text) - num_held)]
    # Byte fallback decodes a sequence of bytes as a whole: after a part of a character, earlier characters of
    # the sequence are broken too, one U+FFFD for each byte.
    num_known = sum(1 if char == BROKEN else len(char.encode()) for char in shown[num_whole:])
    return BROKEN * (len(text) - num_whole - num_known - num_held)
