"""What the router does with a request: hand it over (`Handoff`), or pass it to a decode engine as it is."""

import logging
from collections.abc import Mapping
from typing import Any

from starlette.types import Send

from baton.router.client_answer import ClientAnswer
from baton.router.dispatch import Dispatch
from baton.router.errors import LegFailure, RouterError
from baton.router.fleet import Engine
from baton.router.handoff import Handoff
from baton.router.incoming import Incoming
from baton.router.judge import is_engines_fault

logger = logging.getLogger(__name__)


class Proxy:
    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch

    async def complete(self, incoming: Incoming, body: Mapping[str, Any], send: Send) -> int:
        """Both legs. Returns the status that the client got; raises RouterError if nothing was sent yet."""
        return await Handoff(self._dispatch, incoming, body, self._client(incoming, send)).run()

    async def forward(self, incoming: Incoming, send: Send) -> int:
        """To a decode engine as it is: what has no KV to hand over (`/v1/models`, `/tokenize`)."""
        dispatch = self._dispatch
        routed = dispatch.route(b"")
        leg = dispatch.leg(incoming, incoming.body, dispatch.settings.timeouts.first_byte_s)
        tried: list[Engine] = []
        failure: LegFailure | None = None
        while (engine := dispatch.choose("decode", routed, tried)) is not None:
            tried.append(engine)
            try:
                async with dispatch.upstream.open(engine, leg) as answer:
                    if answer.chunks is not None:
                        raise RouterError.gateway(
                            "the engine streamed an answer that was not asked to be one"
                        )
                    if not (is_engines_fault(answer) and dispatch.choose("decode", routed, tried)):
                        return await self._client(incoming, send).whole(answer)
            except LegFailure as caught:
                logger.warning("%s: %s: %s", incoming.request_id, incoming.path, caught)
                failure = caught
        raise dispatch.no_engine("decode", failure)

    def _client(self, incoming: Incoming, send: Send) -> ClientAnswer:
        idle_s = self._dispatch.settings.timeouts.idle_s
        return ClientAnswer(incoming, send, self._dispatch.metrics, idle_s=idle_s)
