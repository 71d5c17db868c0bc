"""Values as objects of a bucket: S3, Google Cloud Storage, Azure. Needs `obstore` (kv-baton[objects]).

An object appears whole when its upload has ended. Conditional puts are not used, because several S3 servers
accept and ignore them. Two engines that write the same value write equally good ones; the last one stays.

An object store keeps no time of use, so limits remove the objects that were *written* first. Requests cost
money; `take_requests` counts them, without the client's retries.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from baton.core.errors import ConfigError, panics_as
from baton.stores.base.chunk_name import is_of_a_store
from baton.stores.base.store import Promise, Store, Stored, StoreError, Unusable, without_credentials

if TYPE_CHECKING:
    import obstore

logger = logging.getLogger(__name__)

MAX_RETRIES = 1
REMOVED_AT_ONCE = 500  # S3 takes at most 1,000 keys in one request.
HEADS_AT_ONCE = 64
FIRST = "0"  # Namespaces have digits and letters. Keys such as "kv//x" and "kv/./x" come before them.
NO_RANGES = "Received non-partial response"  # obstore's error.
CLIENT_OPTION = re.compile(
    r"((aws|google|azure)_)?(allow_(http|invalid_certificates)|(connect_|read_)?timeout|default_content_type"
    r"|http[12]_.*|pool_.*|proxy_.*|randomize_addresses|user_agent)",
    re.IGNORECASE,
)
"""obstore's client options. In the options of a store it panics at them."""
ENDPOINT = re.compile(
    r"https?://([\w.-]+|\[[\da-f:.]+\])(:(?P<port>\d+))?(/[!-~]*)?", re.IGNORECASE | re.ASCII
)
PLAIN = re.compile(r"[\w.-]*", re.ASCII)
PORT_MAX = 65535
ARCHIVED = "InvalidObjectState"  # S3's error for an object that lifecycle rules have moved to an archive.


class ObjectStore(Store):
    kind: ClassVar[str] = "objects"

    def __init__(
        self,
        url: str,
        options: Mapping[str, str] | None = None,
        *,
        timeout_s: float,
        field: str = "url",
        options_field: str = "options",
    ) -> None:
        """`options`: options of the client, named as obstore has them, for example "endpoint", "region".

        `timeout_s`: timeout of one request, its retries included. Raises ConfigError.
        """
        try:
            import obstore.exceptions
            import obstore.store
        except ImportError as error:
            raise ConfigError(
                "needs the package obstore: pip install 'kv-baton[objects]'", field=field
            ) from error
        self._errors: tuple[type[Exception], ...] = (obstore.exceptions.BaseError, OSError)
        self._no_path = obstore.exceptions.InvalidPathError  # Error for a key such as "a//b".
        self._skipped: set[str] = set()  # Folders that the log has named.
        limit = timedelta(seconds=timeout_s)
        arguments: dict[str, Any] = {}
        if not url.startswith(("file:", "memory:")):
            arguments["client_options"] = {"timeout": limit, "connect_timeout": limit, "allow_http": True}
            arguments["retry_config"] = {"max_retries": MAX_RETRIES, "retry_timeout": limit}
        self._field, self._options_field = field, options_field
        self._store = self._made(url, options or {}, arguments)
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()  # Number of requests by operation, since `take_requests`.
        self.where = without_credentials(url)
        self._has_ranges = True  # False once the server has answered a request for a part with the whole.

    @property
    def promise(self) -> Promise:
        return Promise(
            survives_process=True,
            survives_power_loss=True,
            has_time_of_use=False,
            evicts_itself=False,
            several_hosts=True,
        )

    def check(self, *, is_written: bool = True) -> None:
        """Finds a wrong key or bucket at the start. Writes, reads, lists and removes an object.

        A bucket that is only read is listed, and asked for an object that is not there: without the right to
        list, some providers answer 403 instead of 404.
        """
        name, content = f"probe/{secrets.token_hex(8)}", b"Baton's probe; may be removed"
        memory = memoryview(bytearray(len(content)))
        is_good = True
        try:
            with panics_as(_Panic):
                if is_written:
                    self.write(name, (content,))
                    self.read(name, memory)
                is_listed = any(item["path"] == name for batch in self._list("probe") for item in batch)
                if is_written:
                    self.remove([name])
                    is_good = is_listed and memory == content
                else:
                    self.sizes([name])
        except _Panic as error:
            raise ConfigError(f"cannot be used: {error}", field=self._options_field) from None
        except (Unusable, StoreError) as error:
            raise ConfigError(f"{self.where} cannot be used: {error}", field=self._field) from error
        if not is_good:
            raise ConfigError(
                f"{self.where} does not return, or does not list, what was written", field=self._field
            )

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        self._count("head", len(names))
        return asyncio.run(self._sizes(names))

    def read(self, name: str, into: memoryview) -> int:
        import obstore

        self._count("get")
        try:
            found = obstore.get(self._store, name)
            if found.meta["size"] > len(into):
                raise Unusable(
                    "corrupt", f"it has {found.meta['size']} bytes, at most {len(into)} are expected"
                )
            content = found.bytes()
        except FileNotFoundError as error:
            raise Unusable("gone") from error
        except self._errors as error:
            raise _unusable(error) from error
        if len(content) > len(into):
            raise Unusable("corrupt", f"it has {len(content)} bytes, at most {len(into)} are expected")
        into[: len(content)] = memoryview(content)
        return len(content)

    def read_part(self, name: str, into: memoryview, start: int, nbytes: int) -> None:
        import obstore

        self._count("get")
        try:
            if self._has_ranges:
                content = memoryview(obstore.get_range(self._store, name, start=start, length=nbytes))
            else:
                content = memoryview(obstore.get(self._store, name).bytes())[start : start + nbytes]
        except FileNotFoundError as error:
            raise Unusable("gone") from error
        except self._errors as error:
            if self._has_ranges and NO_RANGES in str(error):
                logger.warning("%s sends whole objects; load none of it layer by layer", self.where)
                self._has_ranges = False
                self.read_part(name, into, start, nbytes)
                return
            if "range" in _told(error).lower() and self._ends_before(name, start + nbytes):
                raise Unusable("corrupt", f"it ends before byte {start + nbytes}") from error
            raise _unusable(error) from error
        if len(content) != nbytes:
            raise Unusable("corrupt", f"it ends before byte {start + nbytes}")
        into[:nbytes] = content

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        import obstore

        self._count("put")
        try:
            obstore.put(self._store, name, b"".join(parts), use_multipart=False)
        except self._errors as error:
            raise StoreError(_told(error)) from error

    def remove(self, names: Sequence[str]) -> None:
        import obstore

        errors = []
        for start in range(0, len(names), REMOVED_AT_ONCE):
            self._count("delete")
            try:
                obstore.delete(self._store, names[start : start + REMOVED_AT_ONCE])
            except FileNotFoundError:
                continue
            except self._errors as error:
                errors.append(error)
        if errors:
            raise StoreError(_told(errors[0])) from errors[0]

    def touch(self, name: str, used_s: float) -> None:
        return

    def scan(self) -> Iterator[Stored]:
        for item in self._walk("", ""):
            if is_of_a_store(item["path"]):
                yield Stored(item["path"], item["size"], item["last_modified"].timestamp())

    def take_requests(self) -> Mapping[str, int]:
        with self._lock:
            taken, self._requests = self._requests, Counter()
        return taken

    def close(self) -> None:
        return

    def _made(
        self, url: str, options: Mapping[str, str], arguments: Mapping[str, Any]
    ) -> obstore.store.ObjectStore:
        """Raises ConfigError. If it is about one option, that is named."""
        import obstore.store

        for name, value in options.items():
            if problem := _problem_with(name, value, url):
                raise ConfigError(problem, field=f"{self._options_field}.{name}")

        errors: tuple[type[Exception], ...] = (*self._errors, ValueError, TypeError)

        def make(config: Mapping[str, str]) -> Any:
            """Returns the store; or the error's first line, because the others show credentials."""
            given = {**arguments, "config": config} if config else arguments
            try:
                with panics_as(_Panic):
                    return obstore.store.from_url(url, **given)
            except errors as error:
                return _told(error)

        made: obstore.store.ObjectStore | str = make(options)
        if not isinstance(made, str):
            return made
        if made == make({}):
            raise ConfigError(f"is not the URL of an object store: {made}", field=self._field)
        for name, value in options.items():
            others = {other: options[other] for other in options if other != name}
            if make({name: value}) == made or not isinstance(make(others), str):
                raise ConfigError(f"cannot be used: {made}", field=f"{self._options_field}.{name}")
        raise ConfigError(f"cannot be used: {made}", field=self._options_field)

    def _ends_before(self, name: str, nbytes: int) -> bool:
        """Whether an object ends before a part that was refused; a server's error need not say why."""
        try:
            (size,) = self.sizes([name])
        except StoreError:
            return False
        return size is not None and size < nbytes

    def _count(self, operation: str, count: int = 1) -> None:
        with self._lock:
            self._requests[operation] += count

    def _walk(self, folder: str, after: str) -> Iterator[obstore.ObjectMeta]:
        """All objects below a folder, in order. If the client cannot name a key there, and so lists nothing,
        folder by folder; the folder of that key is left out. Raises StoreError.
        """
        import obstore

        try:
            for batch in self._list(folder, after):
                for item in batch:
                    after = item["path"]
                    yield item
            return
        except StoreError as error:
            if not isinstance(error.__cause__, self._no_path):
                raise
        if not folder and after < FIRST:
            return (yield from self._walk("", FIRST))
        self._count("list")
        try:
            inside = obstore.list_with_delimiter(self._store, folder)
        except self._no_path as error:
            if not folder:
                raise StoreError(_told(error)) from error
            if folder not in self._skipped:
                self._skipped.add(folder)
                logger.warning(
                    "%s: sweeps leave out the folder %s (%d folders are): %s",
                    self.where,
                    folder,
                    len(self._skipped),
                    _told(error),
                )
            return
        except self._errors as error:
            raise StoreError(_told(error)) from error
        yield from (item for item in inside["objects"] if item["path"] > after)
        for each in inside["common_prefixes"]:
            if f"{each}0" > after:  # Not all of it comes before.
                yield from self._walk(each, after)

    def _list(self, folder: str, after: str = "") -> Iterator[Sequence[obstore.ObjectMeta]]:
        import obstore

        try:
            for batch in obstore.list(
                self._store, prefix=folder or None, offset=after or None, chunk_size=1000
            ):
                self._count("list")
                yield batch
        except self._errors as error:
            raise StoreError(_told(error)) from error

    async def _sizes(self, names: Sequence[str]) -> list[int | None]:
        import obstore

        at_once = asyncio.Semaphore(HEADS_AT_ONCE)

        async def size(name: str) -> int | None:
            async with at_once:
                try:
                    return int((await obstore.head_async(self._store, name))["size"])
                except FileNotFoundError:
                    return None
                except self._errors as error:
                    raise StoreError(_told(error)) from error

        return await asyncio.gather(*map(size, names))


def _problem_with(name: str, value: object, url: str) -> str:
    """The reason to refuse an option that the client would ignore, or at which it would panic; or ""."""
    if not isinstance(value, str):
        return f'must be a string, such as "true", is of type {type(value).__name__}'
    if url.startswith("file:"):
        return "is not known; a folder has no options"
    if CLIENT_OPTION.fullmatch(name):
        return "is set by Baton, which allows http:// endpoints; set timeout_s for the deadline of a request"
    kind = name.lower()
    if "service_account_key" not in kind and not value.isprintable():  # A service account key is a JSON text.
        return "has a character that cannot be printed, such as the end of a line"
    if kind.endswith(("region", "bucket")) and not PLAIN.fullmatch(value):
        return "may have letters, digits, '.', '_' and '-'"
    if kind.endswith(("endpoint", "endpoint_url", "base_url")):
        found = ENDPOINT.fullmatch(value)
        if found is None or int(found["port"] or 0) > PORT_MAX:
            return "must be a URL such as http://HOST:9000"
    return ""


class _Panic(ValueError):
    """The client, which is compiled Rust, has panicked."""

    def __init__(self, message: str) -> None:
        super().__init__(f"the client cannot use it: {message}")


def _unusable(error: Exception) -> Unusable:
    return Unusable("foreign" if ARCHIVED in str(error) else "io", _told(error))


def _told(error: Exception) -> str:
    """The first line. The others show the client's data, with credentials."""
    return without_credentials(str(error).partition("\n")[0])
