"""Limits of requests and prompt tokens per minute for each tenant.

A sliding window of one minute approximates the last minute from two counters. They are in this process, or in
a Redis that several routers share, where the `limits` library counts. Requests are counted before tokens: a
request that is refused for its tokens has spent one of its tenant's requests, one that is refused as a
request has spent nothing. The headers are OpenAI's: `x-ratelimit-limit-requests`, `-remaining-requests`,
`-reset-requests`, and the same of tokens.
"""

import time
from collections.abc import Iterator
from math import ceil
from typing import Any, Literal

import msgspec

from baton.core.errors import ConfigError
from baton.http.auth import AuthFile
from baton.http.errors import ApiError

WINDOW_S = 60
STORAGE_TIMEOUT_S = 1.0
_NAMESPACE = "baton"


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """`refused`: what is exceeded; None: the request is let in. `headers`: part of its answer."""

    headers: dict[str, str]
    refused: str | None = None
    retry_after_s: int = 0

    @property
    def outcome(self) -> Literal["let_in", "refused"]:
        return "let_in" if self.refused is None else "refused"

    @property
    def error(self) -> ApiError | None:
        """The answer to a request that is refused."""
        if self.refused is None:
            return None
        return ApiError(
            429,
            self.refused,
            code="rate_limit_exceeded",
            retry_after_s=self.retry_after_s,
            extra=self.headers,
        )


LET_IN = Verdict({})


class _Counter:
    """Requests or tokens of one tenant."""

    __slots__ = ("before", "minute", "now")

    def __init__(self, minute: int) -> None:
        self.minute, self.now, self.before = minute, 0, 0  # Counts of this minute and of the one before.

    def move_to(self, minute: int) -> None:
        if minute != self.minute:
            self.before = self.now if minute == self.minute + 1 else 0
            self.minute, self.now = minute, 0


class LocalCounts:
    """Counts of this process, with the algorithm of `limits`, whose storage in memory is slower.

    Source: `limits.aio.strategies.SlidingWindowCounterRateLimiter`, 5.8.
    """

    def __init__(self) -> None:
        self._counters: dict[tuple[str, str], _Counter] = {}
        self._minute = 0

    def hit(self, tenant: str, kind: str, limit: int, cost: int) -> tuple[bool, int, float]:
        """Return (whether it is let in and counted, what remains, seconds until more does)."""
        at_s = time.time()
        minute = int(at_s // WINDOW_S)
        passed_s = at_s - minute * WINDOW_S
        if minute != self._minute:
            self._minute = minute
            self._counters = {key: one for key, one in self._counters.items() if one.minute >= minute - 1}
        counter = self._counters.get((tenant, kind))
        if counter is None:
            counter = self._counters[tenant, kind] = _Counter(minute)
        counter.move_to(minute)
        left_s = WINDOW_S - passed_s
        of_before = counter.before * left_s / WINDOW_S
        is_in = int(of_before + counter.now) + cost <= limit
        if is_in:
            counter.now += cost
        reset_s = left_s if counter.now else 0.0
        if counter.before:
            one_less_s = left_s % (WINDOW_S / counter.before)
            reset_s = min(reset_s, one_less_s) if counter.now else one_less_s
        return is_in, max(0, limit - int(of_before + counter.now)), reset_s


class RateLimits:
    """Used from one event loop; `close` it. Raises ConfigError if a library is missing."""

    def __init__(self, auth: AuthFile) -> None:
        self._auth = auth
        uri = auth.current.storage
        self._local = LocalCounts() if uri is None else None
        self._shared = None if uri is None else _SharedCounts(uri)

    def charge_here(self, tenant: str, num_prompt_tokens: int) -> Verdict | None:
        """None: the counts are elsewhere, call `charge`."""
        if self._local is None:
            return None
        headers: dict[str, str] = {}
        for kind, limit, cost in self._limits_of(tenant, num_prompt_tokens):
            is_in, remaining, reset_s = self._local.hit(tenant, kind, limit, cost)
            headers |= _headers(kind, limit, remaining, reset_s)
            if not is_in:
                return Verdict(headers, _why(kind, limit, cost), _retry_after_s(limit, cost, remaining))
        return Verdict(headers)

    async def charge(self, tenant: str, num_prompt_tokens: int) -> Verdict:
        """Raises OSError, TimeoutError, or an error of the Redis client, if the storage cannot be used."""
        if self._shared is None:
            verdict = self.charge_here(tenant, num_prompt_tokens)
            assert verdict is not None
            return verdict
        headers: dict[str, str] = {}
        for kind, limit, cost in self._limits_of(tenant, num_prompt_tokens):
            is_in, remaining, reset_s = await self._shared.hit(tenant, kind, limit, cost)
            headers |= _headers(kind, limit, remaining, reset_s)
            if not is_in:
                return Verdict(headers, _why(kind, limit, cost), _retry_after_s(limit, cost, remaining))
        return Verdict(headers)

    def _limits_of(self, tenant: str, num_prompt_tokens: int) -> Iterator[tuple[str, int, int]]:
        """Name, limit and cost of each kind that is limited."""
        rate = self._auth.current.rate_of(tenant)
        if rate.requests_per_minute is not None:
            yield "requests", rate.requests_per_minute, 1
        if rate.prompt_tokens_per_minute is not None:
            yield "tokens", rate.prompt_tokens_per_minute, num_prompt_tokens

    async def close(self) -> None:
        if self._shared is not None:
            await self._shared.close()


class _SharedCounts:
    """Counts in a Redis. Raises ConfigError if a library is missing."""

    def __init__(self, uri: str) -> None:
        try:
            from limits import RateLimitItemPerMinute
            from limits.aio.strategies import SlidingWindowCounterRateLimiter
        except ImportError as error:
            raise ConfigError("needs limits: pip install 'kv-baton[auth]'", field="auth_file") from error
        self._per_minute = RateLimitItemPerMinute
        self._storage: Any = _storage(uri)
        self._limiter = SlidingWindowCounterRateLimiter(self._storage)

    async def hit(self, tenant: str, kind: str, limit: int, cost: int) -> tuple[bool, int, float]:
        """Count a request like `LocalCounts.hit`."""
        item = self._per_minute(limit, namespace=_NAMESPACE)
        is_in = cost == 0 or await self._limiter.hit(item, tenant, kind, cost=cost)
        reset_at_s, remaining = await self._limiter.get_window_stats(item, tenant, kind)
        return is_in, remaining, max(0.0, reset_at_s - time.time())

    async def close(self) -> None:
        await self._storage.bridge.storage.aclose()


def _headers(kind: str, limit: int, remaining: int, reset_s: float) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{kind}": str(limit),
        f"x-ratelimit-remaining-{kind}": str(remaining),
        f"x-ratelimit-reset-{kind}": f"{reset_s:.3f}s",
    }


def _storage(uri: str) -> Any:
    from limits.aio.storage import RedisStorage
    from limits.errors import ConfigurationError

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
    """Time until the request fits, as if the window moved evenly: it frees `limit` in a minute."""
    return min(WINDOW_S, max(1, ceil((cost - remaining) * WINDOW_S / limit)))
