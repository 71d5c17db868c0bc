"""Questions that identify an engine, and the meaning of its answers. A generator asks them, without I/O.

    GET  /baton/introduction    Baton's own engines: their connector's signed introduction
    GET  /v1/models             others, when there is no such page: names of a model and its adapters
    POST /v1/completions        a vLLM: one token, for its connector's introduction and KV identity,
                                which its `kv_transfer_params` have; vLLM's servers have no page of Baton's

An introduction names one process, with the weights that it has. So the router asks Baton's engines again with
every probe of their health. It forgets an introduction as soon as an engine fails, because a new process
introduces itself anew. The completion costs a vLLM a step of its model. So the router asks a vLLM that has an
identity every CONNECTOR_EVERY_S, and when its KV events report that its cache was emptied. It asks for the
names with every probe.
"""

import logging
from collections.abc import Generator
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from baton.core.engine_card import EngineCard
from baton.core.identity import KVIdentity
from baton.core.json_text import NotJson, decode_json
from baton.router.fleet.engine import Engine
from baton.router.values.identity import Identity, Introduced, ModelCard
from baton.router.values.legs import PARAMS

logger = logging.getLogger(__name__)

PATH = "/baton/introduction"
MODELS_PATH = "/v1/models"
COMPLETIONS_PATH = "/v1/completions"
ASKING = {"prompt": [1], "max_tokens": 1, "temperature": 0}  # Only requests reach a vLLM's connector.
CONNECTOR_EVERY_S = 10.0


class Question(NamedTuple):
    url: str
    method: str = "GET"
    body: Any = None


class Answer(NamedTuple):
    status: int
    body: bytes


Dialogue: TypeAlias = Generator[Question, Answer, Introduced | None]


class _Models(msgspec.Struct):
    data: list[ModelCard]


class _Said(msgspec.Struct):
    remote_engine_id: str | None = None
    baton_introduction: str | None = None
    baton_has_states: bool = False
    baton_kv_identity: Any = None


class _Completion(msgspec.Struct):
    kv_transfer_params: _Said | None = None


class _Card(EngineCard, frozen=True):
    kv_identity: Any = None


def introduce(engine: Engine, *, asks_connector: bool = False) -> Dialogue:
    """Yield questions, and return what the engine is. None: it cannot answer now.

    `asks_connector`: ask the connector again of a vLLM that has introduced itself.
    """
    if engine.kind == "vllm" and engine.is_introduced:
        return (yield from _introduce_again(engine, asks_connector=asks_connector))
    answer = yield Question(engine.admin_address + PATH)
    if answer[0] >= 500:
        return None
    cards: tuple[ModelCard, ...] | None
    read = _decode(engine, answer, _Card)
    if read is not None:
        known = {**msgspec.structs.asdict(read), "kv_identity": _read_identity(engine, read.kv_identity)}
        card, cards = EngineCard(**known), None
        if (name := card.served_model_name) is not None:
            cards = (ModelCard(name, owned_by="baton", root=name, max_model_len=card.max_model_len),)
        return Introduced("baton", card, card.max_model_len, _identity_of(card), cards)
    models = _decode(engine, (yield Question(engine.address + MODELS_PATH)), _Models)
    cards = tuple(models.data) if models is not None and models.data else None
    model = _model_of(cards)
    if model is None:
        return Introduced(None, None, None, None, cards)
    introduction = yield from _ask_connector(engine)
    return Introduced("vllm", introduction, model.max_model_len, _named(model, introduction), cards)


def _introduce_again(engine: Engine, *, asks_connector: bool) -> Dialogue:
    """Ask a vLLM again, because its adapters and weights may have changed."""
    models = _decode(engine, (yield Question(engine.address + MODELS_PATH)), _Models)
    cards = tuple(models.data) if models is not None else ()
    model, introduction = _model_of(cards), engine.introduction
    if model is None:
        return Introduced("vllm", introduction, engine.max_model_len, engine.identity, engine.cards)
    if asks_connector and introduction is not None and introduction.kv_identity is not None:
        introduction = yield from _ask_connector(engine)
    return Introduced("vllm", introduction, model.max_model_len, _named(model, introduction), cards)


def _model_of(cards: tuple[ModelCard, ...] | None) -> ModelCard | None:
    """The model of a vLLM. None: this is no vLLM."""
    return next((card for card in cards or () if card.owned_by == "vllm"), None)


def _named(model: ModelCard, introduction: EngineCard | None) -> Identity | None:
    kv = introduction.kv_identity if introduction is not None else None
    return Identity("vllm", model.id, kv) if model.id is not None else None


def _ask_connector(engine: Engine) -> Generator[Question, Answer, EngineCard | None]:
    """Ask a vLLM's connector. If it cannot answer now, its last answer counts. None: it is not Baton's."""
    asking = {**ASKING, PARAMS: {"baton_introduce": True}}
    answer = yield Question(engine.address + COMPLETIONS_PATH, "POST", asking)
    if answer[0] != 200:
        return engine.introduction if engine.is_introduced else None
    completion = _decode(engine, answer, _Completion)
    params = completion.kv_transfer_params if completion is not None else None
    if params is None:
        return None
    kv, engine_id = _read_identity(engine, params.baton_kv_identity), params.remote_engine_id or ""
    text = params.baton_introduction if engine_id else None
    if text is None and kv is None:
        return None
    return EngineCard(engine_id, text, kv_identity=kv, has_states=params.baton_has_states)


def _identity_of(card: EngineCard) -> Identity | None:
    """The identity in a Baton engine's introduction. None: an older version does not report it."""
    if card.kv_identity is None or card.served_model_name is None:
        return None
    return Identity("baton", card.served_model_name, card.kv_identity)


def _read_identity(engine: Engine, value: Any) -> KVIdentity | None:
    """The reported KV identity. None: it is not reported, or has fields that this router cannot compare."""
    if value is None:
        return None
    try:
        kv = msgspec.convert(value, KVIdentity)
    except msgspec.ValidationError as error:
        _warn(engine.url, str(error))
        return None
    if unknown := value.keys() - {*KVIdentity.__struct_fields__}:
        _warn(engine.url, f"it has unknown fields: {', '.join(sorted(unknown))}")
        return None
    return kv


@lru_cache(maxsize=256)
def _warn(url: str, why: str) -> None:
    """Log a warning once, because the router asks an engine with every probe."""
    logger.warning("%s: the identity of its KV cannot be read, and is not compared: %s", url, why)


Decoded = TypeVar("Decoded", bound=msgspec.Struct)


def _decode(engine: Engine, answer: Answer, kind: type[Decoded]) -> Decoded | None:
    """The answer's body, decoded. None: it is something else."""
    status, body = answer
    if status != 200:
        return None
    try:
        return decode_json(body, kind)
    except NotJson as error:
        logger.warning("%s: no %s: %s", engine.url, kind.__name__.lstrip("_"), error)
        return None
