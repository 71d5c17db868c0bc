"""The router's own questions to engines: short requests with bounded answers."""

import asyncio
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec

from baton.core.errors import BatonError
from baton.router.fleet.introductions import Answer
from baton.router.shell.engine_http import EnginePool, Origin, header_lines, origin_of, request_bytes
from baton.router.values.settings import without_credentials

MAX_ANSWER_BYTES = 1 << 20  # An introduction has a few KiB; a list of models with many adapters has more.


class AskFailed(BatonError):
    """An engine gave no answer. `is_refused`: it accepts no connection."""

    def __init__(self, message: str, *, is_refused: bool = False) -> None:
        super().__init__(message)
        self.is_refused = is_refused


@lru_cache(maxsize=4096)
def _parse(url: str) -> tuple[Origin, str, str]:
    """Return also the path, and the URL without its user and password."""
    parts = urlsplit(url)
    origin = origin_of(urlunsplit((parts.scheme, parts.netloc, "", "", "")))
    path = f"{parts.path}?{parts.query}" if parts.query else parts.path or "/"
    return origin, path, without_credentials(url)


class _Question:
    """Implements `Exchange`."""

    def __init__(self) -> None:
        self.answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._whole = bytearray()

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status

    def on_data(self, data: bytes) -> None:
        self._whole += data
        if len(self._whole) > MAX_ANSWER_BYTES and not self.answered.done():
            self.answered.set_exception(AskFailed(f"answered with over {MAX_ANSWER_BYTES} bytes"))

    def on_end(self) -> None:
        if not self.answered.done():
            self.answered.set_result(Answer(self._status, bytes(self._whole)))

    def on_lost(self, why: str, *, was_sent: bool) -> None:
        if not self.answered.done():
            self.answered.set_exception(AskFailed(why, is_refused=not was_sent))


class Asker:
    """`key_for`: the key for a URL, without its user and password."""

    def __init__(self, pool: EnginePool, key_for: Callable[[str], str | None] = lambda url: None) -> None:
        self._pool = pool
        self._key_for = key_for

    async def ask(self, url: str, *, timeout_s: float, method: str = "GET", body: Any = None) -> Answer:
        """`timeout_s` is of all of it. Raises TimeoutError, AskFailed."""
        origin, path, bare_url = _parse(url)
        headers = {} if body is None else {"content-type": "application/json"}
        key = self._key_for(bare_url)
        authorization = origin.authorization if key is None else f"Bearer {key}".encode()
        lines = header_lines(headers, authorization)
        content = b"" if body is None else msgspec.json.encode(body)
        question = _Question()
        sending = self._pool.send(origin, request_bytes(origin, method, path, lines, content), question)
        try:
            async with asyncio.timeout(timeout_s):
                return await question.answered
        finally:
            sending.cancel()
