"""`/v1/chat/completions`: what comes in and what goes out."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from baton.core.errors import UserError
from baton.server.protocol.sampling import SamplingFields
from baton.server.protocol.usage import Usage

MAX_MESSAGES = 4096


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class ChatMessageParam(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None

    def plain(self, field: str) -> dict[str, str]:
        """What a chat template gets: text parts are joined, others refused."""
        match self.content:
            case None:
                content = ""
            case str() as content:
                pass
            case parts:
                for index, part in enumerate(parts):
                    if part.type != "text" or part.text is None:
                        raise UserError(
                            "only parts of type text, with a text, are supported",
                            field=f"{field}.content[{index}]",
                        )
                content = "".join(part.text or "" for part in parts)
        plain = {"role": self.role, "content": content}
        return plain if self.name is None else {**plain, "name": self.name}


def plain_messages(messages: list[ChatMessageParam]) -> list[dict[str, str]]:
    """Raises UserError."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise UserError(f"must have 1 to {MAX_MESSAGES} messages", field="messages")
    return [message.plain(f"messages[{index}]") for index, message in enumerate(messages)]


class ResponseFormat(msgspec.Struct, frozen=True):
    type: str


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    messages: list[ChatMessageParam]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    functions: list[dict[str, Any]] | None = None
    chat_template: str | None = None


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenLogprob] | None
    refusal: None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
