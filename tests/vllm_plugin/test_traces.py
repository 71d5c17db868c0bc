"""Spans of a handoff in vLLM, and where they go."""

from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from baton.core.config import EngineConfig
from baton.core.errors import ConfigError
from baton.hosts.vllm import traces
from baton.hosts.vllm.traces import TransferTraces, endpoint_of
from baton.tracing.span import Span
from baton.tracing.trace_context import SpanRef, new_span_id, new_trace_id, parent_in
from tests.vllm_plugin.world import VllmEngine, VllmWorld

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "a=1"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-00"}
TOKENS = list(range(10, 21))
WALL_S = 1_700_000_000.0


class FakeTracer:
    """Samples what has no parent, too."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.is_broken = self.is_closed = False

    def begin(self, headers: Mapping[str, str], name: str) -> SpanRef:
        parent = parent_in(headers)
        if parent is None:
            return SpanRef(new_trace_id(), new_span_id())
        return SpanRef(parent.trace_id, new_span_id(), parent.span_id, parent.state, parent.is_sampled)

    def export(self, spans: Iterable[Span]) -> None:
        if self.is_broken:
            raise RuntimeError("the exporter is broken")
        self.spans += spans

    def close(self) -> None:
        self.is_closed = True


class TracedEngine(VllmEngine):
    def make_traces(self, config: EngineConfig) -> TransferTraces:
        self.tracer = FakeTracer()
        assert config.kv_transfer_config is not None
        name = config.kv_transfer_config.engine_id
        return TransferTraces(
            self.tracer, name, clock=lambda: self.world.now, wall_clock=lambda: WALL_S + self.world.now
        )

    def lend(self, **request: Any) -> dict[str, Any]:
        params = {"do_remote_decode": True, **request.pop("context", {})}
        return self.prefill("p-r", TOKENS, params=params, **request)

    def compute_step(self, *request_ids: str) -> None:
        step: Any = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(request_ids, 1), total_num_scheduled_tokens=len(request_ids)
        )
        self.half.build_connector_meta(step)

    @property
    def named(self) -> dict[str, Span]:
        return {span.name: span for span in self.tracer.spans}


class TracedWorld(VllmWorld):
    engine_kind = TracedEngine


@pytest.fixture
def pair() -> Iterator[tuple[TracedWorld, TracedEngine, TracedEngine]]:
    world = TracedWorld()
    p, d = world.engine("p"), world.engine("d")
    assert isinstance(p, TracedEngine)
    assert isinstance(d, TracedEngine)
    yield world, p, d
    world.close()


Pair = tuple[TracedWorld, TracedEngine, TracedEngine]


def hand_over(pair: Pair, **context: str) -> None:
    world, p, d = pair
    request = d.fetch("d-r", TOKENS, {**p.lend(context=context), **context})
    world.settle()
    d.compute_step("d-r", "another")
    d.compute_step("d-r")
    d.read_out(request)
    world.assert_settles_whole()


def test_a_handoff_is_spans_below_the_callers_on_both_sides(pair: Pair) -> None:
    _, p, d = pair
    hand_over(pair, **SAMPLED)
    assert list(d.named) == ["kv_fetch", "handshake", "post", "wire", "verify", "install"]
    assert len(d.tracer.spans) == 6, "a later step installs nothing"
    fetch, install = d.named["kv_fetch"], d.named["install"]
    assert {span.ref.trace_id for span in d.tracer.spans} == {TRACE}
    assert fetch.ref.parent_id == install.ref.parent_id == CALLER
    assert fetch.ref.state == "a=1"
    assert {d.named[part].ref.parent_id for part in ("handshake", "post", "wire", "verify")} == {
        fetch.ref.span_id
    }
    assert fetch.attributes["kv_transfer.producer"] == "p"
    assert fetch.attributes["kv_transfer.engine"] == "d"
    assert fetch.attributes["gen_ai.request.id"] == "d-r"
    assert WALL_S + 1000.0 <= fetch.start_s <= fetch.end_s == install.start_s <= install.end_s
    [loan] = p.tracer.spans
    assert (loan.name, loan.ref.trace_id, loan.ref.parent_id) == ("kv_loan", TRACE, CALLER)
    assert loan.attributes["kv_transfer.outcome"] == "released"


def test_the_headers_that_vllm_keeps_come_before_the_params(pair: Pair) -> None:
    world, p, d = pair
    d.fetch("d-r", TOKENS, {**p.lend(), **UNSAMPLED}, trace_headers=SAMPLED)
    world.settle()
    assert d.named["kv_fetch"].ref.parent_id == CALLER


def test_a_request_that_its_caller_does_not_sample_has_no_spans(pair: Pair) -> None:
    _, p, d = pair
    hand_over(pair, **UNSAMPLED)
    assert p.tracer.spans == d.tracer.spans == []


@pytest.mark.parametrize("context", [{}, {"traceparent": "no context"}, {"traceparent": 7}])
def test_without_a_callers_span_a_trace_begins_here(pair: Pair, context: dict[str, Any]) -> None:
    hand_over(pair, **context)
    _, p, d = pair
    assert d.named["kv_fetch"].ref.parent_id == d.named["install"].ref.parent_id == ""
    assert d.named["wire"].ref.parent_id == d.named["kv_fetch"].ref.span_id
    assert len(p.tracer.spans) == 1


def test_a_fetch_that_fails_has_a_span_with_its_reason_and_installs_nothing(pair: Pair) -> None:
    world, p, d = pair
    params = p.lend()
    for worker in p.workers:
        p.kill_rank(worker)
    d.fetch("d-r", TOKENS, {**params, **SAMPLED})
    world.settle()
    d.compute_step("d-r")
    fetch = d.named["kv_fetch"]
    assert fetch.error == fetch.attributes["kv_transfer.outcome"] != "delivered"
    assert "install" not in d.named


def test_an_error_of_the_tracer_costs_spans_only(pair: Pair) -> None:
    _, p, d = pair
    p.tracer.is_broken = d.tracer.is_broken = True
    hand_over(pair, **SAMPLED)


def test_few_sampled_requests_are_remembered(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "OPEN_MAX", 1)
    world, p, d = pair
    params = p.lend()
    d.fetch("d-r", TOKENS, {**params, **SAMPLED})
    world.settle()
    d.submit("later", TOKENS, {**params, **SAMPLED})
    d.compute_step("d-r")
    assert "install" not in d.named


def test_the_tracer_is_closed_with_the_half(pair: Pair) -> None:
    _, p, _ = pair
    p.half.shutdown()
    assert p.tracer.is_closed


TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
BASE = "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
ANY_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"


@pytest.mark.parametrize(
    ("option", "of_vllm", "environment", "endpoint"),
    [
        (None, None, {}, None),
        ("http://a", "grpc://b:4317", {BASE: "http://c", ANY_PROTOCOL: "grpc"}, "http://a"),
        (None, None, {BASE: "http://c:4318"}, "http://c:4318/v1/traces"),
        (None, None, {TRACES: "http://c"}, "http://c"),
        (None, None, {TRACES: "http://c", ANY_PROTOCOL: "grpc"}, None),
        (None, "http://b", {PROTOCOL: "http/protobuf", TRACES: "http://b"}, "http://b"),
        (None, "http://b", {TRACES: "http://b"}, None),
        (None, "http://b", {PROTOCOL: "grpc"}, None),
        (None, None, {TRACES: "c:4318"}, None),
        ("http://a", None, {"OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_spans_go_to_the_option_or_where_vllms_go_or_as_the_standard_variables_say(
    option: str | None,
    of_vllm: str | None,
    environment: dict[str, str],
    endpoint: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    observability = SimpleNamespace(otlp_traces_endpoint=of_vllm)
    with caplog.at_level("WARNING"):
        assert endpoint_of(option, observability, environment) == endpoint
    is_refused = endpoint is None and (of_vllm or TRACES in environment)
    assert bool(is_refused) == ("set otlp_traces_endpoint" in caplog.text)


def test_a_wrong_option_names_its_field() -> None:
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.otlp_traces_endpoint.*no http"):
        endpoint_of("localhost:4317", None, {})
