"""Where a prompt goes that engines have in their caches or tiers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from baton.core.engine_card import EngineCard
from baton.router.fleet.block_index import Match
from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.pairs import Pairs
from baton.router.fleet.policies import RoutedRequest
from baton.router.fleet.turns import TurnTable
from baton.router.fleet.view import FleetView
from baton.router.request.answers import LegAnswer
from baton.router.request.events import (
    ClientGone,
    Count,
    Effect,
    Event,
    Failed,
    Found,
    Leg,
    Look,
    Opened,
    TakeBack,
)
from baton.router.request.machine import Machine, Request
from baton.router.values.dialects import COMPLETIONS
from baton.router.values.errors import LegFailure
from baton.router.values.settings import KVEventsSource, RouterSettings
from tests.router.machine_world import KV

URLS = ("http://d0:1", "http://d1:1", "http://d2:1")
PROMPT = list(range(4000))
RATE = 10_000.0


class Router:
    """Three decode engines that compute, and a prefill engine that is too slow."""

    def __init__(self) -> None:
        events = (KVEventsSource("*", "tcp://{host}:5557"),)
        options: dict[str, Any] = {"policy": "cost", "kv_events": events, "decode_urls": URLS}
        settings = RouterSettings(prefill_urls=("http://p:1",), **options)
        self.fleet = Fleet(settings)
        self.view = FleetView(settings, self.fleet, Pairs(), TurnTable(lambda engine, params: None))
        self.decode = {one.url: one for one in self.fleet.engines if one.role == "decode"}
        for engine in self.fleet.engines:
            engine.kind, engine.was_asked, engine.is_introduced = "baton", True, True
            engine.introduction = EngineCard(engine.url, None)
            engine.prefill_rate.note(RATE if engine.role == "decode" else 1.0)

    def ask(self, cached: Mapping[str, Match]) -> tuple[Machine, Sequence[Effect]]:
        body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}
        machine = Machine(
            self.view, Request("id", body, dialect=COMPLETIONS, session=None, received_at_s=0.0)
        )
        assert any(isinstance(effect, Look) for effect in machine.begin(0.0))
        return machine, machine.on(Found(len(PROMPT), cached), 0.0)

    def goes_to(self, cached: Mapping[str, Match]) -> Engine:
        (leg,) = legs_in(self.ask(cached)[1])
        assert leg.role == "decode"
        return leg.engine


def legs_in(effects: Sequence[Effect]) -> list[Leg]:
    return [effect for effect in effects if isinstance(effect, Leg)]


@pytest.mark.parametrize("held", [Match.in_cache(3840), Match(0, 3840, 3840), Match(0, 0, 3840)])
def test_a_decode_engine_that_has_a_prompt_computes_the_rest_of_it(held: Match) -> None:
    router = Router()
    for url in (*URLS, *URLS):
        assert router.goes_to({url: held}).url == url
        for engine in router.decode.values():
            engine.in_flight = 0


def test_the_engine_with_the_faster_tier_is_preferred_unless_it_is_busy() -> None:
    router, (gpu, host, store) = Router(), URLS
    cached = {gpu: Match.in_cache(3840), host: Match(0, 3840, 3840), store: Match(0, 0, 3840)}
    for url in (gpu, host, store):
        assert router.goes_to(cached).url == url
        router.decode[url].num_queued_tokens += 50_000


def test_engines_that_have_nothing_of_the_prompt_take_turns() -> None:
    router = Router()
    assert len({router.goes_to({}).url for _ in URLS}) == len(URLS)


# --- Loans of what an engine has in host memory ---------------------------------------------------------

HELD = Match(0, 3840, 3840)
LENT = {"do_remote_prefill": True, "baton_ticket": "signed", "remote_num_tokens": 3840}
ASKED = {"baton_lend_stored": True}


def borrow(held: Match = HELD, *, lends: tuple[str, ...] = ("host",)) -> tuple[Router, Machine, Leg]:
    """The second engine has the prompt in host memory, and is busy. The leg is the first one."""
    router = Router()
    lender = router.decode[URLS[1]]
    lender.introduction = EngineCard(lender.url, None, lends=lends)
    lender.num_queued_tokens = 50_000
    machine, effects = router.ask({lender.url: held})
    (leg,) = legs_in(effects)
    return router, machine, leg


def answer_of(params: Any) -> LegAnswer:
    body = {"choices": [{"text": "", "finish_reason": "length"}], "kv_transfer_params": params}
    return LegAnswer(200, {}, json.dumps(body).encode())


def test_an_idle_engine_gets_the_prompt_with_a_loan_of_a_busy_one_that_has_it() -> None:
    _, machine, asked = borrow()
    assert (asked.role, asked.engine.url, asked.num_queued_tokens) == ("prefill", URLS[1], 0)
    assert (asked.body["kv_transfer_params"], asked.body["max_tokens"]) == (ASKED, 1)
    effects = machine.on(Opened(asked, answer_of(LENT)), 0.01)
    assert Count("stored_loans", ("lent",)) in effects
    (leg,) = legs_in(effects)
    assert leg.role == "decode"
    assert leg.engine.url != URLS[1]
    assert leg.body["kv_transfer_params"]["baton_ticket"] == "signed"
    assert leg.num_queued_tokens == len(PROMPT) - 3840


@pytest.mark.parametrize("what", ["nothing", "refused", "late"])
def test_without_a_loan_the_engine_computes_the_prompt(what: str) -> None:
    router, machine, asked = borrow()
    failure = LegFailure("timeout", asked.engine.url, "no answer", was_sent=True)
    events: Mapping[str, Event] = {
        "nothing": Opened(asked, answer_of(None)),
        "refused": Opened(asked, LegAnswer(400, {}, b"{}")),
        "late": Failed(asked, failure),
    }
    effects = machine.on(events[what], 0.01)
    (leg,) = legs_in(effects)
    assert leg.role == "decode"
    assert "baton_ticket" not in (leg.body.get("kv_transfer_params") or {})
    assert leg.num_queued_tokens == len(PROMPT)
    counts = [
        effect.labels for effect in effects if isinstance(effect, Count) and effect.metric == "stored_loans"
    ]
    assert counts == [("nothing" if what == "nothing" else "failed",)]
    assert router.view.retries.take(0.0)
    assert not asked.engine.health.failures_in_row, "an engine that is busy for longer than that is not down"


def test_a_loan_goes_back_if_the_client_has_left() -> None:
    _, machine, asked = borrow()
    machine.on(ClientGone(), 0.01)
    effects = machine.on(Opened(asked, answer_of(LENT)), 0.02)
    assert [effect.params for effect in effects if isinstance(effect, TakeBack)] == [LENT]


@pytest.mark.parametrize(
    ("held", "lends", "is_through_cache"),
    [
        (HELD, ("cache", "host"), False),
        (HELD, ("cache",), True),
        (Match(0, 256, 3840), ("cache", "host"), True),
        (Match(0, 0, 3840), ("host",), None),
    ],
)
def test_a_loan_goes_through_the_cache_if_host_memory_has_less(
    held: Match, lends: tuple[str, ...], is_through_cache: bool | None
) -> None:
    _, _, leg = borrow(held, lends=lends)
    assert (leg.role == "prefill") == (is_through_cache is not None)
    if is_through_cache is not None:
        params = leg.body["kv_transfer_params"]
        assert params["baton_lend_stored"]
        assert ("do_remote_decode" in params) == is_through_cache


def test_only_an_engine_with_the_borrowers_weights_lends() -> None:
    """Though another one has more of the prompt."""
    router = Router()
    d0, d1, d2 = router.decode.values()
    for engine, version in ((d0, "1"), (d1, "2"), (d2, "1")):
        kv = replace(KV, version=version)
        engine.introduction = EngineCard(engine.url, None, lends=("host",), kv_identity=kv)
    cached = {d1.url: HELD, d2.url: Match(0, 3000, 3000)}
    request = RoutedRequest(1, b"", num_tokens=len(PROMPT), cached=cached)
    loan = router.view.find_loan(d0, request, 0.0)
    assert loan is not None
    assert (loan.lender, loan.num_tokens) == (d2, 3000)
    d2.introduction = d1.introduction
    assert router.view.find_loan(d0, request, 0.0) is None
