"""HTTP around the endpoints: request ids, event streams, and clients that disconnect.

Work for a client runs beside a listener for its disconnection; the first to end cancels the other. So a
closed connection aborts its engine requests, even while a long prompt is being computed.
"""

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.core.errors import UserError
from baton.http.bodies import ClientGone
from baton.http.errors import ApiError
from baton.server.errors import as_event, describe, log_failure
from baton.server.service import MAX_REQUEST_ID_CHARS

T = TypeVar("T")

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # nginx's status; no client reads it.
_DONE = b"data: [DONE]\n\n"
_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_CHARS}}}")


def request_id_of(request: Request) -> str:
    """Return the client's X-Request-Id, or a new one. Raises UserError."""
    given = request.headers.get("x-request-id")
    if given is None:
        return uuid.uuid4().hex
    if not _REQUEST_ID.fullmatch(given):
        raise UserError(
            f"must be 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters without spaces",
            field="X-Request-Id",
        )
    return given


def json_response(value: Any, *, status: int = 200, request_id: str | None = None) -> Response:
    headers = {"X-Request-Id": request_id} if request_id is not None else None
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


async def until_client_leaves(
    receive: Receive, work: Coroutine[Any, Any, T], *, drop: Callable[[T], None] | None = None
) -> T:
    """Wait for `work`. If the client leaves first, cancel the work, wait for its end, and raise
    ClientGone.

    `drop` gets a result that was ready when the client left. Without `drop` such a result is returned.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        result = working.result()
        if drop is not None and leaving.done():
            drop(result)
            raise ClientGone
        return result
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_disconnect(receive: Receive) -> None:
    """Wait for the disconnection. The body has been read, so only empty remains of it can come before."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, ended by `[DONE]`.

    An error before the first event is an ordinary response with its status; a later one is an event,
    because the status has been sent.
    """

    def __init__(
        self,
        events: AsyncGenerator[Any, None],
        *,
        request_id: str,
        late_headers: Mapping[str, str] | None = None,
    ) -> None:
        """`late_headers` are read when the first event is available."""
        self._late_headers = {} if late_headers is None else late_headers
        self.status_code = 200
        self.background = None
        self.media_type = "text/event-stream"
        self.init_headers(
            {"X-Request-Id": request_id, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        self._events = events
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_client_leaves(receive, self._serve(scope, receive, send))
        except ClientGone:
            logger.debug("request %s: the client has gone", self._request_id)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                first = await anext(events)
            except Exception as error:  # Reported to the client, with its status.
                await error_response(error, self._request_id)(scope, receive, send)
                return
            self.headers.update(self._late_headers)
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
            await _send_body(send, _event(first))
            try:
                async for event in events:
                    await _send_body(send, _event(event))
            except Exception as error:  # Reported to the client, in its stream.
                log_failure(error, self._request_id)
                await _send_body(send, _event(as_event(error)))
            await _send_body(send, _DONE, more=False)


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def error_response(error: Exception, request_id: str | None = None) -> Response:
    """Make the response for an error; an unexpected one is logged with its traceback."""
    log_failure(error, request_id or "-")
    status, body = describe(error)
    response = json_response({"error": body}, status=status, request_id=request_id)
    if isinstance(error, ApiError):
        response.headers.update(error.headers())
    return response
