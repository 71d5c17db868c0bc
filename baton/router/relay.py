"""D's stream on its way to the client, event by event; if D fails, an error event instead of the rest."""

import logging
from collections.abc import AsyncGenerator
from typing import Protocol

from baton.core.errors import PeerError
from baton.router.client_answer import ClientAnswer
from baton.router.errors import LegFailure
from baton.router.sse import EventSplitter, is_done

logger = logging.getLogger(__name__)


class Sieve(Protocol):
    def event(self, event: bytes, /) -> bytes:
        """What of a whole event goes to the client."""


async def relay(
    client: ClientAnswer,
    events: EventSplitter,
    chunks: AsyncGenerator[bytes, None],
    *,
    request_id: str,
    sieve: Sieve,
) -> None:
    """`events` has what has arrived already. Raises ClientGone."""
    told = _Told(events, sieve)
    try:
        await client.piece(told.ready())
        async for chunk in chunks:
            events.push(chunk)
            await client.piece(told.ready())
        events.finish()
        await client.piece(told.ready())
    except (LegFailure, PeerError) as failure:
        if told.is_done:
            return await client.end()  # All that matters had arrived.
        logger.warning("%s: decode leg, in the stream: %s", request_id, failure)
        why = failure.kind if isinstance(failure, LegFailure) else str(failure)
        return await client.fail(f"the decode engine failed in the middle of the answer ({why})")
    if not told.is_done:
        return await client.fail("the decode engine ended the stream without [DONE]")
    return await client.end()


class _Told:
    def __init__(self, events: EventSplitter, sieve: Sieve) -> None:
        self._events = events
        self._sieve = sieve
        self.is_done = False  # [DONE] has been told.

    def ready(self) -> bytes:
        """What of the events that have arrived whole goes to the client. Raises PeerError."""
        ready = bytearray()
        while (event := self._events.next()) is not None:
            ready += self._sieve.event(event)
            self.is_done = self.is_done or is_done(event)
        return bytes(ready)
