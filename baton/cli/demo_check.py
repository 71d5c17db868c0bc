"""Asks the whole system and a single engine the same prompt, and measures the handoff.

The amount moved is the difference of the decode engine's counters, with one request at a time.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton.cli.demo_prompts import DemoPrompt
from baton.core.errors import BatonError

REQUEST_TIMEOUT_S = 60.0


class DemoError(BatonError):
    """The system answered with an error, or not at all."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of one engine since it started."""

    moved_bytes: float
    transfer_s: float  # From the admission of a request to the delivery of its blocks.
    wire_s: float  # The part of it that is the copy.
    cached_tokens: float


@dataclass(frozen=True, slots=True)
class Outcome:
    prompt: DemoPrompt
    must_move: bool  # It has blocks that the decode engine cannot have.
    expected: tuple[int, ...]
    got: tuple[int, ...]
    first_token_s: float
    cached_tokens: int
    moved_bytes: int
    transfer_s: float
    wire_s: float

    @property
    def is_equal(self) -> bool:
        return bool(self.expected) and self.expected == self.got

    @property
    def was_not_moved(self) -> bool:
        return self.must_move and self.moved_bytes == 0

    @property
    def is_good(self) -> bool:
        return self.is_equal and not self.was_not_moved

    @property
    def bytes_per_s(self) -> float | None:
        return self.moved_bytes / self.wire_s if self.moved_bytes and self.wire_s else None


class Checker:
    def __init__(
        self, *, router_url: str, decode_urls: Sequence[str], single_url: str, max_tokens: int
    ) -> None:
        self._router_url = router_url
        self._decode_urls = decode_urls
        self._single_url = single_url
        self._max_tokens = max_tokens
        self._client = httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False)

    def close(self) -> None:
        self._client.close()

    def check(self, prompt: DemoPrompt, *, must_move: bool) -> Outcome:
        expected, _ = self._ask(self._single_url, prompt)
        before = self._counters()
        got, first_token_s = self._ask(self._router_url, prompt)
        after = self._counters()
        return Outcome(
            prompt=prompt,
            must_move=must_move,
            expected=expected,
            got=got,
            first_token_s=first_token_s,
            cached_tokens=round(after.cached_tokens - before.cached_tokens),
            moved_bytes=round(after.moved_bytes - before.moved_bytes),
            transfer_s=after.transfer_s - before.transfer_s,
            wire_s=after.wire_s - before.wire_s,
        )

    def _ask(self, url: str, prompt: DemoPrompt) -> tuple[tuple[int, ...], float]:
        return ask(self._client, url, prompt, self._max_tokens)

    def _counters(self) -> Counters:
        names = (
            "baton:kv_transfer_bytes_total",
            "baton:kv_transfer_seconds_sum",
            "baton:kv_transfer_wire_seconds_sum",
            "baton:prefix_cache_hits_total",
        )
        sums = dict.fromkeys(names, 0.0)
        for url in self._decode_urls:
            for sample in samples(self._client, url):
                if sample.name in sums:
                    sums[sample.name] += sample.value
        return Counters(*sums.values())


def ask(client: httpx.Client, url: str, prompt: DemoPrompt, max_tokens: int) -> tuple[tuple[int, ...], float]:
    """Send the prompt; return the tokens and the time to the first one. Raises DemoError."""
    body = {
        "prompt": list(prompt.token_ids),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,  # Answers to random prompts may end anywhere; all must have one length.
        "stream": True,
        "return_token_ids": True,
    }
    token_ids: list[int] = []
    first_token_s = 0.0
    sent_at_s = time.monotonic()
    try:
        with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise DemoError(f"{url} answered with {response.status_code}: {response.read().decode()}")
            for event in _events(response):
                if "error" in event:
                    raise DemoError(f"{url} ended its answer with an error: {event['error']['message']}")
                new = [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
                if new and not token_ids:
                    first_token_s = time.monotonic() - sent_at_s
                token_ids += new
    except httpx.HTTPError as error:
        raise DemoError(f"{url} did not answer: {type(error).__name__}: {error}") from error
    return tuple(token_ids), first_token_s


def samples(client: httpx.Client, url: str) -> Iterator[Sample]:
    """Yield all samples of an engine's `/metrics`."""
    text = client.get(f"{url}/metrics").raise_for_status().text
    for family in text_string_to_metric_families(text):
        yield from family.samples


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data:") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data:"))
