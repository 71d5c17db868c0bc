"""Dialects: what differs between the endpoints whose requests the router splits. Pure values and functions.

    COMPLETIONS   /v1/completions         chunks with token ids, [DONE]
    CHAT          /v1/chat/completions    chunks with token ids, [DONE]
    MESSAGES      /v1/messages            Anthropic's: named events without ids, message_stop
    RESPONSES     /v1/responses           numbered events without ids, response.completed

A dialect says which requests one engine has to get whole, how a prefill leg is made of a request, which part
of an answer is its text, which event is the last one, and how an error looks to the client.

Another engine continues a broken stream only after token ids, so the last two dialects end it with an error.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from baton.core.errors import PeerError
from baton.core.json_text import NotJson, decode_json
from baton.http.errors import ApiError
from baton.router.values.errors import RouterError
from baton.router.values.sse import DONE_EVENT, data_of, is_done, sse_event

# Fields that are meaningless or harmful on a leg that computes one token, which no client reads.
_NOT_FOR_PREFILL = frozenset(
    {
        "stream_options",
        "min_tokens",
        "min_completion_tokens",
        "logprobs",
        "top_logprobs",
        "best_of",
        "echo",
        "return_token_ids",
    }
)
_LIMITS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})


class Dialect:
    """The dialect of OpenAI's completions; the others say where they differ."""

    path = "/v1/completions"
    has_token_ids = True  # An answer can have them: P may give the first token, another D the rest.
    is_optional = False  # An engine may lack the path.
    refuses_alike = True  # P refuses a request in the words of an engine that gets it whole.
    texts: Sequence[str] = ()  # Fields with the texts of the prompt. Empty: the prompt is in `prompt`.
    limits: Sequence[str] = ("max_tokens",)  # Fields for the number of output tokens; the first one counts.
    default_limit: int | None = 16
    prefill: Mapping[str, Any] = {"stream": False, "n": 1, "max_tokens": 1}  # Fields of a prefill leg.
    not_for_prefill = _NOT_FOR_PREFILL
    is_numbered = False  # Events of a stream have numbers.
    opening: frozenset[bytes] = frozenset()  # Names of events that an engine sends before it has a token.
    end = "[DONE]"  # The last event, for messages.
    chunk_object = "text_completion"
    text_name = "text"  # The field of a streamed choice's part that has its text.

    def is_whole(self, body: Mapping[str, Any]) -> bool:
        """Whether one engine has to get the request whole, without a prefill leg."""
        return False

    def limit_of(self, body: Mapping[str, Any]) -> int | None:
        """The most tokens that the client wants; None: it names no valid limit."""
        limit = body.get("max_tokens", self.default_limit)
        for name in reversed(self.limits):
            if body.get(name) is not None:
                limit = body[name]
        return limit if type(limit) is int and limit >= 1 else None

    def for_prefill(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The client's body for one token."""
        dropped = self.not_for_prefill
        leg = {name: 1 if name in _LIMITS else value for name, value in body.items() if name not in dropped}
        leg |= self.prefill
        return leg

    # --- The parts of an answer

    def text_of(self, choice: Mapping[str, Any]) -> str | None:
        """The text of a whole answer's choice. None: it has more than text."""
        text = choice.get("text")
        return text if isinstance(text, str) else None

    def part_of(self, choice: Mapping[str, Any]) -> Any:
        """The part of a streamed choice that has the text."""
        return choice

    def opening_of(self, choice: Mapping[str, Any], text: str, prompt: Mapping[str, Any]) -> list[Any]:
        """Chunks, without their heads, with the first text. `prompt`: the ids of the prompt, if asked for."""
        return [{"choices": [{**choice, **prompt, "text": text}]}]

    def with_prompt(
        self, leg: dict[str, Any], ids: Any, params: Mapping[str, Any] | None
    ) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
        """A leg and its transfer params with a prompt of token ids."""
        return {**leg, "prompt": ids}, params

    # --- The end of an answer

    def reads_end(self) -> Callable[[bytes], bool]:
        """A function that gets all events of one stream in order. True: the event is the last one.

        It raises PeerError for an event that cannot follow the ones before it.
        """
        return is_done

    def error_body(self, error: ApiError) -> Mapping[str, Any]:
        return error.body()

    def error_event(self, message: str, *, status: int = 502, num_sent: int = 0) -> bytes:
        """The end of a broken stream: an error that clients raise, then the [DONE] that they wait for.

        `num_sent`: events that the client has.
        """
        return sse_event(RouterError(status, message).body()) + DONE_EVENT


class Chat(Dialect):
    path = "/v1/chat/completions"
    texts = ("messages",)
    limits = ("max_completion_tokens", "max_tokens")
    default_limit = None
    chunk_object = "chat.completion.chunk"
    text_name = "content"

    def text_of(self, choice: Mapping[str, Any]) -> str | None:
        message = choice.get("message")
        if not isinstance(message, Mapping):
            return None
        if any(message.get(key) for key in ("reasoning", "reasoning_content", "tool_calls", "refusal")):
            return None
        content = message.get("content")
        return content if isinstance(content, str) else ("" if content is None else None)

    def part_of(self, choice: Mapping[str, Any]) -> Any:
        return choice.get("delta")

    def opening_of(self, choice: Mapping[str, Any], text: str, prompt: Mapping[str, Any]) -> list[Any]:
        begin = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        first = {"choices": [{**begin, "finish_reason": None}], **prompt}
        return [first, {"choices": [{**choice, "delta": {"content": text}}]}]

    def with_prompt(
        self, leg: dict[str, Any], ids: Any, params: Mapping[str, Any] | None
    ) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
        # vLLM takes a chat's prompt in tokens from these params, and removes it before it uses them.
        return leg, {**(params or {}), "prompt_token_ids": ids}


class _Event(msgspec.Struct):
    type: str = ""
    index: int | None = None
    sequence_number: int | None = None


def _read(event: bytes) -> _Event:
    """Raises PeerError. A comment has no type."""
    try:
        return decode_json(data, _Event) if (data := data_of(event)) else _Event()
    except NotJson as error:
        raise PeerError(f"an event that is no event of an answer: {error}") from error


def _out_of_order(event: _Event) -> PeerError:
    return PeerError(f"an event out of order: {event.type[:40]}")


class Messages(Dialect):
    path = "/v1/messages"
    has_token_ids = False
    is_optional = True
    refuses_alike = False  # P gets one token, which may be too few for the client's thinking budget.
    texts = ("system", "messages", "tools")
    prefill: Mapping[str, Any] = {"stream": False, "max_tokens": 1}
    end = "message_stop"

    def is_whole(self, body: Mapping[str, Any]) -> bool:
        choice = body.get("tool_choice")
        # vLLM fails on the one token of a call of a named tool, because it is no JSON.
        is_named = isinstance(choice, dict) and choice.get("type") == "tool"
        return is_named or body.get("container") is not None

    def reads_end(self) -> Callable[[bytes], bool]:
        return _MessageEvents().is_last

    def error_body(self, error: ApiError) -> Mapping[str, Any]:
        kind = {413: "request_too_large", 500: "api_error", 502: "api_error", 503: "overloaded_error"}
        what = {"type": kind.get(error.status, error.kind), "message": str(error)}
        return {"type": "error", "error": what}

    def error_event(self, message: str, *, status: int = 502, num_sent: int = 0) -> bytes:
        return sse_event(self.error_body(RouterError(status, message)), "error")


class _MessageEvents:
    """The events of one message: its start, content blocks one after the other, its end."""

    def __init__(self) -> None:
        self._has_begun = self._is_open = False
        self._num_blocks = 0

    def is_last(self, event: bytes) -> bool:
        """Raises PeerError."""
        read = _read(event)
        has_begun, is_open, is_this = self._has_begun, self._is_open, read.index == self._num_blocks
        match read.type:
            case "message_start":
                is_right = not has_begun
                self._has_begun = True
            case "content_block_start":
                is_right = has_begun and is_this and not is_open
                self._is_open = True
            case "content_block_delta":
                is_right = is_open and is_this
            case "content_block_stop":
                is_right = is_open and is_this
                self._is_open, self._num_blocks = False, self._num_blocks + 1
            case "message_delta" | "message_stop":
                is_right = has_begun and not is_open
            case kind:
                return kind == "error"  # Others are pings, or new.
        if not is_right:
            raise _out_of_order(read)
        return read.type == "message_stop"


# Tools that the client runs. An engine that runs a tool uses the same ticket for each further prompt.
_CLIENTS_TOOLS = ("function", "custom", "namespace", "local_shell", "shell", "apply_patch")
_KEPT = ("store", "background", "previous_response_id", "conversation", "prompt")  # An engine keeps these.
_ITEM_REFERENCE = b'"item_reference"'


def _is_clients_tool(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") in _CLIENTS_TOOLS


class Responses(Dialect):
    path = "/v1/responses"
    has_token_ids = False
    is_optional = True
    refuses_alike = False
    texts = ("instructions", "input", "tools")
    prefill: Mapping[str, Any] = {"stream": False, "store": False, "max_output_tokens": 1}
    not_for_prefill = _NOT_FOR_PREFILL | {"background", "include"}
    is_numbered = True
    opening = frozenset({b"response.created", b"response.queued", b"response.in_progress"})
    end = "response.completed"

    def is_whole(self, body: Mapping[str, Any]) -> bool:
        if any(body.get(name) not in (None, False) for name in _KEPT):
            return True
        if body.get("truncation") not in (None, "disabled"):
            return True  # An engine cuts the prompt to what the limit of output tokens leaves.
        tools, given = body.get("tools"), body.get("input")
        if tools is not None and not (isinstance(tools, list) and all(map(_is_clients_tool, tools))):
            return True
        return isinstance(given, msgspec.Raw) and _ITEM_REFERENCE in bytes(given)

    def reads_end(self) -> Callable[[bytes], bool]:
        return _NumberedEvents().is_last

    def error_event(self, message: str, *, status: int = 502, num_sent: int = 0) -> bytes:
        error = RouterError(status, message)
        # Clients look for the error in the event itself or, as OpenAI's library does, in its field.
        flat = {"code": error.kind, "message": message, "param": None, "sequence_number": num_sent}
        return sse_event({"type": "error", **flat, **error.body()}, "error")


class _NumberedEvents:
    """The events of one response, whose numbers rise."""

    def __init__(self) -> None:
        self._last = -1

    def is_last(self, event: bytes) -> bool:
        """Raises PeerError."""
        read = _read(event)
        if read.sequence_number is not None:
            if read.sequence_number <= self._last:
                raise _out_of_order(read)
            self._last = read.sequence_number
        return read.type in ("response.completed", "response.incomplete", "response.failed", "error")


COMPLETIONS, CHAT, MESSAGES, RESPONSES = Dialect(), Chat(), Messages(), Responses()
DIALECTS: Mapping[str, Dialect] = {one.path: one for one in (COMPLETIONS, CHAT, MESSAGES, RESPONSES)}


def dialect_at(path: str) -> Dialect:
    """The dialect of errors at a path. OpenAI's at most paths that are never split."""
    return DIALECTS.get(path.removesuffix("/count_tokens"), COMPLETIONS)
