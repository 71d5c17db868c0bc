"""Sends a streamed completion request to a server and records when each token arrives."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from baton.core.errors import BatonError

REQUEST_TIMEOUT_S = 300.0  # A long prompt on a small machine.


class AskingError(BatonError):
    """The server did not answer as expected."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to one request. Times are in seconds since the request was sent."""

    token_ids: tuple[int, ...]
    arrived_s: tuple[float, ...]  # One per token; tokens of one event arrive together.

    @property
    def first_token_s(self) -> float:
        return self.arrived_s[0]

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
) -> Answer:
    """Send a greedy request that no stop token ends, and read the whole answer. Raises AskingError.

    `timeout_s`: for each piece of the answer; None: the client's timeout.
    """
    body: dict[str, Any] = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
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
        with client.stream("POST", f"{url}/v1/completions", json=body, timeout=timeout) as response:
            if response.status_code != 200:
                raise AskingError(f"{url} answered {response.status_code}: {response.read().decode()[:500]}")
            for event in _events(response):
                if "error" in event:
                    raise AskingError(f"{url} ended its answer with an error: {event['error']}")
                new = [
                    token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()
                ]
                token_ids += new
                arrived_s += [time.monotonic() - sent_at] * len(new)
    except httpx.HTTPError as error:
        raise AskingError(f"{url} did not answer: {type(error).__name__}: {error}") from error
    if len(token_ids) != max_tokens:
        raise AskingError(f"{url} gave {len(token_ids)} tokens instead of {max_tokens}")
    return Answer(tuple(token_ids), tuple(arrived_s))


def lend(client: httpx.Client, url: str, prompt: Sequence[int], transfer_id: str) -> None:
    """Make a producer prefill and lend blocks that no consumer fetches. Raises AskingError."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    body = {"prompt": list(prompt), "max_tokens": 1, "temperature": 0, "kv_transfer_params": params}
    response = client.post(f"{url}/v1/completions", json=body)
    if response.status_code != 200 or not response.json().get("kv_transfer_params"):
        raise AskingError(f"{url} has lent no blocks: {response.status_code} {response.text[:500]}")


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data:") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data:"))
