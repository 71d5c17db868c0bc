"""How many tokens went in and came out."""

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """`transferred_tokens` is ours: those of the cached ones that a KV connector loaded."""

    cached_tokens: int = 0
    transferred_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET  # Of whole answers only.

    @classmethod
    def of(cls, num_prompt: int, num_generated: int) -> "Usage":
        return cls(num_prompt, num_generated, num_prompt + num_generated)
