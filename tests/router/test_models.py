"""One router in front of several models: each request gets to its own, and no two are mixed."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.identity import KVIdentity
from baton.router.fleet.breaker import Probe
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.pairs import mismatch_of
from baton.router.fleet.policies import RoutedRequest
from baton.router.values.errors import RouterError
from baton.router.values.identity import Identity, ModelCard
from baton.router.values.settings import RouterSettings
from tests.router.baton_fakes import introduced
from tests.router.fakes import FakeEngine, Servers, answers, lends, system
from tests.router.test_pairs import engine, says

URLS = ("http://d:1", "http://d:2", "http://d:3")
PREFILL_URLS = ("http://p:1", "http://p:2")


def vllm_of(text: str, *models: str) -> FakeEngine:
    cards = [
        {"id": name, "owned_by": "vllm", "parent": models[0] if number else None}
        for number, name in enumerate(models)
    ]
    return FakeEngine(says(text), is_vllm_of=9, models={"data": cards})


async def test_each_request_gets_to_its_model() -> None:
    p = engine(lends, "p", model="a")
    decode = [engine(says("A"), "d0", model="a"), engine(says("B"), "d1", model="b", weights="other")]
    async with system([p], [*decode], policy="round_robin") as s:
        await introduced(s)
        for model, text, where in (("a", "A", "remote"), ("b", "B", "local")) * 2:
            answer = await s.complete(model=model)
            assert answer.json()["choices"][0]["text"] == text
            assert answer.headers["x-baton-prefill"] == where
        assert [one["refused"] for one in (await s.client.get("/fleet")).json()["engines"]["decode"]] == [
            None,
            None,
        ]
        assert (await s.client.get("/status")).json()["models"] == ["a", "b"]


async def test_a_model_that_nobody_serves_and_a_request_that_names_none() -> None:
    decode = [vllm_of("A", "a"), vllm_of("B", "b")]
    async with system([FakeEngine(lends)], [*decode]) as s:
        await introduced(s)
        answer = await s.complete(model="c")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        for body in ({}, {"model": None}, {"model": ""}):
            answer = await s.complete(**body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert "one of a, b" in answer.json()["error"]["message"]
        answer = await s.client.post("/tokenize", json={"model": "c", "prompt": "x"})
        assert answer.status_code == 404
        assert (await s.client.post("/tokenize", json={"model": "b", "prompt": "x"})).status_code == 200
    assert [len(one.calls) for one in decode] == [0, 1]


async def test_the_first_request_finds_out_that_its_model_is_not_served() -> None:
    """Also if it comes before the prober has asked an engine."""
    d = vllm_of("A", "a")
    async with system([FakeEngine(lends)], [d]) as s:
        await introduced(s)
        for one in s.router.fleet.engines:
            one.was_asked = one.is_introduced = False
            s.router.fleet.models.note_identity(one, None)
        assert (await s.complete(model="c")).status_code == 404
        assert (await s.complete(model="a")).status_code == 200


async def test_an_alias_is_another_name_of_a_model() -> None:
    p, d = engine(lends, "p", model="a"), vllm_of("A", "a", "adapter")
    aliases = {"gpt": "a", "tuned": "adapter", "lost": "c"}
    async with system([p], [d, vllm_of("B", "b")], model_aliases=aliases) as s:
        await introduced(s)
        for alias, model in (("gpt", "a"), ("tuned", "adapter"), ("a", "a")):
            answer = await s.complete(model=alias)
            assert answer.json()["choices"][0]["text"] == "A"
            assert d.calls[-1].body["model"] == model
        assert p.calls[0].body["model"] == "a"
        answer = await s.complete(model="lost")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        answer = await s.client.post("/tokenize", json={"model": "gpt", "prompt": "x"})
        assert answer.status_code == 200
        assert d.calls[-1].body == {"model": "a", "prompt": "x"}
        models = (await s.client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in models] == [
            ("a", None),
            ("adapter", "a"),
            ("b", None),
            ("gpt", None),
            ("tuned", "a"),
        ]


async def test_an_adapter_that_a_vllm_loads_later_is_found_by_its_probes() -> None:
    d = vllm_of("A", "a")
    async with system([FakeEngine(lends)], [d]) as s:
        await introduced(s)
        assert (await s.complete(model="adapter")).status_code == 404
        d.models["data"].append({"id": "adapter", "owned_by": "vllm", "parent": "a"})
        await s.router.control.prober.probe(s.router.fleet.engines[1])
        assert (await s.complete(model="adapter")).status_code == 200


async def test_an_added_engine_brings_its_model_and_a_removed_one_takes_it_away() -> None:
    servers, p, new = Servers(), engine(lends, "p", model="b"), engine(answers, "d1", model="b")
    new.url = await servers.start(new)
    async with system([p], [engine(answers, "d0", model="a")], checked_hosts=()) as s:
        await introduced(s)
        refused = (await s.client.get("/fleet")).json()["engines"]["prefill"][0]["refused"]
        assert "which no decode engine serves" in refused
        order = {"type": "decode", "instance": new.url}
        assert (await s.client.post("/instances/add", json=order)).status_code == 200
        assert (await s.complete(model="b")).headers["x-baton-prefill"] == "remote"
        assert (await s.client.post("/instances/remove", json=order)).status_code == 200
        assert (await s.complete(model="b")).status_code == 404
        assert (await s.complete()).status_code == 200, "one model is left"
    await servers.stop()


# --- Every request goes to an engine that serves its model, or is refused for a reason ------------

models = st.sampled_from(["a", "b", None])
identities: Any = st.lists(
    st.tuples(st.sampled_from(["baton", "vllm"]), models, st.sampled_from(["x", "y"])), min_size=5, max_size=5
)


@given(known=identities, asked=st.sampled_from(["a", "b", "c", None]), down=st.sets(st.integers(0, 4)))
def test_choices_among_models(known: list[Any], asked: str | None, down: set[int]) -> None:
    fleet = Fleet(RouterSettings(prefill_urls=PREFILL_URLS, decode_urls=URLS))
    for number, (one, (kind, name, model)) in enumerate(zip(fleet.engines, known, strict=True)):
        if name is not None:
            kv = KVIdentity(model, "w", "float32", 2, 2, 8, "0") if kind == "baton" else None
            fleet.models.note_identity(one, Identity(kind, name, kv), (ModelCard(name),))
        if number in down:
            fleet.health.note_probe(one, Probe("refused"), 0.0)
    decoders = fleet.engines[2:]
    served = {one.identity.name for one in decoders if one.identity is not None}
    are_all_known = all(one.identity is not None for one in decoders)
    request = RoutedRequest(1, model=asked)
    for kind, name in {(one.identity.kind, one.identity.name) for one in decoders if one.identity}:
        accepted = {
            one.identity
            for one in decoders
            if one.identity and one.identity[:2] == (kind, name) and not one.refused
        }
        assert len(accepted) == 1, "one model of each kind and name"
    if len(served) > 1 if asked is None else (are_all_known and asked not in served):
        with pytest.raises(RouterError) as caught:
            fleet.models.check_model(request)
        assert caught.value.status == (400 if asked is None else 404)
        return
    fleet.models.check_model(request)
    d = fleet.choice.choose("decode", request, 0.0)
    candidates = [one for one in decoders if fleet.models.may_take(one, request)]
    assert (d is None) == (not candidates)
    if d is not None:
        assert d.is_up
        assert d.refused is None
        assert asked is None or d.names is None or asked in d.names
        for p in fleet.engines[:2]:
            if p.names and d.names and p.names != d.names:
                assert mismatch_of(p, d) is not None
