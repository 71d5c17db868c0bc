"""Request and response types of `/tokenize` and `/detokenize`, as in vLLM."""

from typing import Any

import msgspec

from baton.core.errors import UserError
from baton.server.protocol.chat import ChatMessageParam, Tool


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessageParam] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise UserError("give either prompt or messages", field="prompt")


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str
