"""Trace context through the router, and the spans that a collector gets."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.router.request.spans import spans_of
from baton.router.request.timeline import LegTimeline, Mark, RequestTimeline
from baton.tracing import find_endpoint
from baton.tracing.trace_context import SpanRef
from tests.router.baton_fakes import baton, introduced_system
from tests.router.fakes import FakeEngine, System, answers, lends, system
from tests.system.collector import Collector

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
WAIT_S = 60.0


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


async def ask(s: System, flags: str, **body: Any) -> None:
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-{flags}", "tracestate": "a=1"}
    answer = await s.client.post(
        "/v1/completions", json={"prompt": "a secret", "model": "m", **body}, headers=headers
    )
    assert answer.status_code == 200


def received(engine: FakeEngine) -> tuple[str, str]:
    """The trace context in the headers, which the engine's connector finds in the params."""
    call = engine.calls[-1]
    context = call.headers["traceparent"], call.headers.get("tracestate", "")
    if call.raw and (params := call.body.get("kv_transfer_params")):
        assert (params["traceparent"], params.get("tracestate", "")) == context
    return context


async def test_each_leg_of_a_sampled_request_carries_a_span_of_its_own(collector: Collector) -> None:
    p, d = FakeEngine(lends), FakeEngine(answers)
    async with system([p], [d], otlp_traces_endpoint=f"{collector.url}/v1/traces") as s:
        await ask(s, "01")
    (of_p, state), (of_d, _) = received(p), received(d)
    assert state == "a=1"
    root = collector.wait_tree(CALLER, num_spans=3, timeout_s=WAIT_S)
    assert (root.name, root.service, root.trace_id) == ("POST /v1/completions", "baton-router", TRACE)
    legs = {child.name: child.span_id for child in root.children}
    assert of_p == f"00-{TRACE}-{legs['prefill']}-01"
    assert of_d == f"00-{TRACE}-{legs['decode']}-01"
    assert "secret" not in str([node.attributes for node in root.all()])


async def test_legs_of_an_unsampled_request_say_so_and_no_span_is_sent(collector: Collector) -> None:
    p, d = FakeEngine(lends), FakeEngine(answers)
    async with system([p], [d], otlp_traces_endpoint=f"{collector.url}/v1/traces") as s:
        await ask(s, "00")
        assert received(d)[0].startswith(f"00-{TRACE}-")
        assert received(d)[0].endswith("-00")
        await s.client.get("/v1/models", headers={"traceparent": f"00-{TRACE}-{CALLER}-01"})
        assert received(d)[0].endswith("-01")
    assert sorted(span.name for span in collector.spans()) == ["GET /v1/models", "decode"]


async def test_without_tracing_the_context_passes_through_as_it_is() -> None:
    d = FakeEngine(answers)
    async with system([FakeEngine(lends)], [d]) as s:
        await ask(s, "01")
    assert received(d) == (f"00-{TRACE}-{CALLER}-01", "a=1")


async def test_a_stream_that_another_engine_continues_has_both_legs_and_an_event(
    collector: Collector,
) -> None:
    engines = [baton("d0", dies_after=2), baton("d1")]
    async with introduced_system(
        [baton("p")], engines, otlp_traces_endpoint=f"{collector.url}/v1/traces", policy="round_robin"
    ) as s:
        for _ in range(2):  # One of them begins at the engine that dies.
            await ask(s, "01", stream=True, temperature=0)
    resumed = [span for span in collector.spans() if "resumed_streams" in span.events]
    [root] = resumed
    legs = [span for span in collector.spans() if span.parent_id == root.span_id and span.name == "decode"]
    assert len(legs) == 2


def timeline(**changes: Any) -> RequestTimeline:
    fields: dict[str, Any] = {
        "id": "r",
        "method": "POST",
        "path": "/v1/chat/completions",
        "model": "m",
        "is_stream": True,
        "arrived_at_s": 100.0,
        "status": 200,
        "prefill": "remote",
        "reason": "",
        "prompt_tokens": 10,
        "output_tokens": 3,
        "admitted_s": 0.5,
        "first_byte_s": 2.0,
        "last_byte_s": 3.0,
        "ended_s": 3.5,
        "span": SpanRef(TRACE, "a" * 16),
        "marks": (Mark(1.0, "hedges"),),
        "legs": (
            LegTimeline("prefill", "http://p:1", 0.5, 1.5, 2.0, "timeout", span_id="b" * 16),
            LegTimeline("decode", "http://d:1", 1.5, None, None, "cancelled", span_id="c" * 16),
        ),
    }
    return RequestTimeline(**{**fields, **changes})


def test_spans_have_the_times_of_the_timeline_and_the_names_of_the_field() -> None:
    root, queue, prefill, decode = spans_of(timeline())
    assert (root.start_s, root.end_s, root.name) == (100.0, 103.5, "POST /v1/chat/completions")
    assert root.attributes["gen_ai.operation.name"] == "chat"
    assert root.attributes["gen_ai.latency.time_to_first_token"] == 2.0
    assert root.attributes["llm_d.pd_proxy.prefill_target"] == "http://p:1"
    assert [(event.name, event.at_s) for event in root.events] == [("hedges", 101.0), ("first_byte", 102.0)]
    assert (queue.name, queue.end_s, queue.ref.parent_id) == ("queue", 100.5, "a" * 16)
    assert (prefill.error, prefill.ref.span_id, prefill.kind) == ("timeout", "b" * 16, "client")
    # The leg was closed because the client left: it has not failed, and ends with the request.
    assert (decode.error, decode.end_s) == ("", 103.5)
    assert decode.attributes["llm_d.pd_proxy.decode.concurrent_with_prefill"] is False
    assert spans_of(timeline(span=None)) == []


@pytest.mark.parametrize(
    ("option", "environment", "expected"),
    [
        (None, {}, None),
        ("http://a/v1/traces", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b"}, "http://a/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:4318/"}, "http://b:4318/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c"}, "http://c"),
        ("http://a", {"OTEL_SDK_DISABLED": "true"}, None),
        ("http://a", {"OTEL_TRACES_EXPORTER": "none"}, None),
    ],
)
def test_the_endpoint_comes_from_the_option_or_the_standard_variables(
    option: str | None, environment: dict[str, str], expected: str | None
) -> None:
    assert find_endpoint(option, environment) == expected


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="no http"):
        find_endpoint("localhost:4317", {})


def test_without_the_packages_an_endpoint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "baton.tracing.otel", None)
    with pytest.raises(ConfigError, match=r"kv-baton\[otel\]"):
        find_endpoint("http://a", {})


def test_a_router_without_traces_imports_nothing_of_opentelemetry() -> None:
    code = (
        "import sys, baton.router.processes.app\n"
        "print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
