"""A model whose KV can be checked to the last word, and whose next token is a hash of all the KV it reads.

    v(i)       = mix(hash of the KV of tokens 0 .. i-1 as it was read, token i)
    KV of i    = v(i) in another disguise for each layer, head, K and V
    next token = from the hash of the KV of all tokens

A slot that is stale, foreign, unfilled or torn changes the hash, and with it the token and all later results.
The answer of a correct engine depends on prompt, salt and weights only. Weights are a number, with which the
hash begins.

Layers with a window (`WindowModel`) are read as far as the window reaches, itself included, and no further:

    window 3       v(i) reads the layer's KV of i-2, i-1      next token reads i-2, i-1, i

A layer with a recurrent state (`STATE` instead of a window) keeps the last token's words only. They are the
state after that token, since v(i) depends on all tokens before it:

    state          v(i) reads the words of i-1                next token reads those of i
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Seen: TypeAlias = Any  # What a model has read so far; opaque to others.
Windows: TypeAlias = tuple[int | None, ...]  # Window of each layer; None: it sees everything.
STATE = 0  # Instead of a window: the layer has a recurrent state.

HEAD_DIM = 1
CONTENT = 2 * HEAD_DIM  # Words of one token, head and layer: K, then V.
WORD_BYTES = 4
VOCAB = 50_021
EOS_IDS = (0, 1, 2)
_U32 = 0xFFFFFFFF


class Model:
    """One checkpoint. Token for token: `[layer, head, K|V]`."""

    def __init__(self, num_kv_heads: int, windows: Windows = (None, None)) -> None:
        self.num_kv_heads = num_kv_heads
        self.windows = windows
        self.num_layers = len(windows)
        self.words_of_token = self.num_layers * num_kv_heads * CONTENT
        disguises = [crc32(b"%d" % index) for index in range(self.words_of_token)]
        self._disguise = sum(word << (32 * index) for index, word in enumerate(disguises))
        self._repeat = sum(1 << (32 * index) for index in range(self.words_of_token))
        self._bytes_of_token = self.words_of_token * WORD_BYTES

    def start(self, salt: str | None, weights: int) -> Seen:
        """What a model has seen without any context."""
        return _first_hash(salt, weights)

    def read(self, context: bytes, salt: str | None, weights: int) -> Seen:
        """What a model has seen of this context's KV, `[token, layer, head, K|V]`, as read from memory."""
        return crc32(context, _first_hash(salt, weights))

    def step(self, seen: Seen, token_id: int) -> tuple[bytes, Seen]:
        """(KV of the next token, what has been seen with it)."""
        kv = self._kv_of(seen, token_id)
        return kv, crc32(kv, seen)

    def next_token(self, seen: Seen) -> int:
        return _token_of(seen)

    def _kv_of(self, seen_hash: int, token_id: int) -> bytes:
        value = (seen_hash * 0x9E3779B1 + token_id * 0x85EBCA6B + 0x27D4EB2F) & _U32
        value ^= value >> 15
        return (value * self._repeat ^ self._disguise).to_bytes(self._bytes_of_token, "little")

    # --- Answer and KV of a sound engine ----------------------------------------------------------

    def answer(self, prompt: Sequence[int], salt: str | None, max_tokens: int, weights: int = 0) -> list[int]:
        answer: list[int] = []
        for token_id in islice(self.tokens_after(prompt, salt, weights), max_tokens):
            answer.append(token_id)
            if token_id in EOS_IDS:
                break
        return answer

    def tokens_after(self, prompt: Sequence[int], salt: str | None, weights: int = 0) -> Iterator[int]:
        """Each next token, also after an EOS."""
        seen = self.start(salt, weights)
        for token_id in prompt:
            _, seen = self.step(seen, token_id)
        while True:
            yield (token_id := self.next_token(seen))
            _, seen = self.step(seen, token_id)

    def kv(self, token_ids: Sequence[int], salt: str | None, weights: int) -> Words:
        """`[token, layer, head, K|V]`."""
        seen, parts = self.start(salt, weights), []
        for token_id in token_ids:
            kv, seen = self.step(seen, token_id)
            parts.append(kv)
        return self.as_words(b"".join(parts))

    def as_words(self, kv: bytes) -> Words:
        return np.frombuffer(kv, np.uint32).reshape(-1, self.num_layers, self.num_kv_heads, CONTENT)


@dataclass(slots=True)
class _Sight:
    """KV of each layer, token after token. Layers that see everything need only its hash."""

    hash_of_all: int
    layers: dict[int, bytearray]  # Layers with a window, by index.


class WindowModel(Model):
    """One checkpoint with windows."""

    def __init__(self, num_kv_heads: int, windows: Windows) -> None:
        super().__init__(num_kv_heads, windows)
        self._stride = num_kv_heads * CONTENT * WORD_BYTES
        self._whole = [layer for layer, window in enumerate(windows) if window is None]

    def start(self, salt: str | None, weights: int) -> Seen:
        layers = {layer: bytearray() for layer, window in enumerate(self.windows) if window is not None}
        return _Sight(_first_hash(salt, weights), layers)

    def read(self, context: bytes, salt: str | None, weights: int) -> Seen:
        sight = self.start(salt, weights)
        for start in range(0, len(context), self._bytes_of_token):
            self._append(sight, context[start : start + self._bytes_of_token])
        return sight

    def step(self, seen: Seen, token_id: int) -> tuple[bytes, Seen]:
        kv = self._kv_of(self._hash(seen, others_only=True), token_id)
        self._append(seen, kv)
        return kv, seen

    def next_token(self, seen: Seen) -> int:
        return _token_of(self._hash(seen, others_only=False))

    def _append(self, sight: _Sight, kv: bytes) -> None:
        for layer in self._whole:
            sight.hash_of_all = crc32(
                kv[layer * self._stride : (layer + 1) * self._stride], sight.hash_of_all
            )
        for layer, earlier in sight.layers.items():
            earlier += kv[layer * self._stride : (layer + 1) * self._stride]

    def _hash(self, sight: _Sight, *, others_only: bool) -> int:
        """`others_only`: the last token of the windows is still to come."""
        found = sight.hash_of_all
        for layer, earlier in sight.layers.items():
            window = self.windows[layer]
            assert window is not None
            num_seen = 1 if window == STATE else window - others_only
            start = len(earlier) - num_seen * self._stride
            found = crc32(earlier[max(0, start) :], found)
        return found


@cache
def model_of(num_kv_heads: int, windows: Windows) -> Model:
    kind = Model if all(window is None for window in windows) else WindowModel
    return kind(num_kv_heads, windows)


def _first_hash(salt: str | None, weights: int) -> int:
    return crc32(b"" if salt is None else b"salt" + salt.encode(), weights)


def _token_of(seen_hash: int) -> int:
    if seen_hash % 16 == 0:
        return EOS_IDS[seen_hash // 16 % len(EOS_IDS)]
    return len(EOS_IDS) + seen_hash % (VOCAB - len(EOS_IDS))
