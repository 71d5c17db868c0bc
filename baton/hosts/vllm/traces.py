"""Spans of handoffs in vLLM: those of a Baton engine (`baton.tracing.handoff`), beside vLLM's `llm_request`.

The caller's span is in the request's trace headers, which vLLM keeps if it traces itself, or in
`traceparent` and `tracestate` of `kv_transfer_params`, where Baton's router writes it too.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from baton.connectors.extra_config import FIELD
from baton.connectors.pull.scheduler import boot_clock
from baton.core.errors import ConfigError
from baton.hosts.vllm.settings import PluginSettings
from baton.tracing import find_endpoint, open_tracer
from baton.tracing.handoff import FetchTimeline, fetch_of, fetch_spans, install_span, loan_of, loan_span
from baton.tracing.span import Span, Tracer
from baton.tracing.trace_context import HEADERS, SpanRef

logger = logging.getLogger(__name__)

SERVICE: Final = "baton-connector"
OPEN_MAX: Final = 4096  # Sampled requests that are remembered. The spans of older ones are lost.
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP: Final = "http/protobuf"


def open_traces(vllm_config: Any) -> TransferTraces | None:
    """None: nothing is traced. Raises ConfigError for a wrong `otlp_traces_endpoint`."""
    transfer = vllm_config.kv_transfer_config
    ours, _ = PluginSettings.split(transfer.kv_connector_extra_config)
    of_vllm = getattr(vllm_config, "observability_config", None)
    endpoint = endpoint_of(ours.otlp_traces_endpoint, of_vllm, os.environ)
    tracer = open_tracer(SERVICE, endpoint)
    return None if tracer is None else TransferTraces(tracer, transfer.engine_id)


def endpoint_of(option: str | None, of_vllm: Any, environment: Mapping[str, str]) -> str | None:
    """Where spans go: the option, vLLM's `--otlp-traces-endpoint`, or OpenTelemetry's standard variables.

    Spans leave by HTTP. Where vLLM or the variables ask for gRPC, the log has advice, and nothing is traced.
    Raises ConfigError for a wrong option.
    """
    if option is not None:
        try:
            return find_endpoint(option, environment)
        except ConfigError as error:
            raise ConfigError(error.problem, field=f"{FIELD}.otlp_traces_endpoint") from error
    vllms: str | None = getattr(of_vllm, "otlp_traces_endpoint", None)
    asked = vllms or _first(environment, _ENDPOINTS)
    if not asked:
        return None
    # vLLM exports by gRPC unless the first variable has another protocol; the standard's default is HTTP.
    protocol = (
        _first(environment, _PROTOCOLS[:1]) or "grpc" if vllms else _first(environment, _PROTOCOLS) or _HTTP
    )
    try:
        if protocol != _HTTP:
            raise ConfigError(f"{asked} is for {protocol}", field="otlp_traces_endpoint")
        return find_endpoint(vllms, environment)
    except ConfigError as error:
        logger.warning(
            "no spans of handoffs: %s; set otlp_traces_endpoint in kv_connector_extra_config", error
        )
        return None


def _first(environment: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)


class TransferTraces:
    """Spans of one scheduler half; implements `baton.connectors.host_view.Traces`.

    An error is logged and costs spans only.
    """

    def __init__(
        self,
        tracer: Tracer,
        engine_id: str,
        *,
        clock: Callable[[], float] = boot_clock,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock`: the records' clock. `wall_clock`: seconds since 1970."""
        self._tracer, self._engine_id = tracer, engine_id
        self._clock, self._wall_clock = clock, wall_clock
        self._parents: OrderedDict[str, SpanRef] = OrderedDict()  # Parents of sampled requests, oldest first.
        self._delivered: dict[str, FetchTimeline] = {}  # Fetches of requests that no step has had since.

    def begin(self, request: Any) -> None:
        try:
            ref = self._tracer.begin(_context_of(request), "kv_transfer")
        except Exception:  # Spans may be lost; a request may not.
            logger.exception("no spans of request %s", request.request_id)
            return
        if not ref.is_sampled:
            return
        # The spans stand beside vLLM's, below the caller's, or at the top of a trace of their own.
        self._parents[request.request_id] = msgspec.structs.replace(ref, span_id=ref.parent_id)
        while len(self._parents) > OPEN_MAX:
            oldest, _ = self._parents.popitem(last=False)
            self._delivered.pop(oldest, None)

    def record(self, name: str, record: Mapping[str, Any]) -> None:
        request_id = record["request_id"]
        self._export(request_id, lambda parent, at_s: self._spans_of(name, record, parent, at_s))

    def scheduled(self, num_scheduled_tokens: Mapping[str, int], now: float) -> None:
        for request_id in self._delivered.keys() & num_scheduled_tokens.keys():
            fetch = self._delivered.pop(request_id)
            self._export(request_id, partial(install_span, fetch, scheduled_s=now))

    def close(self) -> None:
        self._tracer.close()

    def _spans_of(self, name: str, record: Mapping[str, Any], parent: SpanRef, at_s: float) -> list[Span]:
        request_id: str = record["request_id"]
        more = {"gen_ai.request.id": request_id, "kv_transfer.engine": self._engine_id}
        if name == "loans":
            return loan_span(loan_of(record, 0.0), parent, at_s, more)
        fetch = fetch_of(record, 0.0)
        if fetch.is_delivered:
            self._delivered[request_id] = fetch
        return fetch_spans(fetch, parent, at_s, more)

    def _export(self, request_id: str, make: Callable[[SpanRef, float], list[Span]]) -> None:
        """`make` gets the parent, and the time since 1970 when the records' clock was 0."""
        if (parent := self._parents.get(request_id)) is None:
            return
        try:
            self._tracer.export(make(parent, self._wall_clock() - self._clock()))
        except Exception:  # Spans may be lost; a request may not.
            logger.exception("spans of request %s are lost", request_id)


def _context_of(request: Any) -> dict[str, str]:
    headers = getattr(request, "trace_headers", None) or request.kv_transfer_params or {}
    if not isinstance(headers, Mapping):
        return {}
    return {name: text for name in HEADERS if isinstance(text := headers.get(name), str)}
