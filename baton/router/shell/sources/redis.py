"""Members in a Redis or Valkey, which several routers read: a key with an end for each registered engine."""

import asyncio
import logging
from collections.abc import AsyncGenerator

import redis.asyncio
from redis.exceptions import RedisError

from baton.core.errors import UserError
from baton.core.json_text import NotJson, decode_json
from baton.http.registration import Registration, redis_key
from baton.router.members import Member, member_of
from baton.router.settings import check_url, without_credentials
from baton.router.shell.members import SourceFailed

logger = logging.getLogger(__name__)

ASK_S = 5.0
EVERY_S = 1.0
SCAN_COUNT = 1000


class RedisSource:
    """Implements `Source`."""

    silent_after_s = 3 * ASK_S

    def __init__(self, url: str, prefix: str) -> None:
        self.name = without_credentials(url)
        self._url, self._prefix = url, prefix

    async def members(self) -> AsyncGenerator[frozenset[Member], None]:
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

    async def _read(self, client: redis.asyncio.Redis) -> frozenset[Member]:
        keys = [
            key async for key in client.scan_iter(match=redis_key(self._prefix, "*", "*"), count=SCAN_COUNT)
        ]
        values = await client.mget(keys) if keys else []
        found = set()
        for key, value in zip(keys, values, strict=True):
            if not isinstance(value, bytes):
                continue  # Its time has ended meanwhile.
            try:
                registration = decode_json(value, Registration)
                registration.check()
                check_url(member_of(registration).address, "instance")
            except (NotJson, UserError) as error:
                logger.warning("%s: %r is no registration: %s", self.name, key, error)
                continue
            found.add(member_of(registration))
        return frozenset(found)
