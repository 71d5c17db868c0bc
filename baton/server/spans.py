"""Spans of a request at one engine, made of its timeline: pure functions.

    llm_request                    server; vLLM's name and attributes
      admission                    the body is checked, and the prompt encoded
      queue                        until its blocks are allocated, or its first step begins
      kv_fetch, install            D's, with parts: `baton.tracing.handoff`
      prefill                      from the first step to the first token, if it computes prompt tokens
      decode                       from the first token to the last one
      kv_loan                      P's; it may end after its parent

A phase that did not happen has no span.
"""

from baton.server.timeline import EngineTimeline
from baton.tracing.handoff import fetch_spans, install_span, loan_span, phase
from baton.tracing.span import Span, known


def spans_of(timeline: EngineTimeline) -> list[Span]:
    """Return the request's spans, and none if it is not sampled."""
    root, fetch, scheduled_s = timeline.span, timeline.fetch, timeline.scheduled_s
    if root is None or timeline.ended_s is None:
        return []
    at_s, first_s = timeline.arrived_at_s, timeline.first_token_s
    left_queue_s = scheduled_s if fetch is None or fetch.allocated_s is None else fetch.allocated_s
    num_computed = timeline.prompt_tokens - timeline.cached_tokens - timeline.loaded_tokens
    spans = [
        _root(timeline),
        *phase("admission", root, at_s, 0.0, timeline.admitted_s),
        *phase("queue", root, at_s, timeline.admitted_s, left_queue_s),
    ]
    if num_computed > 0:
        spans += phase("prefill", root, at_s, scheduled_s, first_s)
    if timeline.output_tokens > 1:
        spans += phase("decode", root, at_s, first_s, timeline.last_token_s)
    if fetch is not None:
        spans += fetch_spans(fetch, root, at_s) + install_span(fetch, root, at_s, scheduled_s)
    return spans


def loan_spans_of(timeline: EngineTimeline) -> list[Span]:
    """Return the spans of a loan that has ended."""
    if timeline.loan is None or timeline.span is None:
        return []
    return loan_span(timeline.loan, timeline.span, timeline.arrived_at_s)


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


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s
