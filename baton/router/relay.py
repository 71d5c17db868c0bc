"""D's stream on its way to the client, event by event; if D fails, an error event instead of the rest."""

import logging
from collections.abc import AsyncGenerator
from typing import Protocol

from baton.router.client_answer import ClientAnswer
from baton.router.errors import LegFailure
from baton.router.sse import EventCutter

logger = logging.getLogger(__name__)


class Sieve(Protocol):
    """Of whole events."""

    def events(self, piece: bytes, /) -> bytes: ...


async def relay(
    client: ClientAnswer,
    begun: bytes,
    chunks: AsyncGenerator[bytes, None],
    *,
    request_id: str,
    sieve: Sieve,
) -> None:
    """`begun` has arrived already. Raises ClientGone."""
    cutter = EventCutter()
    await client.piece(sieve.events(cutter.push(begun)))
    try:
        async for chunk in chunks:
            await client.piece(sieve.events(cutter.push(chunk)))
    except LegFailure as failure:
        if cutter.is_done:
            return await client.end()  # All that matters had arrived.
        logger.warning("%s: decode leg, in the stream: %s", request_id, failure)
        message = f"the decode engine failed in the middle of the answer ({failure.kind})"
        return await client.fail(message, separator=cutter.separator())
    await client.piece(cutter.finish())
    if not cutter.is_done:
        message = "the decode engine ended the stream without [DONE]"
        return await client.fail(message, separator=cutter.separator())
    return await client.end()
