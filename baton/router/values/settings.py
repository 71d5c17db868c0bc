"""Settings of the router: frozen, validated once, every number with its unit."""

import re
from collections.abc import Iterable, Sequence
from math import inf
from typing import Literal, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import msgspec

from baton.core.errors import ConfigError
from baton.http.registration import Role as Role
from baton.http.settings import HttpSettings
from baton.http.tls import TlsFiles

PEER_SECRET_CHARS_MIN = 16
_NOT_IN_URLS = re.compile(r"[\x00-\x20\x7f\\]")
_ENDPOINT = re.compile(r"tcp://[^\s/]+:(?:\d{1,5}|\*)|ipc://\S+")

EngineKey: TypeAlias = tuple[Role, str]  # The URL has no credentials.
Mode = Literal["pull", "push"]  # push: both legs start at once, and KV moves while it is computed.
# When the decode leg of a push starts. late: when P has answered, or shortly before; auto: late for a vLLM on
# its producer's host.
DecodeLegStart = Literal["auto", "at_once", "late"]
PolicyName = Literal["least_in_flight", "round_robin", "prefix_affinity", "cost"]


class LegTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits of the router's waits. Every wait has one."""

    connect_s: float = 2.0
    prefill_s: float = 120.0  # The whole prefill leg, queueing at the engine included.
    first_byte_s: float = 120.0  # Time to the first byte of a streamed answer.
    answer_s: float = 600.0  # The whole of an answer that is not streamed.
    idle_s: float = 60.0  # Time between two pieces of a stream; also the time that a client may stop reading.
    # How long the router keeps a connection to an engine for a next request. vLLM and uvicorn close theirs
    # after 5 s. It is longer than the time between two probes, so that a probe needs no new connection.
    keepalive_s: float = 3.0
    total_s: float = 3600.0  # One request, all attempts together.

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError("must be positive", field=f"timeouts.{name}")


class ProbeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the router finds out which engines serve."""

    every_s: float = 2.0
    timeout_s: float = 2.0
    down_every_s: float = 0.5  # Probe interval of a down engine: it serves soon after it is back.
    failures_to_eject: int = 3  # Failures in a row. One refused connection is enough.
    silences_to_eject: int = 2  # Probes in a row without an answer. Then its legs are closed, too.
    slow_start_s: float = 3.0  # Time in which the share of requests of a returned engine grows to 1.

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError("must be positive", field=f"probe.{name}")


class OutlierDetection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When errors eject an engine whose /health is good. The names are Envoy's."""

    interval_s: float = 10.0  # The window in which answers count.
    consecutive_5xx: int = 5  # Failed answers in a row. Broken streams, timeouts and 429 count, too.
    failure_percentage_threshold: int = 50
    failure_percentage_request_volume: int = 10  # Answers in the window; with fewer no percentage counts.
    base_ejection_time_s: float = 2.0  # Doubled when the engine fails again after it.
    max_ejection_time_s: float = 30.0
    max_ejection_percent: int = 50  # Share of the engines of one role and model. One always stays.

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError("must be positive", field=f"outlier_detection.{name}")


ANY_ENGINE, HOST = "*", "{host}"


class KVEventsSource(msgspec.Struct, frozen=True):
    """Where an engine publishes its KV events (vLLM's `--kv-events-config`)."""

    url: str  # The engine's URL, without credentials; ANY_ENGINE: each engine that no other source names.
    endpoint: str  # ZeroMQ endpoint, such as tcp://10.0.0.7:5557; HOST stands for that of an engine's URL.
    replay_endpoint: str | None = None  # None: the router forgets an engine's blocks when an event is lost.

    def __post_init__(self) -> None:
        for endpoint in (self.endpoint, self.replay_endpoint):
            if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
                raise ConfigError(
                    f"{endpoint!r} is no endpoint of ZeroMQ; e.g. tcp://10.0.0.7:5557", field="kv_events"
                )
            if endpoint is not None and (HOST in endpoint) is not (self.url == ANY_ENGINE):
                raise ConfigError(
                    f"{endpoint!r}: {HOST} is needed, and allowed, for the engine {ANY_ENGINE} only",
                    field="kv_events",
                )

    def of(self, url: str) -> "KVEventsSource":
        """The source of one engine, from that of ANY_ENGINE."""
        host = urlsplit(url).hostname or ""
        host = f"[{host}]" if ":" in host else host
        replay = None if self.replay_endpoint is None else self.replay_endpoint.replace(HOST, host)
        return KVEventsSource(url, self.endpoint.replace(HOST, host), replay)


def sources_of(named: Sequence[KVEventsSource], urls: Iterable[str]) -> tuple[KVEventsSource, ...]:
    """Sources of engines that have one of their own, and of the other engines in `urls`."""
    sources = {one.url: one for one in named}
    any_engine = sources.pop(ANY_ENGINE, None)
    if any_engine is not None:
        sources |= {url: any_engine.of(url) for url in urls if url not in sources}
    return tuple(sources.values())


class PeerSettings(msgspec.Struct, frozen=True):
    """Other routers of the same engines. They share loads and sessions."""

    bind: str  # ZeroMQ endpoint on which this router publishes, such as tcp://10.0.0.1:5600.
    routers: tuple[str, ...]  # Endpoints of the other routers.
    secret: str  # Secret that all of the routers have.

    def __post_init__(self) -> None:
        for endpoint in (self.bind, *self.routers):
            if not _ENDPOINT.fullmatch(endpoint):
                raise ConfigError(
                    f"{endpoint!r} is no endpoint of ZeroMQ; e.g. tcp://10.0.0.1:5600", field="peers"
                )
        if len(self.secret) < PEER_SECRET_CHARS_MIN:
            raise ConfigError(f"needs at least {PEER_SECRET_CHARS_MIN} characters", field="peers.secret")


class AdmissionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A queue in the router: no engine gets more than it can do soon. See `baton.router.fleet.admission`."""

    max_tokens: int = 0  # Uncomputed prompt tokens from which on an engine gets no other prompt; 0: no cap.
    max_running: int = 0  # Requests of a decode engine at once; 0: no cap.
    max_waiting: int = 1024  # Requests that wait; more get 429.
    ttft_s: float = 60.0  # Longest wait. A request whose first token is predicted later gets 429.
    by_priority: bool = False  # Engines compute urgent prompts first: less urgent prompts do not count.
    least_priority: int = 0  # Least, and thus most urgent, value of `priority` that clients may name.
    tenant_header: str | None = None  # Header that names the tenant; a gateway must set it. None: by API key.
    shares: tuple[tuple[str, float], ...] = ()  # Shares of tenants, compared with 1 of all others.

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_running"):
            if getattr(self, name) < 0:
                raise ConfigError("must not be negative", field=f"admission.{name}")
        if not self.max_tokens and not self.max_running:
            raise ConfigError("needs max_tokens or max_running", field="admission")
        if self.by_priority and not self.max_tokens:
            raise ConfigError("needs max_tokens", field="admission.by_priority")
        if self.max_waiting < 1:
            raise ConfigError("must be at least 1", field="admission.max_waiting")
        if not self.ttft_s > 0:
            raise ConfigError("must be positive", field="admission.ttft_s")
        for tenant, share in self.shares:
            if not 0 < share < inf:
                raise ConfigError(f"{tenant}: must be a positive number", field="admission.shares")


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    prefill_urls: tuple[str, ...]  # Engines at the start. Others join and leave (`values.members`).
    decode_urls: tuple[str, ...]
    has_sources: bool = False  # Engines also come from elsewhere, or may come by registration only.
    reread_roles: tuple[Role, ...] = ()  # Roles whose engines come from a file that the router rereads.
    model_aliases: dict[str, str] = {}  # Names of models, by alias.
    mode: Mode = "pull"
    decode_leg: DecodeLegStart = "auto"
    first_token: bool = True  # The prefill engine gives the first token, where the engines can do that.
    policy: PolicyName = "least_in_flight"
    on_prefill_failure: Literal["local", "fail"] = "local"  # local: the decode engine prefills by itself.
    min_prefill_tokens: int = 0  # Shorter prompts (estimated) go straight to a decode engine; 0: none does.
    prefill_attempts: int = 2
    decode_attempts: int = 2
    resumes: int = 2  # Times that another decode engine continues a stream whose engine fails; 0: never.
    hedge_prefill: bool = True  # A prompt that is late at a prefill engine goes to another, too (in pull).
    kv_events: tuple[KVEventsSource, ...] = ()  # Sources of KV events, for the policy `cost`.
    peers: PeerSettings | None = None
    admission: AdmissionSettings | None = None  # None: every request goes to the engines at once.
    tokenizer: str | None = None  # Folder with tokenizer.json, to look texts up in the engines' caches.
    max_answer_bytes: int = 32 << 20  # Limit of an answer that is not streamed: the router holds it whole.
    drain_timeout_s: float = 30.0  # Time that running requests have to end, when the router is told to stop.
    max_requests: int = 4096  # Requests in flight at once; more get 503.
    doors: HttpSettings = HttpSettings()
    tls: TlsFiles | None = None  # TLS of both ports, and for https engines that ask. None: HTTP without TLS.
    engine_ca: str | None = None  # PEM file of the authorities of https engines; None: the system's.
    checked_hosts: tuple[str, ...] | None = None  # None: any Host header is served; see `baton.http.gate`.
    otlp_traces_endpoint: str | None = None  # Where spans go; None: nothing is traced.
    access_log: str | None = None  # File with a line of JSON for each request; "-": standard output.
    engine_api_key: str | None = None  # Key for requests to engines; None: the client's own key is passed on.
    engine_api_keys: tuple[tuple[str, str], ...] = ()  # Keys of single engines, by URL.
    engine_key_file: str | None = None  # File with both kinds of keys, read again when it changes.
    engines_have_own_key: bool = False  # `engine_api_key` is the first of `doors.api_keys`.
    timeouts: LegTimeouts = LegTimeouts()
    probe: ProbeSettings = ProbeSettings()
    outlier_detection: OutlierDetection = OutlierDetection()

    def __post_init__(self) -> None:
        check_urls(self.prefill_urls, "prefill_urls", may_be_empty=self.has_sources)
        check_urls(self.decode_urls, "decode_urls", may_be_empty=self.has_sources)
        for name in (
            "prefill_attempts",
            "decode_attempts",
            "max_answer_bytes",
            "max_requests",
        ):
            if getattr(self, name) < 1:
                raise ConfigError("must be at least 1", field=name)
        urls = {without_credentials(url) for url in (*self.prefill_urls, *self.decode_urls)}
        for source in self.kv_events:
            if source.url not in (*urls, ANY_ENGINE) and not self.has_sources:
                raise ConfigError(f"{source.url} is no engine of this router", field="kv_events")
        if self.kv_events and self.policy != "cost":
            raise ConfigError('is used with policy "cost" only', field="kv_events")
        for alias, model in self.model_aliases.items():
            if not alias or not model or model in self.model_aliases:
                raise ConfigError(
                    f"{alias!r} must name a model, and not another alias", field="model_aliases"
                )
        if self.resumes < 0:
            raise ConfigError("must not be negative", field="resumes")
        if self.drain_timeout_s < 0:
            raise ConfigError("must not be negative", field="drain_timeout_s")
        if self.min_prefill_tokens < 0:
            raise ConfigError("must not be negative", field="min_prefill_tokens")

    def option_urls(self, role: Role) -> tuple[str, ...]:
        """URLs of engines that stay members as long as the router runs."""
        if role in self.reread_roles:
            return ()
        return self.prefill_urls if role == "prefill" else self.decode_urls


def without_credentials(url: str) -> str:
    """The URL without user and password, for logs, metrics, errors and `/fleet`."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def check_urls(urls: Sequence[str], field: str, *, may_be_empty: bool = False) -> None:
    """Raises ConfigError."""
    if not urls and not may_be_empty:
        raise ConfigError("needs at least one engine, e.g. http://127.0.0.1:8100", field=field)
    if len({without_credentials(url) for url in urls}) != len(urls):
        raise ConfigError("names an engine twice", field=field)
    for url in urls:
        check_url(url, field)


def check_url(url: str, field: str) -> None:
    """Check that a URL is an engine's root. Raises ConfigError."""
    try:
        parts, shown = urlsplit(url), without_credentials(url)
        is_known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")  # The resolver does this, too: no empty or long label.
    except ValueError as error:
        raise ConfigError(f"is no URL: {error}; e.g. http://127.0.0.1:8100", field=field) from error
    if not is_known:
        raise ConfigError(f"{shown!r} is no http(s) URL; e.g. http://127.0.0.1:8100", field=field)
    if not parts.path.isascii() or _NOT_IN_URLS.search(url):
        raise ConfigError(f"{shown!r} has characters that a URL has not; write %XX for them", field=field)
    if parts.query or parts.fragment or url.endswith("/"):
        raise ConfigError(f"{shown!r} must end before any query and without a slash", field=field)
    if parts.path.endswith("/v1"):
        raise ConfigError(f"{shown!r} must be the engine's root, without /v1", field=field)
