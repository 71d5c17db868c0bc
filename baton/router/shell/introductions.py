"""Who an engine is: asked of it, kept with it, and in part handed to the other side of a push.

    GET  /baton/introduction    Baton's own engines: their connector's signed introduction
    GET  /v1/models             others, when there is no such page: a vLLM says that it is one
    POST /v1/completions        a vLLM that prefills for a push: one token, for its connector's introduction,
                                which rides on `kv_transfer_params`; vLLM's servers have no page of ours

An introduction names one process. So Baton's engines are asked for it again with every probe of their health,
and it is forgotten as soon as an engine fails: a successor introduces itself. A vLLM, which answers with a
step of its model, is asked once in its life, and with every probe for the names of its adapters only.
"""

import asyncio
import logging
from typing import TypeVar

import msgspec

from baton.core.json_text import NotJson, decode_json
from baton.router.fleet import Engine, Fleet, Identity, Introduction, ModelCard
from baton.router.legs import PARAMS
from baton.router.shell.asking import Answer, Asker, AskFailed

logger = logging.getLogger(__name__)

PATH = "/baton/introduction"
MODELS_PATH = "/v1/models"
ASKING = {"prompt": [1], "max_tokens": 1, "temperature": 0}  # A vLLM's connector is reached by requests only.


class _Models(msgspec.Struct):
    data: list[ModelCard]


class _Said(msgspec.Struct):
    remote_engine_id: str | None = None
    baton_introduction: str | None = None


class _Answer(msgspec.Struct):
    kv_transfer_params: _Said | None = None


class Introducer:
    def __init__(self, asker: Asker, fleet: Fleet, timeout_s: float, *, pushes: bool) -> None:
        self._asker = asker
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._pushes = pushes
        self._asking: dict[Engine, asyncio.Task[None]] = {}

    async def refresh(self, engine: Engine) -> None:
        """Requests that need the same engine's introduction at one moment share one question."""
        task = self._asking.get(engine)
        if task is None:
            task = asyncio.create_task(self._refresh(engine), name=f"introduction of {engine.url}")
            self._asking[engine] = task
            task.add_done_callback(lambda _: self._asking.pop(engine, None))
        await asyncio.shield(task)

    async def close(self) -> None:
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    async def _refresh(self, engine: Engine) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._ask(engine)
        except (TimeoutError, AskFailed) as error:
            # What it said before still holds: whether it lives, its probe decides.
            logger.info("%s did not introduce itself: %s", engine.url, repr(error))
        finally:
            engine.was_asked = True

    async def _ask(self, engine: Engine) -> None:
        if engine.kind == "vllm" and engine.is_introduced:
            return await self._ask_other(engine)  # For adapters that it has loaded meanwhile.
        answer = await self._asker.ask(engine.admin_address + PATH, timeout_s=self._timeout_s)
        if answer.status >= 500:
            engine.is_introduced = False
            return
        introduction = _decode(engine, answer, Introduction)
        if introduction is not None:
            engine.kind, engine.introduction = "baton", introduction
            engine.max_model_len = introduction.max_model_len
            identity = _identity_of(introduction)
            self._fleet.note_identity(engine, identity, _cards_of(introduction))
        else:
            await self._ask_other(engine)
        engine.is_introduced = True

    async def _ask_other(self, engine: Engine) -> None:
        models = _decode(engine, await self._get(engine, MODELS_PATH), _Models)
        model = next((model for model in models.data if model.owned_by == "vllm"), None) if models else None
        if model is not None and engine.is_introduced and engine.kind == "vllm":
            return self._note_models(engine, model, models)
        introduction = None
        if model is not None and self._pushes and engine.role == "prefill":
            introduction = await self._ask_connector(engine)
        engine.kind = "vllm" if model is not None else None
        engine.max_model_len = model.max_model_len if model is not None else None
        engine.introduction = introduction
        self._note_models(engine, model, models)

    def _note_models(self, engine: Engine, model: ModelCard | None, models: _Models | None) -> None:
        name = model.id if model is not None else None
        identity = Identity("vllm", name) if name is not None else None
        self._fleet.note_identity(
            engine, identity, models.data if models is not None and models.data else None
        )

    async def _ask_connector(self, engine: Engine) -> Introduction | None:
        asking = {**ASKING, PARAMS: {"baton_introduce": True}}
        url = f"{engine.address}/v1/completions"
        answer = await self._asker.ask(url, timeout_s=self._timeout_s, method="POST", body=asking)
        said = _decode(engine, answer, _Answer)
        params = said.kv_transfer_params if said is not None else None
        if params is None or params.remote_engine_id is None or params.baton_introduction is None:
            return None  # It has no connector, or another one, or one that does not push.
        return Introduction(params.remote_engine_id, params.baton_introduction)

    async def _get(self, engine: Engine, path: str) -> Answer:
        return await self._asker.ask(engine.address + path, timeout_s=self._timeout_s)


Decoded = TypeVar("Decoded", bound=msgspec.Struct)


def _decode(engine: Engine, answer: Answer, kind: type[Decoded]) -> Decoded | None:
    """None: it is something else."""
    if answer.status != 200:
        return None
    try:
        return decode_json(answer.body, kind)
    except NotJson as error:
        logger.warning("%s: no %s: %s", engine.url, kind.__name__, error)
        return None


def _identity_of(introduction: Introduction) -> Identity | None:
    """None: an engine of an older version, which does not report it."""
    fingerprint, name = introduction.fingerprint, introduction.served_model_name
    if fingerprint is None or name is None:
        return None
    return Identity("baton", name, (fingerprint.model, fingerprint.revision))


def _cards_of(introduction: Introduction) -> list[ModelCard] | None:
    name, length = introduction.served_model_name, introduction.max_model_len
    return [ModelCard(name, owned_by="baton", root=name, max_model_len=length)] if name is not None else None
