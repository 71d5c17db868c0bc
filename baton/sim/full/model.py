"""A model whose KV can be checked to the last word, and whose next token is a hash of all the KV it reads.

    v(i)       = mix(hash of the KV of tokens 0 .. i-1 as it was read, token i)
    KV of i    = v(i) in another disguise for each layer, head, K and V
    next token = from the hash of the KV of all tokens

A slot that is stale, foreign, unfilled or torn changes the hash, with it the token, and everything that is
computed behind it. What a sound engine says depends on prompt and salt alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

NUM_LAYERS = 2
HEAD_DIM = 1
CONTENT = 2 * HEAD_DIM  # Words of one token, head and layer: K, then V.
WORD_BYTES = 4
VOCAB = 50_021
EOS_IDS = (0, 1, 2)
_U32 = 0xFFFFFFFF


class Model:
    """One checkpoint. Token for token: `[layer, head, K|V]`."""

    def __init__(self, num_kv_heads: int) -> None:
        self.num_kv_heads = num_kv_heads
        self.words_of_token = NUM_LAYERS * num_kv_heads * CONTENT
        disguises = [crc32(b"%d" % index) for index in range(self.words_of_token)]
        self._disguise = sum(word << (32 * index) for index, word in enumerate(disguises))
        self._repeat = sum(1 << (32 * index) for index in range(self.words_of_token))
        self._bytes_of_token = self.words_of_token * WORD_BYTES

    def start(self, salt: str | None) -> int:
        """The hash of no context."""
        return crc32(b"" if salt is None else b"salt" + salt.encode())

    def read(self, context: bytes, salt: str | None) -> int:
        """The hash of this context's KV, as it was read from memory."""
        return crc32(context, self.start(salt))

    def step(self, seen: int, token_id: int) -> tuple[bytes, int]:
        """(KV of the next token, the hash that includes it)."""
        value = (seen * 0x9E3779B1 + token_id * 0x85EBCA6B + 0x27D4EB2F) & _U32
        value ^= value >> 15
        kv = (value * self._repeat ^ self._disguise).to_bytes(self._bytes_of_token, "little")
        return kv, crc32(kv, seen)

    def next_token(self, seen: int) -> int:
        if seen % 16 == 0:
            return EOS_IDS[seen // 16 % len(EOS_IDS)]
        return len(EOS_IDS) + seen % (VOCAB - len(EOS_IDS))

    # --- What a sound engine says and holds -------------------------------------------------------

    def answer(self, prompt: Sequence[int], salt: str | None, max_tokens: int) -> list[int]:
        seen = self.start(salt)
        for token_id in prompt:
            _, seen = self.step(seen, token_id)
        answer: list[int] = []
        while len(answer) < max_tokens:
            answer.append(self.next_token(seen))
            if answer[-1] in EOS_IDS:
                break
            _, seen = self.step(seen, answer[-1])
        return answer

    def kv(self, token_ids: Sequence[int], salt: str | None) -> Words:
        """`[token, layer, head, K|V]`."""
        seen, parts = self.start(salt), []
        for token_id in token_ids:
            kv, seen = self.step(seen, token_id)
            parts.append(kv)
        return self.as_words(b"".join(parts))

    def as_words(self, kv: bytes) -> Words:
        return np.frombuffer(kv, np.uint32).reshape(-1, NUM_LAYERS, self.num_kv_heads, CONTENT)
