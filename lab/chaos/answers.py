"""An answer as the client received it, and the functions that read it from HTTP bodies and SSE events."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec


class Answer(msgspec.Struct):
    """One answer. Instants are seconds of the runner's monotonic clock."""

    question: int
    started_s: float
    ended_s: float = 0.0
    status: int | None = None  # HTTP status; None: no response began.
    token_ids: list[int] = []
    logprobs: list[float] = []
    text: str = ""
    is_complete: bool = False  # A whole body arrived, or a stream up to [DONE].
    error: str | None = None  # Message of an error in OpenAI's form, from a body or an event of a stream.
    failure: str | None = None  # The connection failed, or a body could not be read.
    was_left: bool = False  # The client closed the connection on purpose.
    is_hung: bool = False  # The client gave up after its time limit.
    last_event_s: float | None = None  # Instant of the last event of a stream.
    longest_pause_s: float = 0.0  # The longest time between two events of a stream.

    @property
    def waited_s(self) -> float:
        return self.ended_s - self.started_s

    def note_event(self, now_s: float) -> None:
        """Note the arrival of an event of a stream."""
        if self.last_event_s is not None:
            self.longest_pause_s = max(self.longest_pause_s, now_s - self.last_event_s)
        self.last_event_s = now_s

    def add(self, document: object) -> None:
        """Add a body, or one event of a stream: its error, or its tokens and text."""
        if not isinstance(document, Mapping):
            self.failure = f"not a JSON object: {str(document)[:100]}"
        elif "error" in document:
            self.error = _message(document["error"])
            if self.error is None:
                self.failure = f"an error without a message: {str(document)[:200]}"
        else:
            for choice in document.get("choices", ()):
                self._add_choice(choice)

    def _add_choice(self, choice: Mapping[str, Any]) -> None:
        self.token_ids.extend(choice.get("token_ids") or ())
        message = choice.get("delta") or choice.get("message")
        self.text += (message.get("content") or "" if message is not None else choice.get("text")) or ""
        logprobs = choice.get("logprobs") or {}
        if "content" in logprobs:
            self.logprobs.extend(entry["logprob"] for entry in logprobs["content"] or ())
        else:
            self.logprobs.extend(logprobs.get("token_logprobs") or ())


def read_body(answer: Answer, body: bytes) -> None:
    """Read a whole answer or an HTTP error into `answer`."""
    try:
        document = json.loads(body)
    except ValueError:
        answer.failure = f"HTTP {answer.status} with a body that is not JSON: {body[:200]!r}"
        return
    answer.add(document)
    if answer.status != 200 and answer.error is None and answer.failure is None:
        answer.failure = f"HTTP {answer.status} without an error: {body[:200]!r}"
    answer.is_complete = answer.status == 200 and answer.error is None and answer.failure is None


def read_event(answer: Answer, line: str) -> None:
    """Read one line of an SSE stream into `answer`."""
    if not line.startswith("data:"):
        return
    data = line.removeprefix("data:").strip()
    if data == "[DONE]":
        answer.is_complete = answer.error is None
        return
    try:
        answer.add(json.loads(data))
    except ValueError:
        answer.failure = f"the stream has an event that is not JSON: {data[:200]}"


def _message(error: object) -> str | None:
    message = error.get("message") if isinstance(error, Mapping) else None
    return message if isinstance(message, str) and message else None
