"""How many tokens went in and came out."""

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """`cached_tokens`: no engine has computed them for this request. Of a prompt that a prefill engine has
    computed, those count that it, or this engine, had in its cache.

    `transferred_tokens` is ours: a KV connector loaded them. They may or may not have been cached.
    """

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
