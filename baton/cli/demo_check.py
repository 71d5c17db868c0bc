"""Asks the whole system and a single engine the same prompt, and measures the handoff.

The amount moved is the difference of the decode engine's counters, with one request at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton.cli.asking import ask
from baton.cli.demo_prompts import DemoPrompt
from baton.cli.system import SystemPlan

REQUEST_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of one engine since it started."""

    moved_bytes: float
    transfer_s: float  # Time from the admission of a request to the delivery of its blocks.
    wire_s: float  # The part of it that is the copy.
    cached_tokens: float


@dataclass(frozen=True, slots=True)
class Outcome:
    prompt: DemoPrompt
    must_move: bool  # The prompt has blocks that the decode engine cannot have.
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


def check(
    client: httpx.Client, plan: SystemPlan, prompt: DemoPrompt, *, must_move: bool, max_tokens: int
) -> Outcome:
    """Ask the single engine and the router, one after the other. Raises AskingError."""
    expected = ask(client, plan.single[0].url, prompt.token_ids, max_tokens=max_tokens)
    before = decode_counters(client, plan)
    got = ask(client, plan.router_url, prompt.token_ids, max_tokens=max_tokens)
    after = decode_counters(client, plan)
    return Outcome(
        prompt=prompt,
        must_move=must_move,
        expected=expected.token_ids,
        got=got.token_ids,
        first_token_s=got.first_token_s,
        cached_tokens=round(after.cached_tokens - before.cached_tokens),
        moved_bytes=round(after.moved_bytes - before.moved_bytes),
        transfer_s=after.transfer_s - before.transfer_s,
        wire_s=after.wire_s - before.wire_s,
    )


def decode_counters(client: httpx.Client, plan: SystemPlan) -> Counters:
    names = (
        "baton:kv_transfer_bytes_total",
        "baton:kv_transfer_seconds_sum",
        "baton:kv_transfer_wire_seconds_sum",
        "baton:prefix_cache_hits_total",
    )
    sums = dict.fromkeys(names, 0.0)
    for engine in plan.decode:
        for sample in samples(client, engine.url):
            if sample.name in sums:
                sums[sample.name] += sample.value
    return Counters(*sums.values())


def samples(client: httpx.Client, url: str) -> Iterator[Sample]:
    """Yield all samples of an engine's `/metrics`."""
    text = client.get(f"{url}/metrics").raise_for_status().text
    for family in text_string_to_metric_families(text):
        yield from family.samples
