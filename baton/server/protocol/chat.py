"""Request and response types of `/v1/chat/completions`."""

import json
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from baton.core.errors import UserError
from baton.server.protocol.sampling import SamplingFields
from baton.server.protocol.structured import Constraint, constraint_of_call, constraint_of_calls
from baton.server.protocol.usage import Usage

MAX_MESSAGES = 4096

_BILLING_HEADER = "x-anthropic-billing-header"
_CALL = ("id", "function", "type")  # Keys in vLLM's order; other keys follow.
_FUNCTION = ("arguments", "name")

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessageParam(msgspec.Struct, frozen=True, kw_only=True):
    """`reasoning_content` is the old name of `reasoning`; `task` and a developer's `tools` are vLLM's."""

    role: str
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    task: str | None = None
    tools: list[dict[str, Any]] | None = None

    def plain(self, field: str) -> dict[str, Any]:
        """Return the message as a chat template gets it in vLLM. Raises UserError.

        Content is a text or a list of text parts, arguments of tool calls are objects, and reasoning has both
        of its names.
        """
        plain: dict[str, Any] = {"role": self.role, "content": self._content(field)}
        if self.role == "assistant":
            if self.tool_calls:
                plain["tool_calls"] = [
                    _plain_call(call, f"{field}.tool_calls[{index}]")
                    for index, call in enumerate(self.tool_calls)
                ]
            reasoning = self.reasoning if self.reasoning is not None else self.reasoning_content
            if reasoning is not None:
                plain["reasoning"] = plain["reasoning_content"] = reasoning
        elif self.role == "tool" and self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            plain["name"] = self.name
        if self.task is not None:
            plain["task"] = self.task
        if self.role == "developer":
            plain["tools"] = self.tools
        return plain

    def _content(self, field: str) -> str | list[dict[str, str]]:
        if isinstance(self.content, str):
            return [] if (shown := self._shown(self.content)) is None else shown
        parts = []
        for index, part in enumerate(self.content or ()):
            match part:
                case str() as text:
                    pass
                case ContentPart(type="text", text=str() as text):
                    pass
                case ContentPart(type="refusal", refusal=str() as text):
                    pass
                case _:
                    raise UserError(
                        "only parts of type text, with a text, are supported",
                        field=f"{field}.content[{index}]",
                    )
            if (shown := self._shown(text)) is not None:
                parts.append({"type": "text", "text": shown})
        return parts

    def _shown(self, text: str) -> str | None:
        """Return a text without Claude Code's header, as in vLLM; None if nothing else is there.

        The header differs in each request, so no request would find the blocks of another in a cache.
        """
        if self.role != "system" or not text.startswith(_BILLING_HEADER):
            return text
        return text.partition("\n")[2] or None


def _plain_call(call: dict[str, Any], field: str) -> dict[str, Any]:
    """Return a tool call of the history with its arguments as an object, because templates serialize them.

    Arguments that are no JSON object become an empty one, as in vLLM: a model wrote them, not the client.
    """
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise UserError('must be {"type": "function", "function": {...}}', field=field)
    if not isinstance(function.get("name"), str):
        raise UserError("must be a string", field=f"{field}.function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    function = _ordered(
        {**function, "arguments": arguments if isinstance(arguments, dict) else {}}, _FUNCTION
    )
    return _ordered({**call, "function": function}, _CALL)


def _ordered(fields: dict[str, Any], first: tuple[str, ...]) -> dict[str, Any]:
    """Sort keys as vLLM does: a template may write an object as JSON, so their order is part of the
    prompt.
    """
    return {**{key: fields[key] for key in first if key in fields}, **fields}


def plain_messages(messages: list[ChatMessageParam]) -> list[dict[str, Any]]:
    """Return the messages for the chat template. Raises UserError."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise UserError(f"must have 1 to {MAX_MESSAGES} messages", field="messages")
    return [message.plain(f"messages[{index}]") for index, message in enumerate(messages)]


class FunctionDefinition(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None

    def plain(self) -> dict[str, Any]:
        flags = {"strict": self.strict, "defer_loading": self.defer_loading}
        return {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            **{name: flag for name, flag in flags.items() if flag is not None},
        }


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["function"] = "function"
    function: FunctionDefinition
    defer_loading: bool | None = None  # The function's, unless it has its own.

    def plain(self) -> dict[str, Any]:
        function = self.function.plain()
        if self.defer_loading is None:
            return {"type": self.type, "function": function}
        function.setdefault("defer_loading", self.defer_loading)
        return {"type": self.type, "function": function, "defer_loading": self.defer_loading}


def plain_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Return the tools as a chat template gets them in vLLM, with null for missing fields; None without
    tools.
    """
    if not tools:
        return None
    return [tool.plain() for tool in tools]


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    messages: list[ChatMessageParam]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, str]] | None = None
    reasoning_effort: ReasoningEffort | None = None

    @property
    def forced_tools(self) -> list[FunctionDefinition]:
        """Return the tools of which one must be called; none if the model decides. Raises UserError."""
        choice = self.tool_choice
        if choice in (None, "none"):
            return []
        functions = [tool.function for tool in self.tools or ()]
        if not functions:
            raise UserError("needs tools", field="tool_choice")
        match choice:
            case "auto":
                return []
            case "required":
                return functions
            case {"type": "function", "function": {"name": str() as name}}:
                # The model was shown the last one of several with one name last.
                if not (named := [one for one in functions if one.name == name][-1:]):
                    raise UserError(f"has no tool {name!r}", field="tools")
                return named
            case _:
                raise UserError(
                    'must be none, auto, required or {"type": "function", "function": {"name": ...}}',
                    field="tool_choice",
                )

    @property
    def named_tool(self) -> str | None:
        """Return the tool that the answer calls, whose text is then the call's arguments."""
        return self.forced_tools[0].name if isinstance(self.tool_choice, dict) else None

    @property
    def constraint(self) -> Constraint | None:
        if not (forced := self.forced_tools):
            return super().constraint
        if (other := super().constraint) is not None:
            raise UserError("cannot be combined with a tool choice", field=other.field)
        tools = [(one.name, one.parameters) for one in forced]
        if self.named_tool is not None:
            return constraint_of_call(tools[0][1])
        return constraint_of_calls(tools, is_parallel=self.parallel_tool_calls is not False)

    @property
    def template_variables(self) -> dict[str, Any]:
        """Return the variables that the template gets besides messages and tools, as in vLLM."""
        variables = dict(self.chat_template_kwargs or {})
        if self.documents is not None:
            variables["documents"] = self.documents
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
            # Used by templates that think only on demand.
            variables.setdefault("enable_thinking", self.reasoning_effort != "none")
        return variables


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


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class CallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a call in a stream. The first one has the id, the type and the name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str | UnsetType
    type: Literal["function"] = "function"
    function: FunctionDelta


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


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
    prompt_logprobs: msgspec.Raw | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


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
