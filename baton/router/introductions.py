"""Who an engine is: asked of it, kept with it, and in part handed to the other side of a push.

    GET  /baton/introduction    Baton's own engines: their connector's signed introduction
    GET  /v1/models             others, when there is no such page: a vLLM says that it is one
    POST /v1/completions        a vLLM that prefills for a push: one token, for its connector's introduction,
                                which rides on `kv_transfer_params`; vLLM's servers have no page of ours

An introduction names one process. So Baton's engines are asked for it again with every probe of their health,
and it is forgotten as soon as an engine fails: a successor introduces itself. A vLLM, which answers with a
step of its model, is asked once in its life.
"""

import asyncio
import logging
from typing import TypeVar

import httpx
import msgspec

from baton.core.json_text import NotJson, decode_json
from baton.router.fleet import Engine, Introduction
from baton.router.legs import PARAMS

logger = logging.getLogger(__name__)

PATH = "/baton/introduction"
MODELS_PATH = "/v1/models"
ASKING = {"prompt": [1], "max_tokens": 1, "temperature": 0}  # A vLLM's connector is reached by requests only.


class _Model(msgspec.Struct):
    owned_by: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Said(msgspec.Struct):
    remote_engine_id: str | None = None
    baton_introduction: str | None = None


class _Answer(msgspec.Struct):
    kv_transfer_params: _Said | None = None


class Introducer:
    def __init__(self, client: httpx.AsyncClient, timeout_s: float, *, pushes: bool) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._pushes = pushes

    async def of(self, engine: Engine) -> Introduction | None:
        """None: it has none (an engine without our connector), or does not answer."""
        if not engine.is_introduced:
            await self.refresh(engine)
        return engine.introduction

    async def hear_healthy(self, engine: Engine) -> None:
        """With every probe that went well."""
        if not (engine.kind == "vllm" and engine.is_introduced):
            await self.refresh(engine)

    async def refresh(self, engine: Engine) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._ask(engine)
        except (TimeoutError, httpx.HTTPError) as error:
            # What it said before still holds: whether it lives, its probe decides.
            logger.info("%s did not introduce itself: %s", engine.url, repr(error))

    async def _ask(self, engine: Engine) -> None:
        response = await self._client.get(f"{engine.url}{PATH}", timeout=None)
        if response.status_code >= 500:
            engine.is_introduced = False
            return
        introduction = _decode(response, Introduction) if response.status_code == 200 else None
        if introduction is not None:
            engine.kind, engine.introduction = "baton", introduction
            engine.max_model_len = introduction.max_model_len
        else:
            await self._ask_other(engine)
        engine.is_introduced = True

    async def _ask_other(self, engine: Engine) -> None:
        response = await self._client.get(f"{engine.url}{MODELS_PATH}", timeout=None)
        models = _decode(response, _Models) if response.status_code == 200 else None
        model = next((model for model in models.data if model.owned_by == "vllm"), None) if models else None
        introduction = None
        if model is not None and self._pushes and engine.role == "prefill":
            introduction = await self._ask_connector(engine)
        engine.kind = "vllm" if model is not None else None
        engine.max_model_len = model.max_model_len if model is not None else None
        engine.introduction = introduction

    async def _ask_connector(self, engine: Engine) -> Introduction | None:
        asking = {**ASKING, PARAMS: {"baton_introduce": True}}
        answer = await self._client.post(f"{engine.url}/v1/completions", json=asking, timeout=None)
        said = _decode(answer, _Answer) if answer.status_code == 200 else None
        params = said.kv_transfer_params if said is not None else None
        if params is None or params.remote_engine_id is None or params.baton_introduction is None:
            return None  # It has no connector, or another one, or one that does not push.
        return Introduction(params.remote_engine_id, params.baton_introduction)


Decoded = TypeVar("Decoded", bound=msgspec.Struct)


def _decode(response: httpx.Response, kind: type[Decoded]) -> Decoded | None:
    """None: it is something else."""
    try:
        return decode_json(response.content, kind)
    except NotJson as error:
        logger.warning("%s: no %s: %s", response.url, kind.__name__, error)
        return None
