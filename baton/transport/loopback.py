"""Nothing of ours listens or dials beyond this host unless a cluster secret says who may come in."""

import ipaddress
import re

from baton.core.config import ClusterSecret
from baton.core.errors import ConfigError

_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_\-]{0,62}")  # Of a host name, between dots.
_NAME_CHARS_MAX = 253


def check_bind_host(host: str, secret: ClusterSecret | None, *, field: str) -> None:
    """Raises ConfigError for an address beyond this host when nothing would authenticate who comes in."""
    if secret is None and not is_loopback(host):
        raise ConfigError(
            f"is {host!r}, but without a cluster secret anybody who reaches the port could read prompts and "
            "answers; set BATON_SECRET (at least 16 bytes, the same on every engine) or bind to 127.0.0.1",
            field=field,
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # A name can resolve to anything.


def is_host(host: str) -> bool:
    """Whether it is an address, or could be a name: what a resolver may be asked for."""
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
    """As a url writes it."""
    return f"[{host}]" if ":" in host else host
