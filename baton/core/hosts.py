"""Host names and addresses, and the restriction to the loopback if there is no cluster secret."""

import ipaddress
import re

from baton.core.config import ClusterSecret
from baton.core.errors import ConfigError

_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_\-]{0,62}")  # A label of a host name, between dots.
_NAME_CHARS_MAX = 253


def check_bind_host(host: str, secret: ClusterSecret | None, *, field: str) -> None:
    """Raises ConfigError for an address beyond this host without a secret to authenticate callers."""
    if secret is None and not is_loopback(host):
        raise ConfigError(
            f"is {host!r}, but without a cluster secret anyone who reaches the port could read prompts and "
            "answers; set BATON_SECRET (at least 16 bytes, the same on every engine) or bind to 127.0.0.1",
            field=field,
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # A name can resolve to any address.


def is_host(host: str) -> bool:
    """Whether it is an address or a valid host name, so that a resolver may be asked for it."""
    if _is_address(host):
        return True
    return len(host) <= _NAME_CHARS_MAX and all(_LABEL.fullmatch(label) for label in host.split("."))


def is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == "*"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def bracketed(host: str) -> str:
    """The host as written in a url."""
    return f"[{host}]" if ":" in host else host
