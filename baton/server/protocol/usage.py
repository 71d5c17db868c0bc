"""How many tokens went in and came out."""

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """`transferred_tokens` is ours: those of the cached ones that a KV connector loaded."""

    cached_tokens: int = 0
    transferred_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
