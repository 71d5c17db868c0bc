"""Sources of members of `baton route`: the text of `--members`, and the configuration file.

dns:NAME?role=decode&port=8200                     A and AAAA records; without a port, SRV records
dns://SERVER:PORT/NAME?role=decode&port=8200       the same, from this name server
kubernetes:NAMESPACE?selector=app=baton            EndpointSlices of services with a label baton/role
redis://HOST:6379/0?prefix=baton                   or rediss, valkey, valkeys: what engines register there
register                                           engines that register at this router, and no others
"""

import importlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import SplitResult, parse_qsl, urlsplit

from baton.core.errors import ConfigError, UserError
from baton.http.registration import REDIS_SCHEMES, redis_place

if TYPE_CHECKING:
    from baton.router.members.reader import Source
    from baton.router.values.members import Listing
    from baton.router.values.settings import Role

TABLE = "route"
ROLES: tuple[Literal["prefill"], Literal["decode"]] = ("prefill", "decode")
DNS_PORT = 53


def read_members(
    path: Path, read_file: Callable[[Path], Mapping[str, Any]], roles: Collection[str]
) -> "Listing":
    """The engines of these roles in the file as it is now. Raises ConfigError."""
    from baton.router.values.members import Member, read_entries

    values = read_file(path)
    entries: list[tuple[str, tuple[Role, Any]]] = []
    for role in ROLES:
        if role not in roles:
            continue
        urls = values.get(role)
        if not isinstance(urls, list) or not urls:
            raise ConfigError(f"must be a list of URLs in {path}", field=f"{TABLE}.{role}")
        entries += [(str(url), (role, url)) for url in urls]

    def read(entry: "tuple[Role, Any]") -> tuple[Member]:
        role, url = entry
        if not isinstance(url, str):
            raise UserError("is no URL")
        return (Member(role, url.rstrip("/")),)

    return read_entries(entries, read)


def source_of(text: str) -> "Source | None":
    """None: `register`, which needs no source of its own. Raises ConfigError."""
    if text == "register":
        return None
    try:
        parts = urlsplit(text)
        if parts.scheme in REDIS_SCHEMES:
            source: Source = _import("redis", "redis").RedisSource(*redis_place(text))
            return source
        given = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query), keep_blank_values=True))
        if parts.scheme == "dns":
            return _dns_source(parts, given)
        if parts.scheme == "kubernetes":
            return _kubernetes_source(parts, given)
    except ValueError as error:
        raise ConfigError(f"{_shown(text)}: {error}", field="members") from error
    kinds = ", ".join(("dns", "kubernetes", *REDIS_SCHEMES, "register"))
    raise ConfigError(f"{_shown(text)} is no source of members; the kinds are {kinds}", field="members")


def _dns_source(parts: SplitResult, given: dict[str, str]) -> "Source":
    _check_keys(given, ("role", "port", "scheme", "every_s", "model"))
    name, role = parts.path.strip("/"), given.get("role")
    if not name or role not in ROLES:
        raise ValueError("needs a name and ?role=prefill or ?role=decode")
    port, every_s = given.get("port"), float(given.get("every_s", "5"))
    if not 1 <= every_s <= 3600:
        raise ValueError("every_s must be in [1, 3600]")
    source: Source = _import("dns", "dns").DnsSource(
        name,
        role,
        port=None if port is None else _port(port),
        scheme=given.get("scheme", "http"),
        every_s=every_s,
        server=(parts.hostname, parts.port or DNS_PORT) if parts.hostname else None,
        model=given.get("model"),
    )
    return source


def _kubernetes_source(parts: SplitResult, given: dict[str, str]) -> "Source":
    _check_keys(given, ("selector", "role_label", "port", "scheme"))
    if not parts.path or "/" in parts.path or not given.get("selector"):
        raise ValueError("needs a namespace and ?selector=LABEL=VALUE")
    kubernetes = _import("kubernetes", "kubernetes")
    source: Source = kubernetes.KubernetesSource(kubernetes.Rule(parts.path, **given))
    return source


def _import(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(f"baton.router.members.sources.{module}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("baton"):
            raise
        raise ValueError(f"needs `pip install 'kv-baton[{extra}]'`") from error


def _port(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) < 1 << 16):
        raise ValueError(f"port must be in [1, 65535], is {text!r}")
    return int(text)


def _check_keys(given: Mapping[str, str], known: Collection[str]) -> None:
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{unknown[0]!r} is unknown; known are {', '.join(known)}")


def _shown(text: str) -> str:
    """The text in quotes, without a password."""
    from baton.router.values.settings import without_credentials

    return repr(without_credentials(text))
