"""Tracing, if it is asked for. A request that is not sampled costs the decision only.

Nothing of OpenTelemetry is imported without an endpoint. `baton.http.otel` has the tracer.
"""

from baton.http.span import Tracer


def open_tracer(service_name: str, endpoint: str | None) -> Tracer | None:
    """None: nothing is traced.

    `endpoint`: URL of a collector, such as http://127.0.0.1:4318/v1/traces.
    """
    if endpoint is None:
        return None
    from baton.http.otel import OtelTracer

    return OtelTracer(service_name, endpoint)
