"""HTTP options that `baton serve` and `baton route` share, and the reading of API keys."""

import logging
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from baton.core.errors import ConfigError
from baton.core.limited_file import read_limited
from baton.http.settings import HttpLimits, parse_api_keys

API_KEY_ENV = "BATON_API_KEY"  # Keys that clients must send.
ENGINE_API_KEY_ENV = "BATON_ENGINE_API_KEY"  # Key that the router sends to engines.
REGISTER_KEY_ENV = "BATON_REGISTER_KEY"  # API key of the routers where an engine registers.
PEER_SECRET_ENV = "BATON_PEER_SECRET"  # Of routers of the same engines.
MAX_KEY_FILE_BYTES = 1 << 16

_DEFAULTS = ", ".join(f'"{name}": {value}' for name, value in msgspec.structs.asdict(HttpLimits()).items())
LIMITS_HELP = f"JSON object of limits and deadlines of HTTP requests; the defaults are {{{_DEFAULTS}}}."
API_KEY_HELP = (
    f"File with the API keys that clients may use, one per line; or set {API_KEY_ENV}. "
    "Without keys every client is served."
)
ALLOWED_HOSTS_HELP = (
    "Comma-separated names that the Host header may have besides loopback names, for a server on "
    "loopback; * allows all."
)

logger = logging.getLogger(__name__)


def read_api_keys(
    file: str | None, environment: Mapping[str, str], *, variable: str, field: str
) -> tuple[str, ...]:
    """Return the keys of the file, or of the environment variable without a file. Raises ConfigError."""
    if file is None:
        return parse_api_keys(environment.get(variable, ""), field=variable)
    path = Path(file)
    content = read_limited(path, MAX_KEY_FILE_BYTES, field=field)
    if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning("%s can be read by other users of this machine; chmod 600 it", path)
    try:
        keys = parse_api_keys(content.decode(), field=field)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text", field=field) from error
    if not keys:
        raise ConfigError(f"{path} has no key", field=field)
    return keys


def warn_if_open(host: str, keys: tuple[str, ...], *, is_loopback: bool) -> None:
    if not keys and not is_loopback:
        logger.warning(
            "every client that reaches %s is served: no API key is set (--api-key-file, %s)",
            host,
            API_KEY_ENV,
        )
