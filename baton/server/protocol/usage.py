"""Token counts of an answer."""

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """`cached_tokens`: prompt tokens that no engine has computed for this request. After a remote prefill,
    the tokens that P or D had in its cache.

    `transferred_tokens` is Baton's own: tokens that a KV connector loaded, cached on P or not.
    """

    cached_tokens: int = 0
    transferred_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET  # Only whole answers have them.

    @classmethod
    def of(cls, num_prompt: int, num_generated: int) -> "Usage":
        return cls(num_prompt, num_generated, num_prompt + num_generated)
