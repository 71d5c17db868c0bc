"""Where a prompt goes that engines have in their caches or tiers."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from baton.router.block_index import Match
from baton.router.events import Effect, Found, Leg, Look
from baton.router.fleet import Engine, Fleet
from baton.router.fleet_view import FleetView
from baton.router.identity import Introduction
from baton.router.machine import Machine, Request
from baton.router.pairs import Pairs
from baton.router.settings import KVEventsSource, RouterSettings
from baton.router.turns import TurnTable

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
            engine.introduction = Introduction(engine.url, None)
            engine.prefill_rate.note(RATE if engine.role == "decode" else 1.0)

    def ask(self, cached: Mapping[str, Match]) -> tuple[Machine, Sequence[Effect]]:
        body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}
        machine = Machine(self.view, Request("id", body, is_chat=False, session=None, received_at_s=0.0))
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
