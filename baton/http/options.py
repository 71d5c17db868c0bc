"""Options that `baton serve` and `baton route` share."""

from functools import partial
from typing import Annotated, Final, Literal

import msgspec

from baton.core.errors import ConfigError
from baton.core.option import Option
from baton.http.settings import HttpLimits
from baton.http.tls import TlsFiles

API_KEY_ENV: Final = "BATON_API_KEY"  # Keys that clients must send.
ADMIN_API_KEY_ENV: Final = "BATON_ADMIN_API_KEY"
ENGINE_API_KEY_ENV: Final = "BATON_ENGINE_API_KEY"  # Key that the router sends to engines.
REGISTER_KEY_ENV: Final = "BATON_REGISTER_KEY"  # Key that an engine sends to the routers where it registers.
REGISTER_API_KEY_ENV: Final = "BATON_REGISTER_API_KEY"  # The same key, at the router.
PEER_SECRET_ENV: Final = "BATON_PEER_SECRET"  # Secret that routers of the same engines share.

LogLevel = Literal["debug", "info", "warning", "error", "critical"]
SERVER = partial(Option, section="server")


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of both servers. Raises ConfigError that names the field.

    host: Address to listen on
    port: Port to listen on; 0 selects a free one
    admin_port: Port for /metrics and, of an engine, /baton/*, of a router /fleet, /status, /instances and the
        page (default: the main port).
    api_key_file: File with the API keys that clients may use, one per line; or set BATON_API_KEY. Without
        keys every client is served.
    admin_api_key_file: File with the keys of the administrator's pages; or set BATON_ADMIN_API_KEY. Default:
        the keys of --api-key-file.
    tls_cert: PEM file with the certificate of both ports and its chain, also for https servers that ask for
        one.
    tls_key: PEM file with the key of the certificate.
    tls_client_ca: PEM file: clients need a certificate of one of its authorities.
    allowed_hosts: Comma-separated names that the Host header may have besides loopback names, for a server on
        loopback; * allows all.
    limits: JSON object of limits and deadlines of HTTP requests
    log_level: debug, info, warning, error or critical
    otlp_traces_endpoint: URL of an OpenTelemetry collector that gets traces by OTLP over HTTP, such as
        http://127.0.0.1:4318/v1/traces. Default: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, or
        OTEL_EXPORTER_OTLP_ENDPOINT; without any nothing is traced.
    """

    host: Annotated[str, SERVER()] = "127.0.0.1"
    port: Annotated[int, SERVER()] = 8000
    admin_port: Annotated[int | None, SERVER()] = None
    api_key_file: Annotated[str | None, SERVER(content=API_KEY_ENV)] = None
    admin_api_key_file: Annotated[str | None, SERVER(content=ADMIN_API_KEY_ENV)] = None
    tls_cert: Annotated[str | None, SERVER()] = None
    tls_key: Annotated[str | None, SERVER()] = None
    tls_client_ca: Annotated[str | None, SERVER()] = None
    allowed_hosts: Annotated[str, SERVER(metavar="NAMES")] = ""
    limits: Annotated[HttpLimits, SERVER()] = HttpLimits()
    log_level: Annotated[LogLevel, SERVER(parse=str.lower)] = "info"
    otlp_traces_endpoint: Annotated[str | None, SERVER(metavar="URL")] = None

    def __post_init__(self) -> None:
        for name in ("port", "admin_port"):
            if not 0 <= (getattr(self, name) or 0) <= 65535:
                raise ConfigError("must be in [0, 65535]; 0 selects a free one", field=name)

    @property
    def tls(self) -> TlsFiles | None:
        """Raises ConfigError."""
        return TlsFiles.of(self.tls_cert, self.tls_key, self.tls_client_ca)
