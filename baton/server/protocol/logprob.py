"""`prompt_logprobs` of an answer, in vLLM's words."""

from typing import TypeAlias

import msgspec


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int  # 1 is the most likely token.
    decoded_token: str


ShownPromptLogprobs: TypeAlias = list[dict[int, PromptLogprob] | None]
"""One entry for each token of the prompt, null for the first: the token itself, then the likeliest ones."""
