"""First tokens of the answer, which P sampled during the prefill, with their logprobs.

P computes the first token anyway. It travels in P's signed ticket, and the consumer continues after it
instead of computing the prompt's last position a second time.
"""

from math import isfinite

import msgspec

MAX_PREFILLED_TOKENS = 64  # A prefill leg asks for one.
MAX_PREFILLED_LOGPROBS = 64  # Logprobs of one token.
MAX_TOKEN_ID = 2**32 - 1
MAX_SAMPLING_BYTES = 32


class PrefilledLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token's logprob, a natural logarithm."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token.

    def __post_init__(self) -> None:
        if not (0 <= self.token_id <= MAX_TOKEN_ID and 0 <= self.rank <= MAX_TOKEN_ID):
            raise ValueError("token_id and rank of a logprob must be in [0, 2**32)")
        if not (isfinite(self.logprob) or self.logprob == -float("inf")):
            raise ValueError(f"a logprob must be finite or -inf, is {self.logprob}")


class PrefilledLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs at one output position: of the chosen token, then of the most likely ones, best first."""

    chosen: PrefilledLogprob
    top: tuple[PrefilledLogprob, ...] = ()

    def __post_init__(self) -> None:
        if len(self.top) > MAX_PREFILLED_LOGPROBS:
            raise ValueError(f"{len(self.top)} logprobs of one token, at most {MAX_PREFILLED_LOGPROBS}")


class PrefilledTokens(msgspec.Struct, frozen=True, array_like=True):
    """The answer's first tokens, sampled with the request's own parameters.

    Only the two hosts can tell, by `sampling`, whether the leg with the ticket would sample the same tokens.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[PrefilledLogprobs, ...] | None = None  # One per token; None if not requested.
    sampling: bytes = b""  # The host's digest of the sampling parameters.

    def __post_init__(self) -> None:
        if not 1 <= len(self.token_ids) <= MAX_PREFILLED_TOKENS:
            raise ValueError(f"{len(self.token_ids)} prefilled tokens, expected 1 to {MAX_PREFILLED_TOKENS}")
        if not all(0 <= token_id <= MAX_TOKEN_ID for token_id in self.token_ids):
            raise ValueError("token ids must be in [0, 2**32)")
        if len(self.sampling) > MAX_SAMPLING_BYTES:
            raise ValueError(f"a digest of {len(self.sampling)} bytes, at most {MAX_SAMPLING_BYTES}")
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.logprobs)} logprobs for {len(self.token_ids)} tokens")
