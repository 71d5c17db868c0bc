"""A model whose KV can be checked: what a token's KV holds is a number that its whole prefix decides.

    state(tokens 0..i, salt)  24 bits, chained like a hash
    KV of token i             state mixed with layer, head and place, so that no two slots look alike
    next token                the last token's state, modulo the vocabulary

A rank that computes on a wrong, foreign or missing block therefore says another token, or none that exists.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache

import torch

VOCAB = 50  # Of answers, and of prompts behind their first token.
NUM_MARKS = 1 << 20  # Tokens above VOCAB; each example's prompts begin with one of its own.
GARBAGE = VOCAB - 1  # Sampled whenever a rank has computed on something wrong; `next_token` never says it.
POISON = -3.0  # What a rank writes where it would have computed on something wrong.
_MODULUS = 2**23  # float32 tells all integers below 2**24 apart.


@lru_cache(maxsize=4096)
def _states(tokens: tuple[int, ...], salt: str | None) -> tuple[int, ...]:
    states, state = [], zlib.crc32((salt or "").encode())
    for token in tokens:
        state = zlib.crc32(token.to_bytes(4, "little"), state)
        states.append(state % _MODULUS)
    return tuple(states)


def states_of(tokens: Sequence[int], salt: str | None) -> tuple[int, ...]:
    """One number per token."""
    return _states(tuple(tokens), salt)


def next_token(state: int) -> int:
    return state % (VOCAB - 1)


@lru_cache(maxsize=4096)
def kv_values(states: tuple[int, ...], layer: int, heads: range, width: int) -> torch.Tensor:
    """`[tokens, heads, width]`, float32, to be read only. `heads` are the model's, so that ranks agree."""
    states_T = torch.tensor(states, dtype=torch.int64).view(-1, 1, 1)
    heads_H = torch.arange(heads.start, heads.stop).view(1, -1, 1)
    places_W = torch.arange(width).view(1, 1, -1)
    mixed = states_T * 31 + layer * 1_000_003 + heads_H * 7_919 + places_W * 104_729
    return (mixed % _MODULUS).float()


def state_in(value: float, layer: int, head: int) -> int | None:
    """The state from which `kv_values` makes this first number of a head; None: from none."""
    if value != int(value) or not 0 <= value < _MODULUS:
        return None
    return (int(value) - layer * 1_000_003 - head * 7_919) * pow(31, -1, _MODULUS) % _MODULUS


def expected_tokens(prompt: Sequence[int], salt: str | None, max_tokens: int) -> list[int]:
    """What an engine without any connector answers."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(states_of(tokens, salt)[-1]))
    return tokens[len(prompt) :]
