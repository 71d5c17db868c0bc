"""What one client is told: nothing yet, the beginning of a stream, or everything.

nothing --start--> streaming --piece ...--> streaming --end | fail--> everything
nothing --whole--> everything
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from starlette.types import Send

from baton.router.errors import ClientGone, error_event
from baton.router.incoming import Incoming
from baton.router.metrics import RouterMetrics
from baton.router.upstream import LegAnswer, end_to_end


class ClientAnswer:
    def __init__(self, incoming: Incoming, send: Send, metrics: RouterMetrics, *, idle_s: float) -> None:
        self._incoming = incoming
        self._send = send
        self._metrics = metrics
        self._idle_s = idle_s
        self.status: int | None = None  # Once it has one.

    @property
    def has_started(self) -> bool:
        return self.status is not None

    async def whole(
        self, answer: LegAnswer, extra: Mapping[str, str] | None = None, *, body: bytes | None = None
    ) -> int:
        """Returns the status. `body`: instead of the answer's."""
        assert answer.chunks is None
        body = answer.body if body is None else body
        await self.start(answer, {**(extra or {}), "content-length": str(len(body))})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        return answer.status

    async def start(self, answer: LegAnswer, extra: Mapping[str, str]) -> None:
        """Begin with the status and the headers of an engine's answer."""
        assert not self.has_started
        self.status = answer.status
        self._metrics.first_byte_seconds.observe(time.monotonic() - self._incoming.received_at_s)
        headers = {**end_to_end(answer.headers), "x-request-id": self._incoming.request_id, **extra}
        await self._send(
            {
                "type": "http.response.start",
                "status": answer.status,
                "headers": [
                    (name.lower().encode("latin-1"), value.encode("latin-1"))
                    for name, value in headers.items()
                ],
            }
        )

    async def piece(self, piece: bytes) -> None:
        """Raises ClientGone."""
        if not piece:
            return
        # A client that keeps the connection but does not read holds D's blocks: it has its deadline too.
        try:
            async with asyncio.timeout(self._idle_s):
                await self._say({"type": "http.response.body", "body": piece, "more_body": True})
        except TimeoutError as error:
            raise ClientGone("does not read its answer") from error

    async def end(self) -> None:
        await self._say({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, message: str) -> None:
        """An error event in place of the rest."""
        self._metrics.broken_streams.inc()
        await self.piece(error_event(message))
        await self.end()

    async def _say(self, message: dict[str, Any]) -> None:
        assert self.has_started
        await self._send(message)
