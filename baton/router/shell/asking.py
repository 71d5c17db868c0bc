"""The router's own questions to engines: short requests with bounded answers."""

import asyncio
from typing import Any, NamedTuple

import httpx
import msgspec

from baton.router.shell.sending import send

MAX_ANSWER_BYTES = 1 << 20  # An introduction has a few KiB; a list of models with many adapters has more.


class Answer(NamedTuple):
    status: int
    body: bytes


class AnswerTooLong(httpx.HTTPError):
    """An engine answered one of the router's questions with more than MAX_ANSWER_BYTES."""


async def ask(
    client: httpx.AsyncClient, url: str, *, timeout_s: float, method: str = "GET", body: Any = None
) -> Answer:
    """`timeout_s` is of all of it. Raises TimeoutError, httpx.HTTPError."""
    request = client.build_request(
        method,
        url,
        content=None if body is None else msgspec.json.encode(body),
        headers={} if body is None else {"content-type": "application/json"},
        timeout=None,
    )
    async with asyncio.timeout(timeout_s):
        response = await send(client, request)
        try:
            whole = bytearray()
            async for chunk in response.aiter_bytes():
                whole += chunk
                if len(whole) > MAX_ANSWER_BYTES:
                    raise AnswerTooLong(f"answered with over {MAX_ANSWER_BYTES} bytes")
            return Answer(response.status_code, bytes(whole))
        finally:
            await response.aclose()
