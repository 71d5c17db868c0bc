"""Members in a Redis or Valkey, which several routers read: a key with an end for each registered engine."""

import asyncio
from collections.abc import AsyncGenerator

import redis.asyncio
from redis.exceptions import RedisError

from baton.http.json_body import decode_as
from baton.http.registration import Registration, redis_key
from baton.router.members.reader import SourceFailed
from baton.router.values.members import Listing, Member, member_of, read_entries
from baton.router.values.settings import without_credentials

ASK_S = 5.0
EVERY_S = 1.0
SCAN_COUNT = 1000


class RedisSource:
    """Implements `Source`."""

    silent_after_s = 3 * ASK_S

    def __init__(self, url: str, prefix: str) -> None:
        self.name = without_credentials(url)
        self._url, self._prefix = url, prefix

    async def members(self) -> AsyncGenerator[Listing, None]:
        client = redis.asyncio.Redis.from_url(self._url, socket_timeout=ASK_S, socket_connect_timeout=ASK_S)
        try:
            while True:
                try:
                    yield await self._read(client)
                except (RedisError, OSError, TimeoutError) as error:
                    raise SourceFailed(f"cannot be read: {error}") from error
                await asyncio.sleep(EVERY_S)
        finally:
            await client.aclose()

    async def _read(self, client: redis.asyncio.Redis) -> Listing:
        keys = [
            key async for key in client.scan_iter(match=redis_key(self._prefix, "*", "*"), count=SCAN_COUNT)
        ]
        values = await client.mget(keys) if keys else []
        held = [
            (str(key, "utf-8", "replace"), value)
            for key, value in zip(keys, values, strict=True)
            if isinstance(value, bytes)  # Else its time has ended meanwhile.
        ]
        return read_entries(held, _member_in)


def _member_in(value: bytes) -> tuple[Member]:
    """Raises UserError."""
    registration = decode_as(value, Registration)
    registration.check()
    return (member_of(registration),)
