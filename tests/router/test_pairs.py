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
from tests.router.baton_fakes import introduced_system
from tests.router.fakes import Call, FakeEngine, Respond, System, answers, lends, responds, system

REFUSAL = {"error": {"message": "no", "param": "kv_transfer_params.baton_ticket"}}
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
            while any(not one.is_introduced for one in s.router.fleet.engines):
                await s.client.get("/fleet")
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


async def test_a_prefill_engine_of_another_model_is_not_asked() -> None:
    p, d = engine(lends, "p", architecture="model B"), engine(says("A"), "d")
    async with system([p], [d]) as s:
        answer = await s.complete()
        state = (await s.client.get("/fleet")).json()
    assert answer.headers["x-baton-prefill"] == "local"
    assert not p.calls
    assert "model B" in state["engines"]["prefill"][0]["refused"]


@pytest.mark.parametrize("texts", [("a", "a"), ("a", "b"), ("", "b"), ("a", "")])
@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_engines_that_read_texts_differently_are_no_pair(mode: str, texts: tuple[str, str]) -> None:
    """Engines differ in their templates or in what ends an answer: P's first token would not be D's."""
    p, d = engine(lends, "p"), engine(answers, "d")
    for one, text_id in zip((p, d), texts, strict=True):
        one.card = {**one.card, "text_id": text_id}
    async with introduced_system([p], [d], mode=mode) as s:
        assert (await s.complete()).status_code == 200
        pairs = (await s.client.get("/fleet")).json()["pairs"]
    fits = "" in texts or texts[0] == texts[1]
    assert bool(p.calls) == fits
    assert [pair["reason"] for pair in pairs if not pair["usable"]] == ([] if fits else [TEXTS_DIFFER])


TEXTS_DIFFER = (
    "different tokenizers, chat templates, or tokens that end an answer: they read a text differently"
)


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [
        (("aa",), ("aa",), True),
        (("aa",), ("bb",), False),
        ((), ("aa",), False),
        (("aa",), (), False),
        ((), (), True),
        (("new", "old"), ("old",), True),  # D has been restarted with a new secret, P has not.
        (("old",), ("new", "old"), False),  # P signs with a secret that D does not know yet.
        (("new", "old"), ("new", "old"), True),
    ],
)
@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_engines_with_different_secrets_are_no_pair(
    mode: str, ours: tuple[str, ...], theirs: tuple[str, ...], fits: bool
) -> None:
    p, d = engine(lends, "p", secrets=theirs), engine(answers, "d", secrets=ours)
    async with system([p], [d], mode=mode) as s:
        for _ in range(2):
            answer = await s.complete()
            assert answer.status_code == 200
            assert answer.headers["x-baton-prefill"] == ("remote" if fits else "local")
        pairs = (await s.client.get("/fleet")).json()["pairs"]
        metrics = (await s.client.get("/metrics")).text
    assert bool(p.calls) is fits
    assert [pair["usable"] for pair in pairs] == ([] if fits else [False])
    if not fits:
        assert "secret" in pairs[0]["reason"]
        assert f'baton:router_pair_usable{{decode="{d.url}",prefill="{p.url}"}} 0.0' in metrics
        assert 'baton:router_prefills_total{reason="no_pair",where="local"} 2.0' in metrics


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


async def test_a_pair_whose_tickets_are_refused_is_stopped() -> None:
    async def refuses(call: Call) -> None:
        await (responds(400, REFUSAL) if "kv_transfer_params" in call.received.body else answers)(call)

    p, d = engine(lends, "p"), engine(refuses, "d")
    async with system([p], [d], first_token=False) as s:
        for number in range(FAILURES_TO_STOP + 2):
            assert (await s.complete()).status_code == 200
            await settled(s, min(number + 1, FAILURES_TO_STOP))
    assert len(p.calls) == FAILURES_TO_STOP


@pytest.mark.parametrize(
    "counts",
    ["total=100; local=96; transferred=0", "total=100; local=0; transferred=7", "nonsense", ""],
)
async def test_a_prompt_that_d_had_already_says_nothing_against_the_pair(counts: str) -> None:
    p, d = engine(lends, "p"), engine(computes(counts), "d")
    async with system([p], [d], first_token=False) as s:
        for _ in range(FAILURES_TO_STOP + 1):
            assert (await s.complete()).headers["x-baton-prefill"] == "remote"
    assert not p.taken_back


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


def test_an_engine_that_reports_nothing_is_not_judged() -> None:
    p, d = pair()
    assert mismatch_of(p, d) is None
    p.introduction = EngineCard("p", None, secret_ids=("aa",))
    assert mismatch_of(p, d) is None
    d.introduction = EngineCard("d", None)
    assert mismatch_of(p, d) is None
