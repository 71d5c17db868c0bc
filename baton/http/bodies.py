"""Reads request bodies within a size, a deadline and a total budget; checks JSON before it is decoded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from baton.core.errors import BatonError, UserError
from baton.http import json_body
from baton.http.errors import RETRY_AFTER_S, ApiError
from baton.http.settings import HttpSettings
from baton.http.workers import Job, WorkerOutOfMemory, WorkerPool, WorkerTimeout

if TYPE_CHECKING:
    from starlette.types import Receive

# Pause between two iterations of the event loop that take tens of milliseconds for one request. A stream's
# next token needs several iterations, so one iteration alone between the two would delay it.
PAUSE_S = 0.01
CHECKED_INLINE_BYTES = 256 << 10  # The costliest JSON of this size takes 10 ms to check and to decode.


class ClientGone(BatonError):
    """The client has closed its connection, or does not read: no answer can reach it."""


class Bodies:
    """All bodies of one process. Used from one event loop."""

    def __init__(self, settings: HttpSettings, workers: WorkerPool) -> None:
        self._settings = settings
        self._workers = workers
        self._check = Job("baton.http.json_body:compact", settings.admission_s)
        self.held_bytes = 0  # Bytes of all bodies that are being read or decoded.

    @asynccontextmanager
    async def read(self, headers: Mapping[str, str], receive: Receive) -> AsyncIterator[bytes]:
        """Read the body and yield it as JSON that is cheap to decode.

        It counts against the total until the context ends. Raises ApiError 413, 408 or 503 as soon as a
        limit is exceeded, without reading the rest; ClientGone; UserError for JSON that costs too much.
        """
        body = bytearray()
        self.check_declared_length(headers)
        try:
            await self._fill(body, receive)
            raw = bytes(body)
            yield raw if self.is_cheap(raw) else await self.made_cheap(raw)
        finally:
            self.release(len(body))

    async def _fill(self, body: bytearray, receive: Receive) -> None:
        try:
            async with asyncio.timeout(self._settings.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone("disconnected before its request was complete")
                    chunk = message.get("body", b"")
                    body += chunk
                    self.hold(len(chunk), len(body))
                    if not message.get("more_body", False):
                        return
        except TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {self._settings.body_s:g} s", code="body_timeout"
            ) from None

    def is_cheap(self, raw: bytes) -> bool:
        """Return whether the body can be decoded at once. Raise UserError for JSON that costs too much."""
        if len(raw) > CHECKED_INLINE_BYTES:
            return False
        json_body.check_cost(raw)
        return True

    async def made_cheap(self, raw: bytes) -> bytes:
        """Return a long body as JSON that is cheap to decode. Raise UserError."""
        if len(raw) <= self._settings.inline_body_bytes and json_body.is_cheap(raw):
            await asyncio.sleep(PAUSE_S)  # Then the caller decodes it.
            return raw
        try:
            cheap: bytes = await self._workers.run(self._check, raw)
        except (WorkerTimeout, WorkerOutOfMemory) as error:
            raise UserError(f"the body costs too much to parse: {error}") from error
        return cheap

    def check_declared_length(self, headers: Mapping[str, str]) -> None:
        """Raise ApiError 413."""
        declared = headers.get("content-length", "")
        if declared.isdecimal() and len(declared) < 20 and int(declared) > self._settings.max_body_bytes:
            raise self._too_large()

    def hold(self, num_bytes: int, num_of_body: int) -> None:
        """Count bytes that have arrived, until `release`. Raise ApiError 413 or 503."""
        self.held_bytes += num_bytes
        if num_of_body > self._settings.max_body_bytes:
            raise self._too_large()
        if self.held_bytes > self._settings.total_body_bytes:
            raise ApiError(
                503,
                f"bodies of {self._settings.total_body_bytes} bytes are being read; try again",
                code="body_budget",
                retry_after_s=RETRY_AFTER_S,
            )

    def release(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes

    def _too_large(self) -> ApiError:
        limit = self._settings.max_body_bytes
        return ApiError(413, f"the body has more than {limit} bytes (max_body_bytes)", code="body_too_large")
