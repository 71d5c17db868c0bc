"""One answer as the client saw it, and how it is read off HTTP bodies and SSE events."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec


class Answer(msgspec.Struct):
    """Instants are seconds of the runner's monotonic clock."""

    question: int
    started_s: float
    ended_s: float = 0.0
    status: int | None = None  # Of HTTP; None: no answer began.
    token_ids: list[int] = []
    logprobs: list[float] = []
    text: str = ""
    is_complete: bool = False  # A whole body, or a stream up to [DONE].
    error: str | None = None  # In OpenAI's form: of a body, or of an event in a stream.
    failure: str | None = None  # The connection's, or of a body that cannot be read.
    was_left: bool = False  # The client closed the connection on purpose.
    is_hung: bool = False  # The client gave up.

    @property
    def waited_s(self) -> float:
        return self.ended_s - self.started_s

    def add(self, document: object) -> None:
        """Of a body, or of one event of a stream: its error, or what it adds to the answer."""
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
        said = choice.get("delta") or choice.get("message")
        self.text += (said.get("content") or "" if said is not None else choice.get("text")) or ""
        logprobs = choice.get("logprobs") or {}
        if "content" in logprobs:
            self.logprobs.extend(entry["logprob"] for entry in logprobs["content"] or ())
        else:
            self.logprobs.extend(logprobs.get("token_logprobs") or ())


def read_body(answer: Answer, body: bytes) -> None:
    """A whole answer or an HTTP error."""
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
    """One line of an SSE stream."""
    if not line.startswith("data:"):
        return
    data = line.removeprefix("data:").strip()
    if data == "[DONE]":
        answer.is_complete = answer.error is None
        return
    try:
        answer.add(json.loads(data))
    except ValueError:
        answer.failure = f"an event that is not JSON: {data[:200]}"


def _message(error: object) -> str | None:
    message = error.get("message") if isinstance(error, Mapping) else None
    return message if isinstance(message, str) and message else None
