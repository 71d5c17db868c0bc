"""Dialects: what differs between the endpoints whose requests the router splits. Pure values and functions.

    COMPLETIONS   /v1/completions         chunks with token ids, [DONE]
    CHAT          /v1/chat/completions    chunks with token ids, [DONE]

A dialect says how a prefill leg is made of a request, which part of an answer is its text, which event is the
last one, and how an error looks to the client.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.http.errors import ApiError
from baton.router.values.errors import RouterError
from baton.router.values.sse import DONE_EVENT, is_done, sse_event

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
    texts: Sequence[str] = ()  # Fields with the texts of the prompt. Empty: the prompt is in `prompt`.
    limits: Sequence[str] = ("max_tokens",)  # Fields for the number of output tokens; the first one counts.
    default_limit: int | None = 16
    prefill: Mapping[str, Any] = {"stream": False, "n": 1, "max_tokens": 1}  # Fields of a prefill leg.
    not_for_prefill = _NOT_FOR_PREFILL
    chunk_object = "text_completion"
    text_name = "text"  # The field of a streamed choice's part that has its text.

    def limit_of(self, body: Mapping[str, Any]) -> int | None:
        """The most tokens that the client wants; None: it names no valid limit."""
        asked = (limit for name in self.limits if (limit := body.get(name)) is not None)
        limit = next(asked, body.get("max_tokens", self.default_limit))
        return limit if type(limit) is int and limit >= 1 else None

    def for_prefill(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The client's body for one token."""
        leg = {name: value for name, value in body.items() if name not in self.not_for_prefill}
        return {**leg, **dict.fromkeys(leg.keys() & _LIMITS, 1), **self.prefill}

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
        """A function that gets all events of one stream in order. True: the event is the last one."""
        return is_done

    def error_body(self, error: ApiError) -> Mapping[str, Any]:
        return error.body()

    def error_event(self, message: str, *, status: int = 502) -> bytes:
        """The end of a broken stream: an error that clients raise, then the [DONE] that they wait for."""
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


COMPLETIONS = Dialect()
CHAT = Chat()
DIALECTS: Mapping[str, Dialect] = {dialect.path: dialect for dialect in (COMPLETIONS, CHAT)}
