"""Charges a request to its tenant's rate limits before it begins. See `baton.http.rate_limits`.

The limits hold for all processes of a router: its workers ask the coordinator, which counts; a router of one
process counts at once, without a `Charging`. With a Redis each process asks that, and the limits hold for all
routers that use it. If the counts cannot be reached, requests are let in: a limit is no reason to serve no
client.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from baton.http.errors import ApiError
from baton.http.rate_limits import LET_IN, Verdict
from baton.router.request.reply import CLIENT_CLOSED_REQUEST, SHUTTING_DOWN
from baton.router.shell.client_http import Reply
from baton.router.values.errors import RouterError

logger = logging.getLogger(__name__)

CHARGE_S = 2.0


class Charges(Protocol):
    def charge_here(self, tenant: str, num_prompt_tokens: int) -> Verdict | None:
        """None: the counts are not in this process."""

    async def charge(self, tenant: str, num_prompt_tokens: int) -> Verdict:
        """Any exception means that the counts cannot be reached."""


class Charging:
    """A request while its tenant is charged. Implements `Handler`."""

    def __init__(
        self,
        charge: Callable[[], Awaitable[Verdict]],
        reply: Reply,
        then: Callable[[], None],
        count: Callable[[str], None],
        on_over: Callable[[int], None],
    ) -> None:
        """`then` begins the request; `on_over` is called instead, with the status, if it does not begin.

        `count` is called with the outcome: let_in, refused or unavailable.
        """
        self._charge, self._reply, self._then = charge, reply, then
        self._count, self._on_over = count, on_over
        self._task = asyncio.create_task(self._run())

    def client_gone(self) -> None:
        self._end(None, CLIENT_CLOSED_REQUEST)

    def stop(self) -> None:
        self._end(RouterError.unavailable(SHUTTING_DOWN), 503)

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def _end(self, error: ApiError | None, status: int) -> None:
        self._task.cancel()
        if error is not None:
            self._reply.refuse(error)
            self._reply.flush()
        self._on_over(status)

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(CHARGE_S):
                verdict = await self._charge()
        except Exception as error:  # The client of Redis raises it; its classes are not known here.
            logger.error("rate limits cannot be counted: %s", type(error).__name__)
            self._count("unavailable")
            verdict = LET_IN
        else:
            self._count(verdict.outcome)
        if (refusal := verdict.error) is not None:
            self._reply.refuse(refusal)
            self._reply.flush()
            return self._on_over(refusal.status)
        self._reply.rate_headers = verdict.headers
        self._then()
        return self._reply.flush()
