"""Exports spans with OpenTelemetry's SDK. Needs the extra `otel`; see `baton.tracing.span`.

The SDK reads its standard variables: OTEL_TRACES_SAMPLER and its argument (default: parentbased_always_on),
OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_BSP_*, OTEL_EXPORTER_OTLP_* besides the endpoint. The
protocol is OTLP over HTTP with protobuf.
"""

import logging
import threading
from collections.abc import Iterable, Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from opentelemetry.trace.status import Status, StatusCode

from baton.tracing.span import Span
from baton.tracing.trace_context import SpanRef, new_span_id, new_trace_id, parent_in

logger = logging.getLogger(__name__)

LAST_SPANS_S = 5.0  # Time to export what is left, when the process ends.
_UNKNOWN = "unknown_service"  # The SDK's default.
_SCOPE = InstrumentationScope("baton")
_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
_OK = Status()
_SAMPLED, _NOT_SAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)


class OtelTracer:
    """Implements `baton.tracing.span.Tracer`."""

    def __init__(self, service_name: str, endpoint: str) -> None:
        resource = Resource.create()  # Has OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES.
        if str(resource.attributes.get(SERVICE_NAME, _UNKNOWN)).startswith(_UNKNOWN):
            resource = resource.merge(Resource({SERVICE_NAME: service_name}))
        self._resource = resource
        self._sampler = TracerProvider(resource=resource, shutdown_on_exit=False).sampler
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))

    def begin(self, headers: Mapping[str, str], name: str) -> SpanRef:
        parent, context = parent_in(headers), None
        if parent is None:
            trace_id, parent_id, state = new_trace_id(), "", ""
        else:
            trace_id, parent_id, state = parent.trace_id, parent.span_id, parent.state
            context = set_span_in_context(NonRecordingSpan(_context_of(parent, parent_id, is_remote=True)))
        result = self._sampler.should_sample(context, int(trace_id, 16), name)
        return SpanRef(trace_id, new_span_id(), parent_id, state, result.decision.is_sampled())

    def export(self, spans: Iterable[Span]) -> None:
        for span in spans:
            self._processor.on_end(self._finished(span))

    def _finished(self, span: Span) -> ReadableSpan:
        """Make the SDK's span. Begin and end are known: nothing has to be started, made current and ended."""
        ref = span.ref
        return ReadableSpan(
            name=span.name,
            context=_context_of(ref, ref.span_id, is_remote=False),
            parent=_context_of(ref, ref.parent_id, is_remote=True) if ref.parent_id else None,
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(event.name, event.attributes, _nanoseconds(event.at_s)) for event in span.events],
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else _OK,
            start_time=_nanoseconds(span.start_s),
            end_time=_nanoseconds(span.end_s),
            instrumentation_scope=_SCOPE,
        )

    def close(self) -> None:
        # The SDK's own limit is 30 s, and a daemon thread does not hold up the end of the process.
        last = threading.Thread(target=self._processor.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(LAST_SPANS_S)
        if last.is_alive():
            logger.warning("the last spans were not exported in %g s", LAST_SPANS_S)


def _context_of(ref: SpanRef, span_id: str, *, is_remote: bool) -> SpanContext:
    return SpanContext(
        int(ref.trace_id, 16),
        int(span_id, 16),
        is_remote,
        _SAMPLED if ref.is_sampled else _NOT_SAMPLED,
        TraceState.from_header([ref.state]) if ref.state else None,
    )


def _nanoseconds(at_s: float) -> int:
    return int(at_s * 1e9)
