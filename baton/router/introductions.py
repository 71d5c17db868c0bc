"""Who an engine is to the other engines: asked of it, kept with it, handed to the other side of a push.

An introduction names one process. So it is asked for again with every probe of the engine's health, and
forgotten as soon as the engine fails: a successor introduces itself.
"""

import asyncio
import logging

import httpx
import msgspec

from baton.router.fleet import Engine, Introduction

logger = logging.getLogger(__name__)

PATH = "/baton/introduction"


class Introducer:
    def __init__(self, client: httpx.AsyncClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    async def of(self, engine: Engine) -> Introduction | None:
        """None: it has none (an engine without our connector), or does not answer."""
        if not engine.is_introduced:
            await self.refresh(engine)
        return engine.introduction

    async def refresh(self, engine: Engine) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.get(f"{engine.url}{PATH}", timeout=None)
        except (TimeoutError, httpx.HTTPError) as error:
            logger.info("%s did not introduce itself: %s", engine.url, repr(error))
            return  # What it said before still holds: whether it lives, its probe decides.
        engine.introduction = _read(response)
        engine.is_introduced = response.status_code < 500


def _read(response: httpx.Response) -> Introduction | None:
    if response.status_code != 200:
        return None
    try:
        return msgspec.json.decode(response.content, type=Introduction)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        logger.warning("%s: no introduction: %s", response.url, error)
        return None
