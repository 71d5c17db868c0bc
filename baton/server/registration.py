"""Registers this engine at routers, or in a Redis or Valkey that routers read, for as long as it serves.

    http://ROUTER:PORT             POST /instances/register, again before its time is over; https too
    redis://HOST:PORT/0            the same, by SET with an end (PX); also rediss, valkey, valkeys

A place that cannot be reached is tried again, and costs the engine nothing else. When the engine is told to
stop it leaves first, so that routers send it nothing more.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

import httpx
import msgspec

from baton.core.errors import BatonError, ConfigError
from baton.http.registration import (
    BEATS_PER_TTL,
    PATH,
    REDIS_SCHEMES,
    Registration,
    redis_key,
    redis_place,
)
from baton.http.tls import ClientTls

logger = logging.getLogger(__name__)

ASK_S = 2.0
RETRY_S = 1.0  # Longest wait for the next attempt after a failure.
LEAVE_S = 3.0


class NotRegistered(BatonError):
    """A place did not take the registration."""


class Place(Protocol):
    name: str

    async def put(self, registration: Registration) -> None:
        """Raises NotRegistered."""

    async def close(self) -> None: ...


class RouterPlace:
    def __init__(self, url: str, api_key: str | None, tls: ClientTls | None) -> None:
        parts = urlsplit(url)
        self.name = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        self._url = url
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._tls = tls if parts.scheme == "https" else None
        self._client = self._new_client()

    def _new_client(self) -> httpx.AsyncClient:
        verify = True if self._tls is None else self._tls.context
        return httpx.AsyncClient(
            base_url=self._url, headers=self._headers, timeout=ASK_S, trust_env=False, verify=verify
        )

    async def put(self, registration: Registration) -> None:
        if self._tls is not None and self._tls.refresh(asyncio.get_running_loop().time()):
            await self._client.aclose()
            self._client = self._new_client()
        try:
            answer = await self._client.post(PATH, json=msgspec.to_builtins(registration))
        except httpx.HTTPError as error:
            raise NotRegistered(f"{type(error).__name__}: {error}") from error
        if answer.status_code != 200:
            raise NotRegistered(f"it answers {answer.status_code}: {answer.text[:200]}")

    async def close(self) -> None:
        await self._client.aclose()


class RedisPlace:
    def __init__(self, url: str) -> None:
        try:
            import redis.asyncio
            from redis.exceptions import RedisError
        except ModuleNotFoundError as error:
            raise ConfigError("needs `pip install 'kv-baton[redis]'`", field="register") from error
        self._faults = (RedisError, OSError, TimeoutError)
        url, self._prefix = redis_place(url)
        parts = urlsplit(url)
        self.name = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        self._client = redis.asyncio.Redis.from_url(url, socket_timeout=ASK_S, socket_connect_timeout=ASK_S)

    async def put(self, registration: Registration) -> None:
        key = redis_key(self._prefix, registration.type, registration.instance)
        try:
            if registration.ttl_s:
                ttl_ms = int(registration.ttl_s * 1000)
                await self._client.set(key, msgspec.json.encode(registration), px=ttl_ms)
            else:
                await self._client.delete(key)
        except self._faults as error:
            raise NotRegistered(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        await self._client.aclose()


def place_of(url: str, api_key: str | None, tls: ClientTls | None = None) -> Place:
    """`url`: one of `register_places`. `tls`: for https routers; None: httpx's. Raises ConfigError."""
    is_redis = urlsplit(url).scheme in REDIS_SCHEMES
    return RedisPlace(url) if is_redis else RouterPlace(url, api_key, tls)


class Registrar:
    """`start` it when the engine serves, `leave` before it stops serving, and `close` it."""

    def __init__(self, registrations: Sequence[Registration], places: Sequence[Place]) -> None:
        """`registrations`: one for each role."""
        self._registrations, self._places = registrations, places
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._beat(place)) for place in self._places]

    async def _beat(self, place: Place) -> None:
        every_s = min(one.ttl_s for one in self._registrations) / BEATS_PER_TTL
        was_there: bool | None = None
        while True:
            is_there = await self._put(place, self._registrations, is_quiet=was_there is False)
            if is_there and not was_there:
                logger.info("registered at %s as %s", place.name, self._shown)
            was_there = is_there
            await asyncio.sleep(every_s if is_there else min(every_s, RETRY_S))

    @property
    def _shown(self) -> str:
        roles = " and ".join(one.type for one in self._registrations)
        return f"{self._registrations[0].instance} ({roles})"

    async def _put(self, place: Place, registrations: Sequence[Registration], *, is_quiet: bool) -> bool:
        try:
            for one in registrations:
                await place.put(one)
        except NotRegistered as error:
            if not is_quiet:
                logger.warning("cannot register at %s: %s; trying again", place.name, error)
            return False
        return True

    async def leave(self) -> None:
        """Returns when every place has been told, or cannot be reached."""
        await self._end_beats()
        leaving = [msgspec.structs.replace(one, ttl_s=0.0) for one in self._registrations]
        tells = [asyncio.create_task(self._put(place, leaving, is_quiet=False)) for place in self._places]
        if not tells:
            return
        _, late = await asyncio.wait(tells, timeout=LEAVE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*tells, return_exceptions=True)

    async def close(self) -> None:
        await self._end_beats()
        for place in self._places:
            await place.close()

    async def _end_beats(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
