"""Spans of a request, made of its timeline: a pure function.

    POST /v1/completions           server
      queue                        in the router, if the request waited there
      prefill, decode              client: one for each leg, above the engine's `llm_request`

The attributes have names of OpenTelemetry's conventions for GenAI, of vLLM (`vllm.tracing.SpanAttributes`),
and of llm-d's routing sidecar (`llm_d.pd_proxy.*`).
"""

from baton.router.request.timeline import LegTimeline, RequestTimeline
from baton.tracing.span import AttributeValue, Span, SpanEvent, known
from baton.tracing.trace_context import SpanRef

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
_MS = 1e3


def spans_of(timeline: RequestTimeline) -> list[Span]:
    """The spans of a request. Empty if it is not sampled."""
    ref = timeline.span
    if ref is None:
        return []
    start_s = timeline.arrived_at_s
    spans = [_root(timeline, ref)]
    if timeline.admitted_s is not None:
        spans.append(Span(ref.child(), "queue", "internal", start_s, start_s + timeline.admitted_s))
    first_of = {leg.role: leg for leg in reversed(timeline.legs)}
    prefill, decode = first_of.get("prefill"), first_of.get("decode")
    is_concurrent = prefill is not None and decode is not None and not _is_after(decode, prefill)
    return spans + [_of_leg(timeline, leg, ref, is_concurrent=is_concurrent) for leg in timeline.legs]


def _is_after(leg: LegTimeline, other: LegTimeline) -> bool:
    return other.answered_s is None or leg.sent_s >= other.answered_s


def _root(timeline: RequestTimeline, ref: SpanRef) -> Span:
    assert timeline.status is not None
    last = {leg.role: leg for leg in timeline.legs}
    start_s, first_byte_s = timeline.arrived_at_s, timeline.first_byte_s
    is_remote = timeline.prefill == "remote"
    attributes: dict[str, AttributeValue | None] = {
        "http.request.method": timeline.method,
        "http.response.status_code": timeline.status,
        "url.path": timeline.path,
        "gen_ai.operation.name": _OPERATIONS.get(timeline.path),
        "gen_ai.request.id": timeline.id,
        "gen_ai.request.model": timeline.model or None,
        "gen_ai.usage.input_tokens": timeline.prompt_tokens,
        "gen_ai.usage.output_tokens": timeline.output_tokens,
        "gen_ai.usage.prompt_tokens": timeline.prompt_tokens,
        "gen_ai.usage.completion_tokens": timeline.output_tokens,
        "gen_ai.latency.time_in_queue": timeline.admitted_s,
        "gen_ai.latency.time_to_first_token": first_byte_s if timeline.is_stream else None,
        "gen_ai.latency.e2e": timeline.last_byte_s,
        "llm_d.pd_proxy.request_id": timeline.id,
        "llm_d.pd_proxy.request_path": timeline.path,
        "llm_d.pd_proxy.disaggregation_used": is_remote if timeline.prefill else None,
        "llm_d.pd_proxy.reason": timeline.reason or None,
        "llm_d.pd_proxy.prefill_target": last["prefill"].engine if "prefill" in last else None,
        "llm_d.pd_proxy.decode.target": last["decode"].engine if "decode" in last else None,
        "llm_d.pd_proxy.true_ttft_ms": _ms(first_byte_s if timeline.is_stream else None),
        "llm_d.pd_proxy.total_duration_ms": _ms(timeline.ended_s),
    }
    marks = [
        SpanEvent(mark.name, start_s + mark.at_s, {"detail": mark.detail} if mark.detail else {})
        for mark in timeline.marks
    ]
    if first_byte_s is not None:
        marks.append(SpanEvent("first_byte", start_s + first_byte_s))
    name = f"{timeline.method} {timeline.path}"
    error = f"HTTP {timeline.status}" if timeline.status >= 500 else ""
    return Span(ref, name, "server", start_s, start_s + timeline.ended_s, known(attributes), marks, error)


def _of_leg(timeline: RequestTimeline, leg: LegTimeline, parent: SpanRef, *, is_concurrent: bool) -> Span:
    start_s = timeline.arrived_at_s
    ended_s = leg.ended_s if leg.ended_s is not None else timeline.ended_s
    duration_ms = _ms(ended_s - leg.sent_s)
    status = int(leg.outcome) if leg.outcome.isdigit() else None
    attributes: dict[str, AttributeValue | None] = {
        "http.request.method": "POST",
        "http.response.status_code": status,
        "url.full": leg.engine + timeline.path,
        "leg.outcome": leg.outcome,
        "gen_ai.usage.prompt_tokens": leg.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": leg.cached_tokens,
        "kv_transfer.loaded_tokens": leg.loaded_tokens,
    }
    if leg.role == "prefill":
        attributes |= {
            "llm_d.pd_proxy.request_id": timeline.id,
            "llm_d.pd_proxy.prefill_target": leg.engine,
            "llm_d.pd_proxy.prefill.status_code": status,
            "llm_d.pd_proxy.prefill.duration_ms": duration_ms,
        }
    else:
        attributes |= {
            "llm_d.pd_proxy.request_id": timeline.id,
            "llm_d.pd_proxy.decode.target": leg.engine,
            "llm_d.pd_proxy.decode.streaming": timeline.is_stream,
            "llm_d.pd_proxy.decode.duration_ms": duration_ms,
            "llm_d.pd_proxy.decode.concurrent_with_prefill": is_concurrent,
        }
    events = () if leg.answered_s is None else (SpanEvent("answered", start_s + leg.answered_s),)
    ref = SpanRef(parent.trace_id, leg.span_id, parent.span_id, parent.state)
    is_failed = leg.outcome != "cancelled" and (status is None or status >= 400)
    return Span(
        ref,
        leg.role,
        "client",
        start_s + leg.sent_s,
        start_s + ended_s,
        known(attributes),
        events,
        leg.outcome if is_failed else "",
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * _MS
