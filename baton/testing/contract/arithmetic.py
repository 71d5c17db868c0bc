"""Toy model with checkable KV: the KV of a token is computed from the token's whole prefix.

    state(tokens 0..i, salt)  24 bits, chained like a hash
    KV of token i             state mixed with layer, head and position in the head, so all slots differ
    next token                the last token's state, modulo the vocabulary

A rank that computes with a wrong, foreign or missing block therefore samples a wrong token.
"""

import zlib
from collections.abc import Sequence
from functools import lru_cache

import torch

VOCAB = 50  # Tokens of answers, and of prompts after their first token.
NUM_MARKS = 1 << 20  # Token ids from VOCAB on; each example's prompts begin with one that is its own.
GARBAGE = VOCAB - 1  # Sampled by a rank that has computed with wrong KV; `next_token` never returns it.
POISON = -3.0  # What a rank writes as KV after it has computed with wrong KV.
_MODULUS = 2**23  # float32 represents all integers below 2**24.


@lru_cache(maxsize=4096)
def _states(tokens: tuple[int, ...], salt: str | None) -> tuple[int, ...]:
    states, state = [], zlib.crc32((salt or "").encode())
    for token in tokens:
        state = zlib.crc32(token.to_bytes(4, "little"), state)
        states.append(state % _MODULUS)
    return tuple(states)


def states_of(tokens: Sequence[int], salt: str | None) -> tuple[int, ...]:
    """Return one state per token."""
    return _states(tuple(tokens), salt)


def next_token(state: int) -> int:
    return state % (VOCAB - 1)


@lru_cache(maxsize=4096)
def kv_values(states: tuple[int, ...], layer: int, heads: range, width: int) -> torch.Tensor:
    """Return float32 KV of shape `[tokens, heads, width]`, read-only. `heads` are global head indices."""
    states_T = torch.tensor(states, dtype=torch.int64).view(-1, 1, 1)
    heads_H = torch.arange(heads.start, heads.stop).view(1, -1, 1)
    places_W = torch.arange(width).view(1, 1, -1)
    mixed = states_T * 31 + layer * 1_000_003 + heads_H * 7_919 + places_W * 104_729
    return (mixed % _MODULUS).float()


def state_in(value: float, layer: int, head: int) -> int | None:
    """Return the state for which `kv_values` begins a head with `value`; None if there is none."""
    if value != int(value) or not 0 <= value < _MODULUS:
        return None
    return (int(value) - layer * 1_000_003 - head * 7_919) * pow(31, -1, _MODULUS) % _MODULUS


def expected_tokens(prompt: Sequence[int], salt: str | None, max_tokens: int) -> list[int]:
    """Return the tokens that an engine without a connector generates."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(states_of(tokens, salt)[-1]))
    return tokens[len(prompt) :]
