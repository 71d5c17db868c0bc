"""Limits of requests and prompt tokens per minute for each tenant, counted by the `limits` library.

A sliding window of one minute approximates the last minute from two counters. They are in this process, or in
a Redis that several routers share. Requests are counted before tokens: a request that is refused for its
tokens has spent one of its tenant's requests, one that is refused as a request has spent nothing. The headers
are OpenAI's: `x-ratelimit-limit-requests`, `-remaining-requests`, `-reset-requests`, and the same of tokens.
"""

import time
from math import ceil
from typing import Any

import msgspec

from baton.core.errors import ConfigError
from baton.http.auth import AuthFile
from baton.http.errors import ApiError

WINDOW_S = 60
STORAGE_TIMEOUT_S = 1.0
_NAMESPACE = "baton"


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """`refused`: what is exceeded; None: the request is let in. `headers`: of its answer."""

    headers: dict[str, str]
    refused: str | None = None
    retry_after_s: int = 0

    def check(self) -> None:
        """Raises ApiError."""
        if self.refused is not None:
            raise ApiError(
                429,
                self.refused,
                code="rate_limit_exceeded",
                retry_after_s=self.retry_after_s,
                extra=self.headers,
            )


LET_IN = Verdict({})


class RateLimits:
    """Used from one event loop; `close` it. Raises ConfigError if a library is missing."""

    def __init__(self, auth: AuthFile) -> None:
        self._auth = auth
        try:
            from limits import RateLimitItemPerMinute
            from limits.aio.strategies import SlidingWindowCounterRateLimiter
        except ImportError as error:
            raise ConfigError("needs limits: pip install 'kv-baton[auth]'", field="auth_file") from error
        self._per_minute = RateLimitItemPerMinute
        self._storage: Any = _storage(auth.current.storage)
        self._limiter = SlidingWindowCounterRateLimiter(self._storage)

    async def charge(self, tenant: str, num_prompt_tokens: int) -> Verdict:
        """Raises OSError, TimeoutError, or an error of the Redis client, if the storage cannot be used."""
        rate = self._auth.current.rate_of(tenant)
        headers: dict[str, str] = {}
        for kind, limit, cost in (
            ("requests", rate.requests_per_minute, 1),
            ("tokens", rate.prompt_tokens_per_minute, num_prompt_tokens),
        ):
            if limit is None:
                continue
            item = self._per_minute(limit, namespace=_NAMESPACE)
            is_in = cost == 0 or await self._limiter.hit(item, tenant, kind, cost=cost)
            reset_at_s, remaining = await self._limiter.get_window_stats(item, tenant, kind)
            reset_s = max(0.0, reset_at_s - time.time())
            headers |= {
                f"x-ratelimit-limit-{kind}": str(limit),
                f"x-ratelimit-remaining-{kind}": str(remaining),
                f"x-ratelimit-reset-{kind}": f"{reset_s:.3f}s",
            }
            if not is_in:
                return Verdict(headers, _why(kind, limit, cost), _retry_after_s(limit, cost, remaining))
        return Verdict(headers)

    async def close(self) -> None:
        bridge = getattr(self._storage, "bridge", None)
        if bridge is not None:
            await bridge.storage.aclose()


def _storage(uri: str | None) -> Any:
    from limits.aio.storage import MemoryStorage, RedisStorage
    from limits.errors import ConfigurationError

    if uri is None:
        return MemoryStorage()
    try:
        return RedisStorage(
            f"async+{uri}",
            implementation="redispy",
            key_prefix=_NAMESPACE,
            socket_timeout=STORAGE_TIMEOUT_S,
            socket_connect_timeout=STORAGE_TIMEOUT_S,
        )
    except (ConfigurationError, ImportError) as error:
        raise ConfigError("needs redis: pip install 'kv-baton[auth]'", field="storage") from error


def _why(kind: str, limit: int, cost: int) -> str:
    if kind == "requests":
        return f"this tenant has sent its {limit} requests of this minute"
    if cost > limit:
        return f"a prompt of {cost} tokens is over this tenant's limit of {limit} tokens per minute"
    return f"this prompt of {cost} tokens is more than what is left of {limit} tokens per minute"


def _retry_after_s(limit: int, cost: int, remaining: int) -> int:
    """As if the window moved evenly: it frees `limit` in a minute."""
    return min(WINDOW_S, max(1, ceil((cost - remaining) * WINDOW_S / limit)))
