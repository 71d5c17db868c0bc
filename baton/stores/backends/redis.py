"""Values in a Redis or Valkey server, whole by its nature. Needs `redis` (kv-baton[redis]).

    baton:kv:<name>    a value

The server evicts by its own `maxmemory-policy`; with `noeviction` a full server refuses writes, which are
then not stored. `ttl_s` removes values that are not used. Whether values survive a restart of the server
depends on its configuration (RDB, AOF), so that is not promised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from baton.core.errors import ConfigError
from baton.stores.base.chunk_name import is_of_a_store
from baton.stores.base.store import Promise, Store, Stored, StoreError, Unusable, without_credentials

if TYPE_CHECKING:
    from redis import Redis

PREFIX = "baton:kv:"
SCAN_COUNT = 1000
OTHER_TYPE = "WRONGTYPE"  # The server's error for a key of a list, a hash, and so on.


class RedisStore(Store):
    kind: ClassVar[str] = "redis"

    def __init__(self, url: str, *, timeout_s: float, ttl_s: float | None = None, field: str = "url") -> None:
        """`timeout_s`: timeout of one command. Raises ConfigError for a wrong URL or a missing `redis`."""
        try:
            import redis
        except ImportError as error:
            raise ConfigError(
                "needs the package redis: pip install 'kv-baton[redis]'", field=field
            ) from error
        try:
            self._client: Redis = redis.Redis.from_url(
                url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=None
            )
        except ValueError:  # The error may show a part of the password.
            raise ConfigError(
                "is not the URL of a Redis server, such as redis://:PASSWORD@HOST:6379/0; special characters "
                "in a password, such as /, are percent-encoded",
                field=field,
            ) from None
        self._errors = (redis.RedisError, OSError)
        self._ttl_ms = None if ttl_s is None else int(ttl_s * 1000)
        self._field = field
        self.where = without_credentials(url)

    @property
    def promise(self) -> Promise:
        return Promise(
            survives_process=True,
            survives_power_loss=False,
            has_time_of_use=self._ttl_ms is not None,
            evicts_itself=True,
            several_hosts=True,
        )

    def check(self, *, is_written: bool = True) -> None:
        try:
            self._client.ping()
        except (*self._errors, TypeError) as error:  # TypeError: an option in the URL is not known.
            raise ConfigError(f"{self.where} does not answer: {error}", field=self._field) from error

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        if not names:
            return []
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            pipeline.strlen(PREFIX + name)
        sizes: list[int | None] = []
        try:
            for answer in pipeline.execute(raise_on_error=False):
                if isinstance(answer, Exception) and OTHER_TYPE not in str(answer):
                    raise answer
                # STRLEN is 0 for a missing key. What is no string is not there; a write replaces it.
                sizes.append(answer if isinstance(answer, int) and answer else None)
        except self._errors as error:
            raise StoreError(str(error)) from error
        return sizes

    def read(self, name: str, into: memoryview) -> int:
        try:
            value = self._client.get(PREFIX + name)
        except self._errors as error:
            raise _unusable(error) from error
        if value is None:
            raise Unusable("gone")
        assert isinstance(value, bytes)
        if len(value) > len(into):
            raise Unusable("corrupt", f"it has {len(value)} bytes, at most {len(into)} are expected")
        into[: len(value)] = value
        return len(value)

    def read_part(self, name: str, into: memoryview, start: int, nbytes: int) -> None:
        try:
            value = self._client.getrange(PREFIX + name, start, start + nbytes - 1)
            if not value and not self._client.exists(PREFIX + name):
                raise Unusable("gone")
        except self._errors as error:
            raise _unusable(error) from error
        assert isinstance(value, bytes)
        if len(value) != nbytes:
            raise Unusable("corrupt", f"it ends before byte {start + nbytes}")
        into[:nbytes] = value

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        try:
            self._client.set(PREFIX + name, b"".join(parts), px=self._ttl_ms)
        except self._errors as error:
            raise StoreError(str(error)) from error

    def remove(self, names: Sequence[str]) -> None:
        if not names:
            return
        try:
            self._client.unlink(*(PREFIX + name for name in names))
        except self._errors as error:
            raise StoreError(str(error)) from error

    def touch(self, name: str, used_s: float) -> None:
        if self._ttl_ms is not None:
            try:
                self._client.pexpire(PREFIX + name, self._ttl_ms)
            except self._errors as error:
                raise StoreError(str(error)) from error

    def scan(self) -> Iterator[Stored]:
        """The time of use is not known, and is 0."""
        cursor: int | None = None
        while cursor != 0:
            try:
                cursor, keys = self._client.scan(cursor or 0, match=f"{PREFIX}*", count=SCAN_COUNT)
            except self._errors as error:
                raise StoreError(str(error)) from error
            found = (key.decode("utf-8", "replace") for key in keys if isinstance(key, bytes))
            names = [name for key in found if is_of_a_store(name := key.removeprefix(PREFIX))]
            for name, nbytes in zip(names, self.sizes(names), strict=True):
                if nbytes is not None:
                    yield Stored(name, nbytes, 0.0)

    def close(self) -> None:
        self._client.close()


def _unusable(error: Exception) -> Unusable:
    return Unusable("foreign" if OTHER_TYPE in str(error) else "io", str(error))
