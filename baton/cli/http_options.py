"""HTTP options that `baton serve` and `baton route` share, and the reading of API keys."""

import ssl
from collections.abc import Mapping
from pathlib import Path

import msgspec
import typer

from baton.cli.exposure import API_KEY_ENV as API_KEY_ENV
from baton.core.errors import ConfigError
from baton.http.auth import (
    parse_api_keys,
    read_key_file,
)
from baton.http.settings import HttpLimits
from baton.http.tls import TlsFiles

ADMIN_API_KEY_ENV = "BATON_ADMIN_API_KEY"
ENGINE_API_KEY_ENV = "BATON_ENGINE_API_KEY"  # Key that the router sends to engines.
REGISTER_KEY_ENV = "BATON_REGISTER_KEY"  # Key that an engine sends to the routers where it registers.
REGISTER_API_KEY_ENV = "BATON_REGISTER_API_KEY"  # The same key, at the router.
PEER_SECRET_ENV = "BATON_PEER_SECRET"  # Secret that routers of the same engines share.

_DEFAULTS = ", ".join(f'"{name}": {value}' for name, value in msgspec.structs.asdict(HttpLimits()).items())
LIMITS_HELP = f"JSON object of limits and deadlines of HTTP requests; the defaults are {{{_DEFAULTS}}}."
API_KEY_HELP = (
    f"File with the API keys that clients may use, one per line; or set {API_KEY_ENV}. "
    "Without keys every client is served."
)
ADMIN_API_KEY_HELP = (
    f"File with the keys of the administrator's pages; or set {ADMIN_API_KEY_ENV}. "
    "Default: the keys of --api-key-file."
)
REGISTER_API_KEY_HELP = (
    f"File with the keys with which engines may register, and that open nothing else; or set "
    f"{REGISTER_API_KEY_ENV}. Keys of the administrator may register, too."
)
TLS_CERT_HELP = (
    "PEM file with the certificate of both ports and its chain, also for https servers that ask for one."
)
TLS_KEY_HELP = "PEM file with the key of the certificate."
TLS_CLIENT_CA_HELP = "PEM file: clients need a certificate of one of its authorities."
CA_HELP = "PEM file with the authorities of an https server (default: the system's)."
ALLOWED_HOSTS_HELP = (
    "Comma-separated names that the Host header may have besides loopback names, for a server on "
    "loopback; * allows all."
)

OTLP_HELP = (
    "URL of an OpenTelemetry collector that gets traces by OTLP over HTTP, such as "
    "http://127.0.0.1:4318/v1/traces. Default: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, or "
    "OTEL_EXPORTER_OTLP_ENDPOINT; without any nothing is traced."
)


def read_api_keys(
    file: str | None, environment: Mapping[str, str], *, variable: str, field: str
) -> tuple[str, ...]:
    """Return the keys of the file, or of the environment variable without a file. Raises ConfigError."""
    if file is None:
        return parse_api_keys(environment.get(variable, ""), field=variable)
    return read_key_file(file, field=field)


def verifying(ca: Path | None) -> ssl.SSLContext:
    """TLS context of a command that asks a server. `ca`: the file of `--ca`. Raises BadParameter."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise typer.BadParameter(f"{ca}: {error}", param_hint="--ca") from error


def verifying_own(files: TlsFiles) -> ssl.SSLContext:
    """TLS context for a server that this command has started with these files: trusts this certificate only.

    The certificate's names may differ from the address of the request. Raises ConfigError.
    """
    try:
        context = ssl.create_default_context(cafile=files.cert)
        context.load_cert_chain(files.cert, files.key)  # If the server asks for one.
    except OSError as error:
        raise ConfigError(f"{files.cert}, {files.key}: {error}", field="tls_cert") from error
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    return context
