"""Timelines that the router keeps of its last requests: one value each, without prompts or answers."""

from typing import Any

import httpx
import msgspec

from baton.router.request.timeline import RECENT_MAX, RecentRequests, Recorder
from baton.tracing.trace_context import SpanRef, parent_in
from tests.router.baton_fakes import baton, introduced_system
from tests.router.fakes import FakeEngine, System, answers, lends, responds, system

PROMPT = "a secret prompt"


async def timelines(s: System) -> list[dict[str, Any]]:
    answer = await s.client.get("/requests")
    assert PROMPT not in answer.text
    assert "answer" not in answer.json()
    found: list[dict[str, Any]] = answer.json()["requests"]
    return found


async def post(s: System, request_id: str, **body: Any) -> httpx.Response:
    return await s.client.post(
        "/v1/completions",
        json={"prompt": PROMPT, "model": "m", **body},
        headers={"x-request-id": request_id},
    )


async def test_a_handed_over_request_has_two_legs_and_the_times_of_its_answer() -> None:
    async with introduced_system([baton("p")], [baton("d")]) as s:
        assert (await post(s, "r1", stream=True)).status_code == 200
        [one] = await timelines(s)
    assert (one["id"], one["path"], one["model"], one["status"]) == ("r1", "/v1/completions", "m", 200)
    assert (one["prefill"], one["reason"], one["is_stream"]) == ("remote", "", True)
    prefill, decode = one["legs"]
    assert (prefill["role"], decode["role"]) == ("prefill", "decode")
    assert (prefill["outcome"], decode["outcome"]) == ("200", "200")
    assert 0 <= prefill["sent_s"] <= prefill["answered_s"] <= decode["sent_s"] <= decode["answered_s"]
    assert prefill["answered_s"] <= one["first_byte_s"] <= one["last_byte_s"] <= one["ended_s"]
    assert one["output_tokens"] == 3


async def test_a_request_that_an_engine_fails_shows_why_and_the_retry() -> None:
    async with system([FakeEngine(responds(500, {}))], [FakeEngine(answers)]) as s:
        assert (await post(s, "r1")).status_code == 200
        [one] = await timelines(s)
    assert (one["prefill"], one["reason"]) == ("local", "prefill_failed")
    assert [(leg["role"], leg["outcome"]) for leg in one["legs"]] == [("prefill", "500"), ("decode", "200")]


async def test_a_request_that_is_refused_before_any_leg_is_remembered_too() -> None:
    async with system([FakeEngine(lends)], [FakeEngine(answers)]) as s:
        bad = await post(s, "r1", kv_transfer_params={"do_remote_prefill": True})
        assert bad.status_code == 400
        [one] = await timelines(s)
    assert (one["status"], one["legs"], one["first_byte_s"]) == (400, [], None)


async def test_the_latest_request_comes_first_and_has_a_page_with_its_engines() -> None:
    p, d = FakeEngine(lends), FakeEngine(answers)
    async with system([p], [d]) as s:
        await post(s, "r1")
        await post(s, "r/2?")
        assert [one["id"] for one in await timelines(s)] == ["r/2?", "r1"]
        page = (await s.client.get("/requests/r%2F2%3F")).json()
        assert page["request"]["id"] == "r/2?"
        # These engines are of another make and report nothing; it is not an error of the page.
        assert [(one["role"], one["timelines"]) for one in page["engines"]] == [
            ("decode", []),
            ("prefill", []),
        ]
        assert (await s.client.get("/requests/unknown")).status_code == 404
        assert (await s.client.post("/requests", json={})).status_code == 405


async def test_an_engine_of_ours_reports_its_part_of_a_request() -> None:
    part = {"timelines": [{"id": "r1", "scheduled_s": 0.25}]}

    async def page(scope: Any, receive: Any, send: Any) -> None:
        status = 200 if scope["path"] == "/baton/requests/r1" else 404
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": msgspec.json.encode(part)})

    d = FakeEngine(answers)
    async with system([FakeEngine(lends)], [d]) as s:
        await post(s, "r1")
        d.page = page
        engines = (await s.client.get("/requests/r1")).json()["engines"]
    assert engines[0]["timelines"] == part["timelines"]


def recorder_of(number: int) -> Recorder:
    return Recorder(str(number), "GET", "/", received_at_s=0.0, arrived_at_s=float(number), span=None)


def test_the_number_of_remembered_requests_is_bounded() -> None:
    recent = RecentRequests()
    recorders = [recorder_of(number) for number in range(RECENT_MAX + 10)]
    for one in recorders:
        recent.begin(one)
    longest = recent.find(None, 2.0)
    assert [one.id for one in longest] == [str(n) for n in range(RECENT_MAX)]
    assert {(one.status, one.ended_s) for one in longest} == {(None, 2.0)}
    for one in recorders:
        recent.end(one, one.timeline(200, 1.0))
    assert [one.id for one in recent.find(None, 2.0)] == [str(n) for n in range(10, RECENT_MAX + 10)]
    assert recent.find("3", 2.0) == []
    assert [one.id for one in recent.find("11", 2.0)] == ["11"]


# --- W3C Trace Context ------------------------------------------------------------------------------

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_the_callers_span_is_read_and_written_as_the_standard_says() -> None:
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=1"}
    parent = parent_in(headers)
    assert parent == SpanRef(TRACE, SPAN, state="a=1")
    assert parent.headers == headers
    child = parent.child()
    assert (child.trace_id, child.parent_id, child.state) == (TRACE, SPAN, "a=1")
    unsampled = parent_in({"traceparent": f"00-{TRACE}-{SPAN}-00"})
    assert unsampled is not None
    assert not unsampled.is_sampled
    assert parent_in({"traceparent": f"01-{TRACE}-{SPAN}-03-more"}) is not None


def test_a_malformed_traceparent_counts_as_none() -> None:
    for text in (
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
    ):
        assert parent_in({"traceparent": text}) is None, text
    assert parent_in({}) is None
