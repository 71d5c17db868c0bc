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
# Of a push. late: when P has answered, or shortly before; auto: late for a vLLM on its producer's host.
DecodeLegStart = Literal["auto", "at_once", "late"]
PolicyName = Literal["least_in_flight", "round_robin", "prefix_affinity", "cost"]


class LegTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Every wait of the router ends; these say when."""

    connect_s: float = 2.0
    prefill_s: float = 120.0  # The whole prefill leg, queueing at the engine included.
    first_byte_s: float = 120.0  # Of a streamed answer.
    answer_s: float = 600.0  # The whole of an answer that is not streamed.
    idle_s: float = 60.0  # Between two pieces of a stream; also how long a client may stop reading.
    # How long a connection to an engine is kept for a next request. vLLM and uvicorn close theirs after 5 s.
    # Longer than the time from one probe to the next, which else needs a new connection.
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
    down_every_s: float = 0.5  # Of an engine that is down, which is used soon after it is back.
    failures_to_eject: int = 3  # In a row. A refused connection needs no second one.
    silences_to_eject: int = 2  # Probes in a row without an answer. Then its legs are given up, too.
    slow_start_s: float = 3.0  # An engine that is back gets a share of its requests that grows this long.

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError("must be positive", field=f"probe.{name}")


class OutlierDetection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When errors eject an engine whose /health is good. The names are Envoy's."""

    interval_s: float = 10.0  # The window in which answers count.
    consecutive_5xx: int = 5  # Also broken streams, timeouts and 429.
    failure_percentage_threshold: int = 50
    failure_percentage_request_volume: int = 10  # Answers in the window; with fewer no percentage counts.
    base_ejection_time_s: float = 2.0  # Doubled when the engine fails again after it.
    max_ejection_time_s: float = 30.0
    max_ejection_percent: int = 50  # Among the engines of one role and model. One always stays.

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError("must be positive", field=f"outlier_detection.{name}")


ANY_ENGINE, HOST = "*", "{host}"


class KVEventsSource(msgspec.Struct, frozen=True):
    """Where an engine publishes its KV events (vLLM's `--kv-events-config`)."""

    url: str  # The engine's, without credentials; ANY_ENGINE: of each that no other source names.
    endpoint: str  # ZeroMQ's, such as tcp://10.0.0.7:5557; HOST in it is that of an engine's URL.
    replay_endpoint: str | None = None  # Without one, a lost event costs all that is known of the engine.

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
    """Of engines that have a source of their own, and of those of `urls` that have none."""
    sources = {one.url: one for one in named}
    any_engine = sources.pop(ANY_ENGINE, None)
    if any_engine is not None:
        sources |= {url: any_engine.of(url) for url in urls if url not in sources}
    return tuple(sources.values())


class PeerSettings(msgspec.Struct, frozen=True):
    """Other routers of the same engines. They share loads and sessions."""

    bind: str  # ZeroMQ's endpoint on which this router publishes, such as tcp://10.0.0.1:5600.
    routers: tuple[str, ...]  # Those of the others.
    secret: str  # That all of them have.

    def __post_init__(self) -> None:
        for endpoint in (self.bind, *self.routers):
            if not _ENDPOINT.fullmatch(endpoint):
                raise ConfigError(
                    f"{endpoint!r} is no endpoint of ZeroMQ; e.g. tcp://10.0.0.1:5600", field="peers"
                )
        if len(self.secret) < PEER_SECRET_CHARS_MIN:
            raise ConfigError(f"needs at least {PEER_SECRET_CHARS_MIN} characters", field="peers.secret")


class AdmissionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A queue in the router: no engine gets more than it can do soon. See `baton.router.admission`."""

    max_tokens: int = 0  # Uncomputed prompt tokens with which an engine gets no other prompt; 0: no cap.
    max_running: int = 0  # Requests of a decode engine at once; 0: no cap.
    max_waiting: int = 1024  # Requests that wait; more get 429.
    ttft_s: float = 60.0  # A request whose first token is predicted later gets 429. So long one may wait.
    by_priority: bool = False  # Engines compute urgent prompts first: what is less urgent does not count.
    least_priority: int = 0  # Least, and thus earliest, value of `priority` that clients may name.
    tenant_header: str | None = None  # That names the tenant; a gateway must set it. None: by API key.
    shares: tuple[tuple[str, float], ...] = ()  # Of tenants, compared with 1 of all others.

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
    prefill_urls: tuple[str, ...]  # Of the start. Others join and leave; see `baton.router.members`.
    decode_urls: tuple[str, ...]
    has_sources: bool = False  # Engines also come from elsewhere, or may come by registration only.
    reread_roles: tuple[Role, ...] = ()  # Whose engines are in a file that is read again when it changes.
    model_aliases: dict[str, str] = {}  # Other names of models, by alias.
    mode: Mode = "pull"
    decode_leg: DecodeLegStart = "auto"
    first_token: bool = True  # From the prefill engine at once, where all engines concerned are Baton's.
    policy: PolicyName = "least_in_flight"
    on_prefill_failure: Literal["local", "fail"] = "local"  # local: the decode engine prefills by itself.
    min_prefill_tokens: int = 0  # Shorter prompts (estimated) go straight to a decode engine; 0: none does.
    prefill_attempts: int = 2
    decode_attempts: int = 2
    resumes: int = 2  # Times that another decode engine continues a stream whose engine fails; 0: never.
    hedge_prefill: bool = True  # In pull: a prompt that is late at one prefill engine goes to another, too.
    kv_events: tuple[KVEventsSource, ...] = ()  # For the policy `cost`.
    peers: PeerSettings | None = None
    admission: AdmissionSettings | None = None  # None: every request goes to the engines at once.
    tokenizer: str | None = None  # Folder with tokenizer.json: to find prompts that are texts in the caches.
    max_answer_bytes: int = 32 << 20  # Of an answer that is not streamed: it is held whole.
    drain_timeout_s: float = 30.0  # For running requests to end, once the router is told to stop.
    max_requests: int = 4096  # In flight at once; more get 503.
    doors: HttpSettings = HttpSettings()
    tls: TlsFiles | None = None  # Of both ports, and for https engines that ask. None: HTTP without TLS.
    engine_ca: str | None = None  # PEM file of the authorities of https engines; None: the system's.
    checked_hosts: tuple[str, ...] | None = None  # None: any Host header is served; see `baton.http.gate`.
    otlp_traces_endpoint: str | None = None  # Where spans go; None: nothing is traced.
    access_log: str | None = None  # File that gets a line of JSON for each request; "-": standard output.
    engine_api_key: str | None = None  # For requests to engines; None: the client's own key is passed on.
    engine_api_keys: tuple[tuple[str, str], ...] = ()  # Of single engines, by URL.
    engine_key_file: str | None = None  # Has both, and is read again when it changes.
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
        """Of engines that stay members for as long as the router runs."""
        if role in self.reread_roles:
            return ()
        return self.prefill_urls if role == "prefill" else self.decode_urls


def without_credentials(url: str) -> str:
    """For logs, metrics, errors and `/fleet`."""
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
    """Raises ConfigError if this is not an engine's root."""
    try:
        parts, shown = urlsplit(url), without_credentials(url)
        is_known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")  # As the resolver does: no empty or long label.
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
