"""Questions to engines, and what the engines are, for every possible answer."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.fleet import Engine
from baton.router.identity import Introduced, Introduction, ModelCard
from baton.router.introductions import COMPLETIONS_PATH, MODELS_PATH, PATH, Answer, introduce

NOT_FOUND = (404, b"")
VLLM = {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 9}, {"id": "adapter", "parent": "m"}]}
CONNECTOR = {"kv_transfer_params": {"remote_engine_id": "p", "baton_introduction": "signed"}}


def talk(engine: Engine, answers: Callable[[str], Answer], *, pushes: bool) -> tuple[Any, list[str]]:
    """The result, and the paths that were asked."""
    asked = []
    dialogue = introduce(engine, pushes=pushes)
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


@pytest.mark.parametrize("pushes", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_vllm_is_asked_for_its_connector_if_it_prefills_for_a_push(role: str, pushes: bool) -> None:
    found, asked = talk(engine_of(role), page(models=VLLM, completion=CONNECTOR), pushes=pushes)
    is_asked = pushes and role == "prefill"
    assert asked == [PATH, MODELS_PATH, *([COMPLETIONS_PATH] if is_asked else [])]
    assert (found.kind, found.identity.name, found.max_model_len) == ("vllm", "m", 9)
    assert found.introduction == (Introduction("p", "signed") if is_asked else None)
    assert [card.id for card in found.cards] == ["m", "adapter"]


def test_a_vllm_that_is_known_is_asked_for_its_names_only() -> None:
    engine = engine_of()
    engine.kind, engine.is_introduced, engine.cards = "vllm", True, (ModelCard("m"),)
    engine.introduction = Introduction("p", "signed")
    found, asked = talk(engine, page(models=VLLM), pushes=True)
    assert asked == [MODELS_PATH]
    assert (found.introduction, len(found.cards)) == (engine.introduction, 2)
    found, _ = talk(engine, lambda path: (500, b""), pushes=True)
    assert found == Introduced("vllm", engine.introduction, None, None, engine.cards)


def test_one_of_batons_is_asked_one_question() -> None:
    card = {"engine_id": "p", "introduction": "signed", "served_model_name": "m", "max_model_len": 5}
    found, asked = talk(engine_of(), page(card=card), pushes=True)
    assert asked == [PATH]
    assert (found.kind, found.introduction.engine_id, found.cards[0].id) == ("baton", "p", "m")
    assert found.identity is None, "an older version, without a KV identity"


def test_an_engine_that_cannot_answer_now_is_asked_again() -> None:
    assert talk(engine_of(), lambda path: (503, b""), pushes=True) == (None, [PATH])


bodies = st.one_of(
    st.sampled_from(
        [b"", b"[]", b"{}", b'{"data": []}', b'{"data": [{}]}', b"\xff", b'{"kv_transfer_params": {}}']
    ),
    st.sampled_from([VLLM, CONNECTOR]).map(lambda value: json.dumps(value).encode()),
)


@given(answers=st.lists(st.tuples(st.sampled_from([200, 404, 500]), bodies), min_size=3, max_size=3))
def test_no_answer_breaks_it(answers: list[Answer]) -> None:
    left = iter(answers)
    found, asked = talk(engine_of(), lambda path: next(left), pushes=True)
    assert len(asked) <= 3
    assert (found is None) == (answers[0][0] == 500)
