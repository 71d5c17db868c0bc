"""Settings of the router: frozen, validated once, every number with its unit."""

import re
from collections.abc import Iterable, Sequence
from math import inf
from typing import Annotated, Literal, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import msgspec

from baton.core.errors import ConfigError
from baton.core.option import AtLeast0, AtLeast1, Option
from baton.http.options import ENGINE_API_KEY_ENV
from baton.http.registration import Role as Role
from baton.http.settings import HttpSettings
from baton.http.tls import TlsFiles

PEER_SECRET_CHARS_MIN = 16
_NOT_IN_URLS = re.compile(r"[\x00-\x20\x7f\\]")
_ENDPOINT = re.compile(r"tcp://[^\s/]+:(?:\d{1,5}|\*)|ipc://\S+")

EngineKey: TypeAlias = tuple[Role, str]  # The URL has no credentials.
Mode = Literal["pull", "push"]
DecodeLegStart = Literal["auto", "at_once", "late"]
PolicyName = Literal["least_in_flight", "round_robin", "prefix_affinity", "cost"]


class LegTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits of the router's waits, in seconds. Every wait has one.

    connect_s: Limit for connecting to an engine
    prefill_s: Limit for the whole prefill leg, queueing at the engine included
    first_byte_s: Limit for a stream's first piece
    answer_s: Limit for the whole of an answer that is not streamed
    idle_s: Limit between two pieces of a stream; a client may stop reading for as long
    total_s: Limit for one request with all attempts
    keepalive_s: How long an idle connection to an engine is used; engines keep it longer
    """

    connect_s: Annotated[float, Option("connect_timeout_s")] = 2.0
    prefill_s: Annotated[float, Option("prefill_timeout_s")] = 120.0
    first_byte_s: Annotated[float, Option("first_byte_timeout_s")] = 120.0
    answer_s: Annotated[float, Option("answer_timeout_s")] = 600.0
    idle_s: Annotated[float, Option("idle_timeout_s")] = 60.0
    total_s: Annotated[float, Option("total_timeout_s")] = 3600.0
    # vLLM and uvicorn close idle connections after 5 s.
    keepalive_s: Annotated[float, Option("keepalive_timeout_s")] = 2.0

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
    """When errors eject an engine whose /health is good. The names are Envoy's.

    interval_s: Window in which answers count
    consecutive_5xx: Failed answers in a row. Broken streams, timeouts and 429 count, too
    failure_percentage_threshold: Percentage of failed answers in the window
    failure_percentage_request_volume: Answers in the window; with fewer no percentage counts
    base_ejection_time_s: Time without requests, doubled when the engine fails again after it
    max_ejection_time_s: Limit of that time
    max_ejection_percent: Percentage of the engines of one role and model. One always stays
    """

    interval_s: float = 10.0
    consecutive_5xx: int = 5
    failure_percentage_threshold: int = 50
    failure_percentage_request_volume: int = 10
    base_ejection_time_s: float = 2.0
    max_ejection_time_s: float = 30.0
    max_ejection_percent: int = 50

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

    @classmethod
    def parse(cls, text: str) -> "KVEventsSource":
        """Read `URL=ENDPOINT[,REPLAY_ENDPOINT]`. Raises ConfigError."""
        url, _, endpoints = text.partition("=")
        endpoint, _, replay_endpoint = endpoints.partition(",")
        if not endpoint:
            raise ConfigError(f"must be URL=ENDPOINT[,REPLAY_ENDPOINT], is {text!r}", field="kv_events")
        return cls(url.rstrip("/"), endpoint, replay_endpoint or None)

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
    """Other routers of the same engines. They share loads and sessions.

    bind: Endpoint on which this router publishes its load and sessions to other routers of the same engines,
        such as tcp://10.0.0.1:5600.
    routers: Endpoint of another router; repeat for more.
    """

    bind: Annotated[str, Option("peer_bind", metavar="ENDPOINT")]
    routers: Annotated[tuple[str, ...], Option("peer", metavar="ENDPOINT")]
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
    """A queue in the router: no engine gets more than it can do soon. See `baton.router.fleet.admission`.

    max_tokens: Cap: an engine with so many prompt tokens to compute gets no other prompt. With this cap or
        the next one, requests wait in the router by priority; 0: no cap.
    by_priority: With that cap: the engines compute urgent prompts first (`baton serve --scheduling-policy
        priority`), so a prompt does not wait for less urgent ones.
    max_running: Cap: requests for each decode engine at once; 0: no cap.
    max_waiting: Requests that wait in the router; more get 429
    ttft_s: With a cap: a request whose first token is predicted later gets 429 and Retry-After. A client may
        ask for less with the header x-slo-ttft-ms
    least_priority: With a cap: least value of `priority` that clients may name; less goes earlier
    tenant_header: With a cap: header that names the tenant, set by a gateway. Default: the API key is the
        tenant. Tenants get equal shares.
    shares: Share of a tenant, compared with 1 of the others: NAME=SHARE; repeat for more.
    """

    max_tokens: Annotated[AtLeast0, Option("max_prefill_tokens")] = 0
    by_priority: Annotated[bool, Option("engines_by_priority")] = False
    max_running: Annotated[AtLeast0, Option()] = 0
    max_waiting: Annotated[AtLeast1, Option()] = 1024
    ttft_s: Annotated[float, Option("max_ttft_s")] = 60.0
    least_priority: Annotated[int, Option()] = 0
    tenant_header: Annotated[str | None, Option()] = None
    shares: Annotated[
        tuple[tuple[str, float], ...], Option("tenant_share", parse=lambda texts: tuple(map(_share, texts)))
    ] = ()

    def __post_init__(self) -> None:
        if not self.max_tokens and not self.max_running:
            raise ConfigError("needs max_tokens or max_running", field="admission")
        if self.by_priority and not self.max_tokens:
            raise ConfigError("needs max_tokens", field="admission.by_priority")
        if not self.ttft_s > 0:
            raise ConfigError("must be positive", field="admission.ttft_s")
        for tenant, share in self.shares:
            if not 0 < share < inf:
                raise ConfigError(f"{tenant}: must be a positive number", field="admission.shares")


def _share(text: str) -> tuple[str, float]:
    tenant, _, share = text.rpartition("=")
    try:
        return tenant, float(share)
    except ValueError as error:
        raise ConfigError(f"must be NAME=SHARE, is {text!r}", field="tenant_share") from error


def _aliases(texts: Sequence[str]) -> dict[str, str]:
    return {alias: model for alias, _, model in (text.partition("=") for text in texts)}


def _urls(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(text.rstrip("/") for text in texts)


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the router. The engines are those at the start: others join and leave (`values.members`).

    prefill_urls: Root URL of a prefill engine; repeat for more.
    decode_urls: Root URL of a decode engine; repeat for more.
    model_aliases: Another name of a model, for clients: ALIAS=MODEL; repeat for more.
    mode: pull: one leg after the other; push: both at once, KV moves early
    decode_leg: When push starts the decode leg. at_once; late: about when the prompt is computed; auto: late
        for a vLLM on its prefill engine's host
    first_token: Stream the prefill engine's first token immediately
    hedge_prefill: In pull: let a second prefill engine compute a prompt that is late at the first one
    resumes: Times that another engine continues a stream whose decode engine fails, where it gives the same
        answer; 0: the stream ends with an error
    policy: least_in_flight, round_robin, prefix_affinity, or cost: where the first token is expected soonest,
        with little harm to others; a prompt may stay with a decode engine
    kv_events: Where an engine publishes KV events, for --policy cost: URL=ENDPOINT[,REPLAY_ENDPOINT], such as
        http://10.0.0.7:8100=tcp://10.0.0.7:5557,tcp://10.0.0.7:5558; repeat for more.
        *=tcp://{host}:5557,tcp://{host}:5558 is for all others, also for those that join later.
    tokenizer: Folder with the model's tokenizer.json, to find texts in the engines' caches.
    on_prefill_failure: local: the decode engine computes the prompt; fail: the request fails
    min_prefill_tokens: Shorter prompts (by estimate) go directly to a decode engine
    drain_timeout_s: Time for running requests to end after SIGTERM
    engine_ca: PEM file with the authorities of https engines (default: the system's).
    access_log: File that gets a line of JSON for each request that has ended, without prompts and answers; -
        is standard output.
    engine_key_file: File with the API key of the engines; or set BATON_ENGINE_API_KEY. Default: the first of
        the router's own keys; without any, the client's key is passed on.
    outlier_detection: When errors eject an engine, with Envoy's names, such as '{"consecutive_5xx": 5}'; see
        docs/operations.md.
    """

    prefill_urls: Annotated[tuple[str, ...], Option("prefill", parse=_urls)]
    decode_urls: Annotated[tuple[str, ...], Option("decode", parse=_urls)]
    has_sources: bool = False  # Engines also come from elsewhere, or may come by registration only.
    reread_roles: tuple[Role, ...] = ()  # Roles whose engines come from a file that the router rereads.
    model_aliases: Annotated[dict[str, str], Option("model_alias", parse=_aliases)] = {}
    mode: Annotated[Mode, Option()] = "pull"
    decode_leg: Annotated[DecodeLegStart, Option()] = "auto"
    first_token: Annotated[bool, Option()] = True
    hedge_prefill: Annotated[bool, Option()] = True
    resumes: Annotated[AtLeast0, Option()] = 2
    policy: Annotated[PolicyName, Option()] = "least_in_flight"
    kv_events: Annotated[
        tuple[KVEventsSource, ...], Option(parse=lambda texts: tuple(map(KVEventsSource.parse, texts)))
    ] = ()
    tokenizer: Annotated[str | None, Option()] = None
    on_prefill_failure: Annotated[Literal["local", "fail"], Option()] = "local"
    min_prefill_tokens: Annotated[AtLeast0, Option()] = 0
    prefill_attempts: int = 2
    decode_attempts: int = 2
    peers: PeerSettings | None = None
    admission: AdmissionSettings | None = None  # None: every request goes to the engines at once.
    max_answer_bytes: int = 32 << 20  # Limit of an answer that is not streamed: the router holds it whole.
    drain_timeout_s: Annotated[float, msgspec.Meta(ge=0), Option()] = 30.0
    max_requests: int = 4096  # Requests in flight at once; more get 503.
    doors: HttpSettings = HttpSettings()
    tls: TlsFiles | None = None  # TLS of both ports, and for https engines that ask. None: HTTP without TLS.
    engine_ca: Annotated[str | None, Option()] = None
    checked_hosts: tuple[str, ...] | None = None  # None: any Host header is served; see `baton.http.gate`.
    otlp_traces_endpoint: str | None = None  # Where spans go; None: nothing is traced.
    access_log: Annotated[str | None, Option()] = None
    engine_api_key: str | None = None  # Key for requests to engines; None: the client's own key is passed on.
    engine_api_keys: tuple[tuple[str, str], ...] = ()  # Keys of single engines, by URL.
    engine_key_file: Annotated[str | None, Option("engine_api_key_file", content=ENGINE_API_KEY_ENV)] = None
    engines_have_own_key: bool = False  # `engine_api_key` is the first of `doors.api_keys`.
    timeouts: LegTimeouts = LegTimeouts()
    probe: ProbeSettings = ProbeSettings()
    outlier_detection: Annotated[OutlierDetection, Option()] = OutlierDetection()

    def __post_init__(self) -> None:
        check_urls(self.prefill_urls, "prefill_urls", may_be_empty=self.has_sources)
        check_urls(self.decode_urls, "decode_urls", may_be_empty=self.has_sources)
        for name in ("prefill_attempts", "decode_attempts", "max_answer_bytes", "max_requests"):
            if getattr(self, name) < 1:
                raise ConfigError("must be at least 1", field=name)
        for name in ("resumes", "drain_timeout_s", "min_prefill_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError("must not be negative", field=name)
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
