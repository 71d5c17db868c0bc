"""Request and response types of `/v1/completions`."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from baton.core.errors import UserError
from baton.server.protocol.sampling import SamplingFields
from baton.server.protocol.usage import Usage

DEFAULT_MAX_TOKENS = 16  # OpenAI's.
MAX_PROMPTS = 1024

Prompt = str | list[int]


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    def prompts(self) -> list[Prompt]:
        """Return each prompt as text or as token ids. Raises UserError."""
        match self.prompt:
            case str() as text:
                return [text]
            case []:
                raise UserError("must not be empty", field="prompt")
            case [int(), *_]:
                return [_one_kind(self.prompt, int, "a token id, like the first element")]
            case [str(), *_]:
                prompts: list[Prompt] = list(_one_kind(self.prompt, str, "a string, like the first element"))
            case _:
                prompts = list(_one_kind(self.prompt, list, "a list of token ids, like the first element"))
        if len(prompts) > MAX_PROMPTS:
            raise UserError(f"at most {MAX_PROMPTS} prompts", field="prompt")
        return prompts


def _one_kind(items: list[Any], kind: type, what: str) -> list[Any]:
    for index, item in enumerate(items):
        if not isinstance(item, kind):
            raise UserError(f"must be {what}", field=f"prompt[{index}]")
    return items


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel lists, one entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of a whole answer or of a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # The stop string or stop token id that ended it.
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: msgspec.Raw | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer or a chunk of a stream; `usage` is unset in chunks unless requested."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
