"""A request to an engine that can be cancelled at any moment and leaves no socket behind.

httpcore (1.0.9) forgets a connection whose request is cancelled after the connection was made and before the
first of the request is written: for one turn of the loop it waits there for a lock, and what cleans up begins
behind that. The pool then keeps the socket for as long as it lives, since it takes the connection for one
that is still being made. So a cancellation that comes in that turn waits for its end.
"""

import asyncio
from typing import Any

import httpx

# As httpcore's `trace` extension has them. During a TLS handshake nothing is lost.
_MADE = frozenset({"connection.connect_tcp.complete", "connection.start_tls.complete"})
_GOES_ON = frozenset({"connection.start_tls.started", "http11.send_request_headers.started"})


async def send(client: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    """The beginning of the answer. Raises httpx.HTTPError."""
    sending = _Sending(client, request)
    try:
        return await asyncio.shield(sending.task)
    except asyncio.CancelledError:
        sending.cancel()
        await asyncio.wait({sending.task})
        if not sending.task.cancelled() and sending.task.exception() is None:
            await sending.task.result().aclose()  # It came at the same moment.
        raise


class _Sending:
    def __init__(self, client: httpx.AsyncClient, request: httpx.Request) -> None:
        self._is_unused = False  # The connection that was made for this request.
        self._is_unwanted = False
        request.extensions = {**request.extensions, "trace": self._note}
        self.task = asyncio.create_task(client.send(request, stream=True))

    def cancel(self) -> None:
        self._is_unwanted = True
        if not self._is_unused:
            self.task.cancel()

    async def _note(self, event: str, info: dict[str, Any]) -> None:
        if event in _MADE:
            self._is_unused = True
        elif event in _GOES_ON:
            self._is_unused = False
            if self._is_unwanted:
                self.task.cancel()
