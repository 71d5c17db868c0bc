"""`cached_tokens` in push: hits of both engines' caches, and no token that P computed for this request."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.transfer_params import cached_tokens
from baton.router.request.tokens.stream import count_prefill_hits
from tests.router.baton_fakes import baton, introduced_system, speaker, stream
from tests.router.fakes import TICKET, System

COUNTS = st.integers(0, 100)
LENT = {**TICKET, "baton_cached_tokens": 64}


def usage_of(cached: int, transferred: int) -> dict[str, Any]:
    details = {"cached_tokens": cached, "transferred_tokens": transferred}
    return {"prompt_tokens": 151, "completion_tokens": 3, "prompt_tokens_details": details}


@given(own=COUNTS, transferred=COUNTS, at_prefill=COUNTS)
def test_between_the_decode_engines_hits_and_all_that_it_did_not_compute(
    own: int, transferred: int, at_prefill: int
) -> None:
    found = cached_tokens(own, transferred, at_prefill)
    assert own <= found <= own + transferred
    assert found <= max(own, at_prefill)
    assert cached_tokens(own, transferred, 0) == own
    assert cached_tokens(own, 0, at_prefill) == own


def test_only_the_number_changes() -> None:
    answer = {"id": "a", "choices": [{"text": "x"}], "usage": usage_of(16, 134)}
    counted = count_prefill_hits(json.dumps(answer).encode(), LENT)
    assert counted is not None
    usage = json.loads(bytes(counted["usage"]))
    assert usage == usage_of(64, 134)
    assert json.loads(bytes(counted["choices"])) == answer["choices"]
    assert list(counted) == list(answer)


@pytest.mark.parametrize(
    ("usage", "lent"),
    [
        (usage_of(16, 134), TICKET),  # P had no hits.
        (usage_of(16, 134), {"baton_cached_tokens": "64"}),
        ({"prompt_tokens": 151, "transferred_tokens": 134}, LENT),
        ({"prompt_tokens_details": {"transferred_tokens": 134}}, LENT),
        ({"prompt_tokens_details": {"cached_tokens": None, "transferred_tokens": 134}}, LENT),
        ({"prompt_tokens_details": ["transferred_tokens"]}, LENT),
        (["transferred_tokens"], LENT),
    ],
)
def test_what_says_no_such_number_stays_as_it_is(usage: Any, lent: dict[str, Any]) -> None:
    assert count_prefill_hits(json.dumps({"usage": usage}).encode(), lent) is None
    assert count_prefill_hits(b'"transferred_tokens"', lent) is None
    assert count_prefill_hits(b'{"transferred_tokens"', lent) is None


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("first_token", [False, True])
async def test_a_push_shows_the_prefill_engines_hits(path: str, is_stream: bool, first_token: bool) -> None:
    gate = asyncio.Event()
    p, d = baton("p", num_cached=64), baton("d", gate=gate, usage=usage_of(16, 134))
    async with introduced_system([p], [d], mode="push", first_token=first_token) as s:
        asking = asyncio.create_task(usages(s, path, is_stream=is_stream))
        while 'prefills_total{reason="",where="remote"} 1.0' not in (await s.client.get("/metrics")).text:
            pass  # Wait until the router has read P's answer.
        gate.set()
        *so_far, last = await asking
    assert "baton_introduction" in speaker(d).legs[0]
    assert last == usage_of(64, 134)
    assert so_far == [{"completion_tokens": n} for n in (1, 2, 3)][: 3 * is_stream]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_decode_engines_number_stands_if_the_prefill_engine_has_not_answered(
    is_stream: bool,
) -> None:
    p, d = baton("p", num_cached=64, gate=asyncio.Event()), baton("d", usage=usage_of(16, 0))
    async with introduced_system([p], [d], mode="push") as s:
        *_, last = await usages(s, "/v1/completions", is_stream=is_stream)
    assert last == usage_of(16, 0)


async def test_in_pull_the_decode_engine_counts() -> None:
    p, d = baton("p", num_cached=64), baton("d", usage=usage_of(16, 134))
    async with introduced_system([p], [d]) as s:
        *_, last = await usages(s, "/v1/completions", is_stream=True)
    assert speaker(d).legs[0]["baton_cached_tokens"] == 64
    assert last == usage_of(16, 134)


async def usages(s: System, path: str, *, is_stream: bool) -> list[dict[str, Any]]:
    """All usages that one answer shows."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {}
    if not is_stream:
        answer = await s.client.post(path, json={"prompt": "hello", **asked})
        return [answer.json()["usage"]]
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = await stream(s, path, stream_options=options, **asked)
    return [chunk["usage"] for chunk in got.events[:-1] if "usage" in chunk]
