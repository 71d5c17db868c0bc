"""Questions to engines, and what the engines are, for every possible answer."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.engine_card import EngineCard
from baton.core.identity import KVIdentity
from baton.router.fleet.engine import Engine
from baton.router.fleet.introductions import COMPLETIONS_PATH, MODELS_PATH, PATH, Answer, introduce
from baton.router.values.identity import Identity, Introduced, ModelCard

NOT_FOUND = (404, b"")
KV = KVIdentity("architecture", "weights", "float32", 2, 2, 8, "0")
VLLM = {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 9}, {"id": "adapter", "parent": "m"}]}
CONNECTOR = {"kv_transfer_params": {"remote_engine_id": "p", "baton_introduction": "signed"}}


def talk(
    engine: Engine, answers: Callable[[str], Answer], *, asks_connector: bool = False
) -> tuple[Any, list[str]]:
    """The result, and the paths that were asked."""
    asked = []
    dialogue = introduce(engine, asks_connector=asks_connector)
    try:
        question = next(dialogue)
        while True:
            asked.append(question.url.removeprefix(engine.url))
            question = dialogue.send(answers(asked[-1]))
    except StopIteration as end:
        return end.value, asked


def engine_of(role: Any = "prefill") -> Engine:
    return Engine("http://e:1", role)


def page(**pages: Any) -> Callable[[str], Answer]:
    known = {
        PATH: pages.get("card"),
        MODELS_PATH: pages.get("models"),
        COMPLETIONS_PATH: pages.get("completion"),
    }
    return lambda path: NOT_FOUND if known[path] is None else (200, json.dumps(known[path]).encode())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_vllm_is_asked_for_its_connector(role: str) -> None:
    found, asked = talk(engine_of(role), page(models=VLLM, completion=CONNECTOR))
    assert asked == [PATH, MODELS_PATH, COMPLETIONS_PATH]
    assert (found.kind, found.identity.name, found.max_model_len) == ("vllm", "m", 9)
    assert found.introduction == EngineCard("p", "signed")
    assert [card.id for card in found.cards] == ["m", "adapter"]


def connector(**kv: Any) -> Any:
    """What a vLLM answers that reports its identity, and does not push."""
    identity = {**msgspec.to_builtins(KV), **kv}
    return {"kv_transfer_params": {"baton_kv_identity": identity}}


def test_a_vllm_that_reports_an_identity_is_asked_for_it_again() -> None:
    engine = engine_of("decode")
    found, _ = talk(engine, page(models=VLLM, completion=connector()))
    assert (found.introduction.introduction, found.identity.kv) == (None, KV)
    engine.kind, engine.is_introduced, engine.introduction = "vllm", True, found.introduction
    found, asked = talk(engine, page(models=VLLM, completion=connector(version="2")), asks_connector=True)
    assert asked == [MODELS_PATH, COMPLETIONS_PATH]
    assert found.identity.kv == msgspec.structs.replace(KV, version="2")
    found, _ = talk(engine, page(models=VLLM), asks_connector=True)
    assert found.identity.kv == KV, "it could not answer"
    found, _ = talk(engine, page(models=VLLM, completion={}), asks_connector=True)
    assert found.introduction is None, "a successor without a connector"


@pytest.mark.parametrize("kv", [{"model": 1}, {"num_layers": None}, {"precision": "a later build's"}, []])
def test_an_identity_that_cannot_be_compared_counts_as_not_reported(
    kv: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kv = {**msgspec.to_builtins(KV), **kv} if kv else kv
    card = {"engine_id": "p", "introduction": "signed", "served_model_name": "m", "kv_identity": kv}
    completion = {"kv_transfer_params": {"baton_kv_identity": kv}}
    url = f"http://{len(str(kv))}:1"
    for _ in range(2):
        found, _ = talk(Engine(url, "decode"), page(card=card))
        assert (found.kind, found.introduction, found.identity) == (
            "baton",
            EngineCard(**{**card, "kv_identity": None}),
            None,
        )
        found, _ = talk(engine_of(), page(models=VLLM, completion=completion))
        assert (found.introduction, found.identity) == (None, Identity("vllm", "m"))
    assert [record.message.startswith(url) for record in caplog.records].count(True) == 1


def test_a_vllm_that_is_known_is_asked_for_its_names_only() -> None:
    engine = engine_of()
    engine.kind, engine.is_introduced, engine.cards = "vllm", True, (ModelCard("m"),)
    engine.introduction = EngineCard("p", "signed")
    found, asked = talk(engine, page(models=VLLM))
    assert asked == [MODELS_PATH]
    assert (found.introduction, len(found.cards)) == (engine.introduction, 2)
    found, _ = talk(engine, lambda path: (500, b""))
    assert found == Introduced("vllm", engine.introduction, None, None, engine.cards)


def test_one_of_batons_is_asked_one_question() -> None:
    card = {"engine_id": "p", "introduction": "signed", "served_model_name": "m", "max_model_len": 5}
    found, asked = talk(engine_of(), page(card=card))
    assert asked == [PATH]
    assert (found.kind, found.introduction.engine_id, found.cards[0].id) == ("baton", "p", "m")
    assert found.identity is None, "an older version, without a KV identity"


def test_a_server_with_models_of_another_owner_is_no_vllm() -> None:
    models = {"data": [{"id": "m", "owned_by": "someone"}, {"id": "n"}]}
    found, asked = talk(engine_of(), page(models=models, completion=CONNECTOR))
    assert (found.kind, asked) == (None, [PATH, MODELS_PATH])


def test_an_engine_that_cannot_answer_now_is_asked_again() -> None:
    assert talk(engine_of(), lambda path: (503, b"")) == (None, [PATH])


bodies = st.one_of(
    st.sampled_from(
        [b"", b"[]", b"{}", b'{"data": []}', b'{"data": [{}]}', b"\xff", b'{"kv_transfer_params": {}}']
    ),
    st.sampled_from([VLLM, CONNECTOR]).map(lambda value: json.dumps(value).encode()),
)


@given(answers=st.lists(st.tuples(st.sampled_from([200, 404, 500]), bodies), min_size=3, max_size=3))
def test_no_answer_breaks_it(answers: list[Answer]) -> None:
    left = iter(answers)
    found, asked = talk(engine_of(), lambda path: next(left))
    assert len(asked) <= 3
    assert (found is None) == (answers[0][0] == 500)
