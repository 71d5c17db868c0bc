"""Tracing, if it is asked for. A request that is not sampled costs the decision only.

trace_context   the caller's span, in a request's headers: pure
span            finished spans as values, and the tracer's interface
handoff         what a KV connector did for a request: timelines and spans, made of its records
otel            the tracer. It needs OpenTelemetry's packages, which nothing imports without an endpoint
"""

from collections.abc import Mapping

from baton.core.errors import ConfigError
from baton.tracing.span import Tracer


def find_endpoint(option: str | None, environment: Mapping[str, str]) -> str | None:
    """Where spans go: the option, or OpenTelemetry's standard variables. None: nothing is traced.

    Raises ConfigError for what is no http(s) URL, and without the packages of the extra `otel`.
    """
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    base = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    of_base = f"{base.rstrip('/')}/v1/traces" if base else None
    endpoint = option or environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or of_base
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"{endpoint!r} is no http(s) URL; e.g. http://127.0.0.1:4318/v1/traces (OTLP over HTTP)",
            field="otlp_traces_endpoint",
        )
    if not endpoint:
        return None
    try:
        import baton.tracing.otel  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"needs OpenTelemetry ({error}): pip install 'kv-baton[otel]'", field="otlp_traces_endpoint"
        ) from error
    return endpoint


def open_tracer(service_name: str, endpoint: str | None) -> Tracer | None:
    """None: nothing is traced.

    `endpoint`: URL of a collector, such as http://127.0.0.1:4318/v1/traces.
    """
    if endpoint is None:
        return None
    from baton.tracing.otel import OtelTracer

    return OtelTracer(service_name, endpoint)
