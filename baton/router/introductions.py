"""Questions that find out what an engine is, and what its answers mean. A generator asks them, without I/O.

    GET  /baton/introduction    Baton's own engines: their connector's signed introduction
    GET  /v1/models             others, when there is no such page: names of a model and its adapters
    POST /v1/completions        a vLLM that prefills for a push: one token, for its connector's introduction,
                                which its `kv_transfer_params` have; vLLM's servers have no page of ours

An introduction names one process. So Baton's engines are asked again with every probe of their health, and an
introduction is forgotten as soon as an engine fails: a successor introduces itself. The completion is a step
of a vLLM's model, and is asked for once in its life; the names are asked for with every probe.
"""

import logging
from collections.abc import Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from baton.core.json_text import NotJson, decode_json
from baton.router.fleet import Engine
from baton.router.identity import Identity, Introduced, Introduction, ModelCard
from baton.router.legs import PARAMS

logger = logging.getLogger(__name__)

PATH = "/baton/introduction"
MODELS_PATH = "/v1/models"
COMPLETIONS_PATH = "/v1/completions"
ASKING = {"prompt": [1], "max_tokens": 1, "temperature": 0}  # A vLLM's connector is reached by requests only.


class Question(NamedTuple):
    url: str
    method: str = "GET"
    body: Any = None


Answer: TypeAlias = tuple[int, bytes]  # Status and body.
Dialogue: TypeAlias = Generator[Question, Answer, Introduced | None]


class _Models(msgspec.Struct):
    data: list[ModelCard]


class _Said(msgspec.Struct):
    remote_engine_id: str | None = None
    baton_introduction: str | None = None
    baton_has_states: bool = False


class _Completion(msgspec.Struct):
    kv_transfer_params: _Said | None = None


def introduce(engine: Engine, *, pushes: bool) -> Dialogue:
    """Yields questions. Returns what the engine is; None: it cannot answer now."""
    if engine.kind == "vllm" and engine.is_introduced:
        return (yield from _introduce_again(engine))
    answer = yield Question(engine.admin_address + PATH)
    if answer[0] >= 500:
        return None
    cards: tuple[ModelCard, ...] | None
    card = _decode(engine, answer, Introduction)
    if card is not None:
        cards = None
        if (name := card.served_model_name) is not None:
            cards = (ModelCard(name, owned_by="baton", root=name, max_model_len=card.max_model_len),)
        return Introduced("baton", card, card.max_model_len, _identity_of(card), cards)
    models = _decode(engine, (yield Question(engine.address + MODELS_PATH)), _Models)
    cards = tuple(models.data) if models is not None and models.data else None
    model = _model_of(cards)
    if model is None:
        return Introduced(None, None, None, None, cards)
    introduction = None
    if pushes and engine.role == "prefill":
        body_asking = {**ASKING, PARAMS: {"baton_introduce": True}}
        answer = yield Question(engine.address + COMPLETIONS_PATH, "POST", body_asking)
        introduction = _connector_in(engine, answer)
    return Introduced("vllm", introduction, model.max_model_len, _named(model), cards)


def _introduce_again(engine: Engine) -> Dialogue:
    """A vLLM, whose adapters may have changed."""
    models = _decode(engine, (yield Question(engine.address + MODELS_PATH)), _Models)
    cards = tuple(models.data) if models is not None else ()
    model = _model_of(cards)
    if model is None:
        return Introduced("vllm", engine.introduction, engine.max_model_len, engine.identity, engine.cards)
    return Introduced("vllm", engine.introduction, model.max_model_len, _named(model), cards)


def _model_of(cards: tuple[ModelCard, ...] | None) -> ModelCard | None:
    """None: this is no vLLM."""
    return next((card for card in cards or () if card.owned_by == "vllm"), None)


def _named(model: ModelCard) -> Identity | None:
    return Identity("vllm", model.id) if model.id is not None else None


def _connector_in(engine: Engine, answer: Answer) -> Introduction | None:
    """None: it has no connector, or another one, or one that does not push."""
    completion = _decode(engine, answer, _Completion)
    params = completion.kv_transfer_params if completion is not None else None
    if params is None or params.remote_engine_id is None or params.baton_introduction is None:
        return None
    return Introduction(
        params.remote_engine_id, params.baton_introduction, has_states=params.baton_has_states
    )


def _identity_of(card: Introduction) -> Identity | None:
    """None: an engine of an older version, which does not report it."""
    if card.kv_identity is None or card.served_model_name is None:
        return None
    return Identity("baton", card.served_model_name, (card.kv_identity.model, card.kv_identity.weights))


Decoded = TypeVar("Decoded", bound=msgspec.Struct)


def _decode(engine: Engine, answer: Answer, kind: type[Decoded]) -> Decoded | None:
    """None: it is something else."""
    status, body = answer
    if status != 200:
        return None
    try:
        return decode_json(body, kind)
    except NotJson as error:
        logger.warning("%s: no %s: %s", engine.url, kind.__name__.lstrip("_"), error)
        return None
