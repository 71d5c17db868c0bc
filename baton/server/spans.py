"""Spans of a request at one engine, made of its timeline: pure functions.

    llm_request                    server; vLLM's name and attributes
      admission                    the body is checked, and the prompt encoded
      queue                        until its blocks are allocated, or its first step begins
      kv_fetch                     of D: from the claim of the loan to the delivery
        handshake, post, wire, verify
      install                      of D: from the delivery to the first step after it
      prefill                      from the first step to the first token, if it computes prompt tokens
      decode                       from the first token to the last one
      kv_loan                      of P: until the blocks are free again; it may end after its parent

A phase that did not happen has no span.
"""

from baton.http.span import AttributeValue, Span, known
from baton.server.timeline import EngineTimeline, FetchTimeline


def spans_of(timeline: EngineTimeline) -> list[Span]:
    """Empty if the request is not sampled."""
    if timeline.span is None or timeline.ended_s is None:
        return []
    fetch, scheduled_s = timeline.fetch, timeline.scheduled_s
    left_queue_s = scheduled_s if fetch is None or fetch.allocated_s is None else fetch.allocated_s
    num_computed = timeline.prompt_tokens - timeline.cached_tokens - timeline.loaded_tokens
    phases = [
        _phase(timeline, "admission", 0.0, timeline.admitted_s),
        _phase(timeline, "queue", timeline.admitted_s, left_queue_s),
        _phase(timeline, "prefill", scheduled_s, timeline.first_token_s) if num_computed > 0 else None,
        _phase(timeline, "decode", timeline.first_token_s, timeline.last_token_s)
        if timeline.output_tokens > 1
        else None,
    ]
    spans = [_root(timeline), *(span for span in phases if span is not None)]
    return spans if fetch is None else spans + _of_fetch(timeline, fetch)


def loan_spans_of(timeline: EngineTimeline) -> list[Span]:
    """Of a loan that has ended."""
    if (loan := timeline.loan) is None:
        return []
    attributes: dict[str, AttributeValue] = {
        "kv_transfer.outcome": loan.outcome,
        "kv_transfer.blocks": loan.blocks,
    }
    span = _phase(timeline, "kv_loan", loan.lent_s, loan.ended_s, attributes)
    return [] if span is None else [span]


def _root(timeline: EngineTimeline) -> Span:
    assert timeline.span is not None
    assert timeline.ended_s is not None
    scheduled_s, first_s, last_s = timeline.scheduled_s, timeline.first_token_s, timeline.last_token_s
    attributes = known(
        {
            "gen_ai.request.id": timeline.id,
            "gen_ai.response.model": timeline.model,
            "gen_ai.request.max_tokens": timeline.max_tokens,
            "gen_ai.usage.prompt_tokens": timeline.prompt_tokens,
            "gen_ai.usage.completion_tokens": timeline.output_tokens,
            "gen_ai.usage.input_tokens": timeline.prompt_tokens,
            "gen_ai.usage.output_tokens": timeline.output_tokens,
            "gen_ai.latency.time_in_queue": _between(timeline.admitted_s, scheduled_s),
            "gen_ai.latency.time_to_first_token": first_s,
            "gen_ai.latency.e2e": timeline.ended_s,
            "gen_ai.latency.time_in_model_prefill": _between(scheduled_s, first_s),
            "gen_ai.latency.time_in_model_decode": _between(first_s, last_s),
            "gen_ai.latency.time_in_model_inference": _between(scheduled_s, last_s),
            "gen_ai.usage.cache_read.input_tokens": timeline.cached_tokens,
            "kv_transfer.loaded_tokens": timeline.loaded_tokens,
            "gen_ai.response.finish_reasons": (timeline.finish_reason,),
        }
    )
    start_s = timeline.arrived_at_s
    error = timeline.finish_reason if timeline.finish_reason == "error" else ""
    end_s = start_s + timeline.ended_s
    return Span(timeline.span, "llm_request", "server", start_s, end_s, attributes, error=error)


def _of_fetch(timeline: EngineTimeline, fetch: FetchTimeline) -> list[Span]:
    attributes: dict[str, AttributeValue] = {
        "kv_transfer.producer": fetch.producer,
        "kv_transfer.outcome": fetch.outcome,
        "kv_transfer.tokens": fetch.tokens,
        "kv_transfer.bytes": fetch.bytes,
        "kv_transfer.descriptors": fetch.descriptors,
        "kv_transfer.transport": fetch.transport,
    }
    is_delivered = fetch.outcome == "delivered"
    error = "" if is_delivered else fetch.outcome
    whole = _phase(timeline, "kv_fetch", fetch.claimed_s, fetch.ended_s, attributes, error=error)
    if whole is None:
        return []
    on_wire_s = None
    if fetch.started_s is not None and fetch.read_s is not None:
        on_wire_s = max(fetch.started_s, fetch.read_s - fetch.wire_s)
    parts = [
        _phase(timeline, "handshake", fetch.claimed_s, fetch.ready_s, below=whole),
        _phase(timeline, "post", fetch.started_s, on_wire_s, below=whole),
        _phase(timeline, "wire", on_wire_s, fetch.read_s, below=whole),
        _phase(timeline, "verify", fetch.read_s, fetch.ended_s, below=whole) if is_delivered else None,
        _phase(timeline, "install", fetch.ended_s, timeline.scheduled_s) if is_delivered else None,
    ]
    return [whole, *(part for part in parts if part is not None)]


def _phase(
    timeline: EngineTimeline,
    name: str,
    start_s: float | None,
    end_s: float | None,
    attributes: dict[str, AttributeValue] | None = None,
    *,
    below: Span | None = None,
    error: str = "",
) -> Span | None:
    """None: it did not happen."""
    assert timeline.span is not None
    if start_s is None or end_s is None or end_s < start_s:
        return None
    ref = (timeline.span if below is None else below.ref).child()
    at_s = timeline.arrived_at_s
    return Span(ref, name, "internal", at_s + start_s, at_s + end_s, attributes or {}, error=error)


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s
