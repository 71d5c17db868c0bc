"""Sends a streamed completion request to a server and records when each token arrives."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from baton.core.errors import BatonError


class AskingError(BatonError):
    """The server did not answer as expected."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to one request. Times are in seconds since the request was sent."""

    token_ids: tuple[int, ...]
    arrived_s: tuple[float, ...]  # One per token; tokens of one event arrive together.

    @property
    def first_token_s(self) -> float:
        return self.arrived_s[0] if self.arrived_s else 0.0

    @property
    def second_gap_s(self) -> float:
        return self.arrived_s[1] - self.arrived_s[0]

    @property
    def later_gaps_s(self) -> tuple[float, ...]:
        """Gaps from the second token on: decode steps of one engine, in every mode."""
        return tuple(b - a for a, b in zip(self.arrived_s[1:], self.arrived_s[2:], strict=False))


def ask(
    client: httpx.Client,
    url: str,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    kv_transfer_params: dict[str, Any] | None = None,
    timeout_s: float | None = None,
    request_id: str | None = None,
) -> Answer:
    """Send a greedy request that no stop token ends, and read the whole answer. Raises AskingError.

    `timeout_s`: for each piece of the answer; None: the client's timeout. `request_id`: X-Request-Id.
    """
    body: dict[str, Any] = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,  # All answers must have one length.
        "stream": True,
        "return_token_ids": True,
    }
    if kv_transfer_params is not None:
        body["kv_transfer_params"] = kv_transfer_params
    token_ids: list[int] = []
    arrived_s: list[float] = []
    sent_at = time.monotonic()
    try:
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else httpx.Timeout(timeout_s)
        headers = {"X-Request-Id": request_id} if request_id else {}
        with client.stream(
            "POST", f"{url}/v1/completions", json=body, timeout=timeout, headers=headers
        ) as response:
            if response.status_code != 200:
                raise AskingError(f"{url} answered with {response.status_code}: {response.read().decode()}")
            for event in _events(response):
                if "error" in event:
                    raise AskingError(f"{url} ended its answer with an error: {event['error']['message']}")
                new = [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
                token_ids += new
                arrived_s += [time.monotonic() - sent_at] * len(new)
    except httpx.HTTPError as error:
        raise AskingError(f"{url} did not answer: {type(error).__name__}: {error}") from error
    return Answer(tuple(token_ids), tuple(arrived_s))


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data:") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data:"))
