"""The toy model that every engine of the world serves, and what its engines say of themselves."""

import hashlib
from functools import cache

from baton.core.ids import PromptHash
from baton.core.layout import ModelFingerprint
from baton.protocol.handshake import RankCard, encode_ranks
from baton.sim.memory import NUM_HEADS, NUM_LAYERS, Groups, toy_layout

PUBLIC_KEY = bytes(32)  # Of every engine: the simulated network tells the true sender.
KEY = b"the cluster's own key, 32 bytes."
FINGERPRINT = ModelFingerprint(
    model="toy",
    revision="1",
    dtype="float32",
    num_layers=NUM_LAYERS,
    num_kv_heads=NUM_HEADS,
    head_dim=1,
    hash_seed="s",
)


@cache
def rank_cards(num_ranks: int, num_blocks: int, groups: Groups) -> bytes:
    return encode_ranks(
        [
            RankCard(rank, toy_layout(rank, num_ranks, num_blocks, groups), {"toy": b""})
            for rank in range(num_ranks)
        ]
    )


@cache
def hash_of_prompt(prompt: int, num_tokens: int) -> PromptHash:
    return PromptHash(hashlib.sha256(b"%d/%d" % (prompt, num_tokens)).digest())
