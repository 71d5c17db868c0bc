"""Engines that do not belong together: they are told apart, they are shown, and they never mix answers."""

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.engine_card import EngineCard
from baton.router.fleet.engine import Engine
from baton.router.fleet.pairs import BACKOFF_FIRST_S, BACKOFF_MAX_S, FAILURES_TO_STOP, Pairs, mismatch_of
from baton.router.values.identity import Seat, choose_model
from tests.event_loop import pass_time, run
from tests.router.baton_fakes import introduced, introduced_system
from tests.router.fakes import Call, FakeEngine, Respond, System, answers, lends, responds, system

KV_IDENTITY = {
    "model": "architecture",
    "weights": "weights of A",
    "dtype": "float32",
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "hash_seed": "0",
}


def engine(
    respond: Respond,
    name: str,
    *,
    model: str = "m",
    architecture: str = "architecture",
    secrets: tuple[str, ...] = ("aa",),
    **kv_identity: Any,
) -> FakeEngine:
    card = {
        "served_model_name": model,
        "kv_identity": {**KV_IDENTITY, "model": architecture, **kv_identity},
        "secret_ids": secrets,
    }
    return FakeEngine(respond, introduces_as=name, card=card)


def says(text: str) -> Respond:
    return responds(200, {"choices": [{"text": text}]})


@pytest.mark.parametrize("position", [0, 1, 2])
def test_two_models_never_answer_under_one_name(position: int, caplog: pytest.LogCaptureFixture) -> None:
    """The smaller group is refused, wherever it stands in the configuration."""

    async def main() -> None:
        decode = [engine(says("A"), f"d{index}") for index in range(2)]
        strange = engine(says("B"), "strange", architecture="model B")
        decode.insert(position, strange)
        async with system([engine(lends, "p")], list(decode), policy="round_robin") as s:
            await introduced(s)
            got = {(await s.complete()).json()["choices"][0]["text"] for _ in range(6)}
            state = (await s.client.get("/fleet")).json()["engines"]["decode"]
            metrics = (await s.client.get("/metrics")).text
        assert got == {"A"}
        assert not strange.calls
        assert [one["refused"] is not None for one in state] == [one is strange for one in decode]
        assert f'baton:router_engine_refused{{engine="{strange.url}",role="decode"}} 1.0' in metrics
        assert "is refused: it serves" in caplog.text

    with caplog.at_level(logging.ERROR):
        run(main())


async def test_engines_are_compared_before_the_first_request() -> None:
    """The router compares engines even for a request that comes before the prober has asked any of them."""
    a, b = engine(says("A"), "a"), engine(says("B"), "b", architecture="model B")
    async with system([engine(lends, "p")], [a, b], policy="round_robin") as s:
        for one in s.router.fleet.engines:
            one.was_asked = one.is_introduced = False
        got = {(await s.complete()).json()["choices"][0]["text"] for _ in range(4)}
    assert got == {"A"}


TEXTS_DIFFER = (
    "different tokenizers, chat templates, or tokens that end an answer: they read a text differently"
)


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize(("field", "reason"), [("text_id", TEXTS_DIFFER), ("secret_ids", "secret")])
async def test_engines_that_differ_are_no_pair(mode: str, field: str, reason: str) -> None:
    """Engines differ in their templates or in what ends an answer: P's first token would not be D's."""
    p, d = engine(lends, "p"), engine(answers, "d")
    for one, value in ((p, "a"), (d, "b")):
        one.card = {**one.card, field: value if field == "text_id" else (value,)}
    async with introduced_system([p], [d], mode=mode) as s:
        assert (await s.complete()).headers["x-baton-prefill"] == "local"
        (pair,) = (await s.client.get("/fleet")).json()["pairs"]
        metrics = (await s.client.get("/metrics")).text
    assert not p.calls
    assert not pair["usable"]
    assert reason in pair["reason"]
    assert f'baton:router_pair_usable{{decode="{d.url}",prefill="{p.url}"}} 0.0' in metrics
    assert 'baton:router_prefills_total{reason="no_pair",where="local"} 1.0' in metrics


async def test_a_prefill_engine_that_fits_is_chosen_before_one_that_does_not() -> None:
    bad, good = engine(lends, "bad", secrets=("bb",)), engine(lends, "good")
    async with system([bad, good], [engine(answers, "d")], policy="round_robin") as s:
        for _ in range(4):
            assert (await s.complete()).headers["x-baton-prefill"] == "remote"
    assert (len(bad.calls), len(good.calls)) == (0, 4)


def computes(call_counts: str) -> Respond:
    """A decode engine that does not load what it is lent, and reports what it did."""

    async def respond(call: Call) -> None:
        body = call.received.body
        if body.get("stream"):
            await call.start(200, "text/event-stream", x_baton_prompt=call_counts)
            await call.piece(b'data: {"choices": [{"text": "a", "token_ids": [1]}]}\n\n')
            await call.piece(b"data: [DONE]\n\n", more=False)
        else:
            await call.answer(200, {"choices": [{"text": "a"}]}, x_baton_prompt=call_counts)

    return respond


NOTHING = "total=100; local=0; transferred=0"


async def settled(s: System, num_computed: int) -> None:
    """Wait until the router has counted `num_computed` prompts that D computed in spite of a loan."""
    while sum(one["computed"] for one in (await s.client.get("/fleet")).json()["pairs"]) < num_computed:
        pass


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_pair_that_hands_nothing_over_is_stopped_and_tried_again_later(is_stream: bool) -> None:
    p, d = engine(lends, "p"), engine(computes(NOTHING), "d")
    async with system([p], [d], first_token=False) as s:

        async def ask() -> str:
            answer = await s.complete(stream=is_stream)
            assert answer.status_code == 200
            return answer.headers["x-baton-prefill"]

        for _ in range(FAILURES_TO_STOP):
            assert await ask() == "remote"
        while len(p.taken_back) < FAILURES_TO_STOP:  # Each loan is taken back at once.
            await s.client.get("/fleet")
        await settled(s, FAILURES_TO_STOP)
        assert await ask() == "local"
        (pair,) = (await s.client.get("/fleet")).json()["pairs"]
        assert (pair["usable"], pair["computed"]) == (False, FAILURES_TO_STOP)
        pass_time(BACKOFF_FIRST_S)
        assert await ask() == "remote"  # A trial, which fails as well.
        await settled(s, FAILURES_TO_STOP + 1)
        assert await ask() == "local"
        pass_time(BACKOFF_FIRST_S)
        assert await ask() == "local"  # This time the back-off is longer.
        pass_time(BACKOFF_FIRST_S)
        d.respond = computes("total=100; local=0; transferred=96")
        for _ in range(3):
            assert await ask() == "remote"
        (pair,) = (await s.client.get("/fleet")).json()["pairs"]
        assert (pair["usable"], pair["handed_over"], pair["reason"]) == (True, 3, None)


async def test_links_that_broke_are_shown_by_engine_and_peer() -> None:
    d = engine(answers, "d")
    d.card["lost_links"] = {"p": 3}
    async with system([engine(lends, "p")], [d]) as s:
        assert (await s.complete()).status_code == 200
        engines = (await s.client.get("/fleet")).json()["engines"]
    assert engines["decode"][0]["lost_links"] == {engines["prefill"][0]["engine_id"]: 3}
    assert engines["prefill"][0]["lost_links"] == {}


# --- Pure parts -----------------------------------------------------------------------------------

MODELS = ["a", "b", "c"]
seats = st.lists(st.builds(Seat, st.sampled_from(MODELS), st.booleans()), max_size=8)


@given(seats=seats, incumbent=st.none() | st.sampled_from(MODELS))
def test_the_largest_group_serves(seats: list[Seat], incumbent: str | None) -> None:
    chosen = choose_model(seats, incumbent)
    if not seats:
        assert chosen is None
        return
    decoders = {one: sum(seat.is_decode and seat.model == one for seat in seats) for one in MODELS}
    assert chosen is not None
    assert decoders[chosen] == max(decoders.values())
    engines = {one: sum(seat.model == one for seat in seats) for one in MODELS}
    equals = [
        one
        for one in MODELS
        if decoders[one] == decoders[chosen] and engines[one] >= engines[chosen] and engines[one]
    ]
    assert engines[chosen] == max(engines[one] for one in equals)
    if incumbent in [one for one in equals if engines[one] == engines[chosen]]:
        assert chosen == incumbent


def pair() -> tuple[Engine, Engine]:
    return Engine("http://p:1", "prefill"), Engine("http://d:1", "decode")


@given(outcomes=st.lists(st.tuples(st.booleans(), st.floats(0, 400)), max_size=40))
def test_a_stopped_pair_is_always_tried_again_and_success_forgets_failures(
    outcomes: list[tuple[bool, float]],
) -> None:
    pairs, (p, d), now_s = Pairs(), pair(), 0.0
    for is_handed_over, passes_s in outcomes:
        if pairs.why_not(p, d, now_s) is None:
            if is_handed_over:
                pairs.note_handed_over(p, d)
                assert pairs.why_not(p, d, now_s) is None
            else:
                stopped = pairs.note_computed(p, d, "why", now_s)
                assert stopped is (pairs.why_not(p, d, now_s) is not None)
        assert pairs.why_not(p, d, now_s + BACKOFF_MAX_S) is None
        now_s += passes_s


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        ({"text_id": "a"}, {"text_id": "a"}, None),
        ({"text_id": "a"}, {"text_id": "b"}, TEXTS_DIFFER),
        ({}, {"text_id": "b"}, None),
        ({"text_id": "a"}, {}, None),
        ({"secret_ids": ("aa",)}, {"secret_ids": ("aa",)}, None),
        ({"secret_ids": ("aa",)}, {"secret_ids": ("bb",)}, "secret"),
        ({"secret_ids": ()}, {"secret_ids": ("aa",)}, "secret"),
        ({"secret_ids": ("aa",)}, {"secret_ids": ()}, "secret"),
        ({"secret_ids": ("new", "old")}, {"secret_ids": ("old",)}, None),  # P has not been restarted yet.
        (
            {"secret_ids": ("old",)},
            {"secret_ids": ("new", "old")},
            "secret",
        ),  # D does not know P's secret yet.
        ({"secret_ids": ()}, {"secret_ids": ()}, None),
        ({"secret_ids": ("new", "old")}, {"secret_ids": ("new", "old")}, None),
    ],
)
def test_engines_are_a_pair_by_their_cards(
    ours: dict[str, Any], theirs: dict[str, Any], reason: str | None
) -> None:
    p, d = pair()
    p.introduction, d.introduction = EngineCard("p", None, **theirs), EngineCard("d", None, **ours)
    found = mismatch_of(p, d)
    assert (found is None) == (reason is None)
    assert reason is None or reason in str(found)


def test_an_engine_that_reports_nothing_is_not_judged() -> None:
    p, d = pair()
    assert mismatch_of(p, d) is None
    p.introduction = EngineCard("p", None, secret_ids=("aa",))
    assert mismatch_of(p, d) is None
    d.introduction = EngineCard("d", None)
    assert mismatch_of(p, d) is None
