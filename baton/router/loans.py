"""Tells a prefill engine that nobody will come for what it has lent: its client has gone, say.

Best effort, beside the requests: an engine that does not hear of it takes its blocks back when their time is
up, and one whose blocks have been claimed meanwhile lends them on. A vLLM, whose server has no page of ours,
is told by a request of one token.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec

from baton.router.fleet import Engine
from baton.router.introductions import ASKING
from baton.router.legs import PARAMS

logger = logging.getLogger(__name__)

PATH = "/baton/take_back"
VLLM_PATH = "/v1/completions"
RETURNS_MAX = 256  # At once; beyond that time does it.


class LoanReturns:
    """From the loop of the router; `close` ends what is under way."""

    def __init__(self, client: httpx.AsyncClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._under_way: set[asyncio.Task[None]] = set()

    def give_back(self, engine: Engine, params: Mapping[str, Any]) -> None:
        """Returns at once. `params`: the `kv_transfer_params` of the engine's answer."""
        if engine.kind is None or "baton_ticket" not in params or len(self._under_way) >= RETURNS_MAX:
            return
        task = asyncio.create_task(
            self._tell(engine, params["baton_ticket"]), name=f"loan back to {engine.url}"
        )
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def close(self) -> None:
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def _tell(self, engine: Engine, ticket: Any) -> None:
        path, body = PATH, {"baton_ticket": ticket}
        if engine.kind == "vllm":
            path, body = VLLM_PATH, {**ASKING, PARAMS: {"baton_take_back": ticket}}
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._client.post(
                    engine.url + path,
                    content=msgspec.json.encode(body),
                    headers={"content-type": "application/json"},
                    timeout=None,  # Ours, over all of it.
                )
        except (TimeoutError, httpx.HTTPError) as error:
            logger.info("%s does not hear that a loan is not needed: %r", engine.url, error)
