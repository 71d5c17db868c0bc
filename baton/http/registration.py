"""Registration of an engine at routers: a request of its own, or a key of a Redis."""

from math import isfinite
from typing import Literal
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import msgspec

from baton.core.errors import ConfigError, UserError

PATH = "/instances/register"
TTL_S = 15.0
TTL_MAX_S = 3600.0
BEATS_PER_TTL = 3  # One that is lost does not end the registration.
REDIS_SCHEMES = ("redis", "rediss", "valkey", "valkeys")
REDIS_PREFIX = "baton"

Role = Literal["prefill", "decode"]


class Registration(msgspec.Struct, frozen=True):
    """An engine in one role, for `ttl_s`. A router drains it unless this is repeated until then."""

    instance: str  # The engine's root URL, as routers reach it.
    type: Role
    model: str | None = None  # Model of an engine that does not report it by itself.
    weight: float = 1.0  # Share of requests, compared with 1 of the others.
    ttl_s: float = TTL_S  # 0: it leaves now.

    def check(self) -> None:
        """Raises UserError."""
        check_weight(self.weight)
        if self.ttl_s and not (isfinite(self.ttl_s) and 1 <= self.ttl_s <= TTL_MAX_S):
            raise UserError(f"must be 0, or 1 to {TTL_MAX_S:g} seconds", field="ttl_s")


def check_weight(weight: float) -> None:
    """Raises UserError."""
    if not 0 < weight <= 1:
        raise UserError("must be above 0 and at most 1", field="weight")


def register_places(text: str) -> list[str]:
    """URLs of routers, Redis or Valkey, with commas. Raises ConfigError."""
    places = [one.strip().rstrip("/") for one in text.split(",")]
    for place in places:
        try:
            parts = urlsplit(place)
            is_url = bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url or parts.scheme not in ("http", "https", *REDIS_SCHEMES):
            raise ConfigError(
                "must be the URL of a router (http, https) or of a Redis or Valkey, e.g. http://10.0.0.1:8000",
                field="register",
            )
    return places


def redis_place(url: str) -> tuple[str, str]:
    """URL for redis-py, and prefix of the keys. Other parameters of the URL are redis-py's."""
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query))
    prefix = given.pop("prefix", REDIS_PREFIX)
    scheme = parts.scheme.replace("valkey", "redis")
    return urlunsplit(parts._replace(scheme=scheme, query=urlencode(given))), prefix


def redis_key(prefix: str, role: str, url: str) -> str:
    return f"{prefix}:member:{role}:{url}"
