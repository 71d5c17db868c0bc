"""Engines that are up: events that eject an engine, that bring it back, and that do neither."""

import asyncio
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse

from baton.core.errors import ConfigError
from baton.http.settings import HttpSettings
from baton.router.fleet.breaker import Probe
from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.introductions import Answer
from baton.router.fleet.policies import RoutedRequest
from baton.router.members.probes import Prober
from baton.router.shell.asking import Asker
from baton.router.values.errors import LegFailure
from baton.router.values.settings import LegTimeouts, ProbeSettings, RouterSettings
from tests.router.fakes import (
    LATER_S,
    FakeEngine,
    Servers,
    answers,
    dead_url,
    hangs,
    hangs_till_late,
    lends,
    system,
)

P, D0, D1 = "http://p:1", "http://d:1", "http://d:2"
REQUEST = RoutedRequest(turn=0)


def make_fleet() -> tuple[Fleet, Engine]:
    settings = RouterSettings(prefill_urls=(P,), decode_urls=(D0, D1), policy="round_robin")
    fleet = Fleet(settings, unix_clock=lambda: 1000.0)
    return fleet, fleet.engines[1]


def fail(fleet: Fleet, engine: Engine, kind: Any) -> None:
    fleet.health.note_failure(
        engine, LegFailure(kind, engine.url, "why", was_sent=kind != "unreachable"), 0.0
    )


def test_a_refused_connection_ejects_at_once() -> None:
    fleet, engine = make_fleet()
    fail(fleet, engine, "unreachable")
    assert engine.status == "down"
    chosen = fleet.choice.choose("decode", REQUEST, 0.0)
    assert chosen is not None
    assert chosen.url == D1


@pytest.mark.parametrize("kind", ["broken", "timeout"])
def test_other_failures_eject_only_in_a_row(kind: str) -> None:
    fleet, engine = make_fleet()
    for _ in range(2):
        fail(fleet, engine, kind)
        fail(fleet, engine, kind)
        assert engine.is_up
        fleet.health.note_answer(engine, 200, 0.0)
    for _ in range(3):
        fail(fleet, engine, kind)
    assert engine.status == "down"
    assert engine.num_failures == 7


def test_answers_of_500_are_counted_but_eject_nobody() -> None:
    fleet, engine = make_fleet()
    for _ in range(10):
        fleet.health.note_answer(engine, 500, 0.0)
    assert engine.is_up
    assert engine.num_failures == 10
    assert engine.last_error == "answered with status 500"
    assert engine.last_error_unix_s == 1000.0


def test_a_good_probe_readmits() -> None:
    fleet, engine = make_fleet()
    fail(fleet, engine, "unreachable")
    fleet.health.note_probe(engine, Probe("healthy"), 0.0)
    assert engine.status == "up"
    assert engine.health.failures_in_row == 0


def test_an_engine_in_use_is_counted_until_its_leg_ends() -> None:
    fleet, engine = make_fleet()
    fleet.note_start(engine)
    assert engine.in_flight == 1
    fleet.note_end(engine)
    assert engine.in_flight == 0
    assert engine.num_requests == 1


def test_nobody_is_chosen_twice_by_one_request() -> None:
    fleet, _ = make_fleet()
    tried: list[Engine] = []
    while (engine := fleet.choice.choose("decode", REQUEST, 0.0, tried=tried)) is not None:
        tried.append(engine)
    assert {engine.url for engine in tried} == {D0, D1}


class Scripted(Asker):
    """Every answer has this status; None: there is none in time."""

    def __init__(self, status: int | None) -> None:
        self._status = status

    async def ask(self, url: str, *, timeout_s: float, method: str = "GET", body: Any = None) -> Answer:
        if self._status is None:
            raise TimeoutError
        return Answer(self._status, b"")


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (200, None),
        (503, "/health answered with status 503"),
    ],
)
async def test_a_probe_believes_what_health_says(status: int, error: str | None) -> None:
    fleet, engine = make_fleet()
    await Prober(fleet, Scripted(status), ProbeSettings()).probe(engine)
    assert engine.status == ("up" if error is None else "down")
    assert engine.last_error == error


async def test_a_probe_that_hangs_is_given_up() -> None:
    fleet, engine = make_fleet()
    await Prober(fleet, Scripted(None), ProbeSettings()).probe(engine)
    assert engine.health.failures_in_row == 1
    assert engine.is_up


async def test_an_engine_that_comes_up_late_is_found_by_probing() -> None:
    decode = FakeEngine(answers, health_status=503)
    probe = ProbeSettings(every_s=0.01, down_every_s=0.01)
    async with system([FakeEngine(lends)], [decode], probe=probe) as s:
        while (await s.client.get("/health")).status_code != 503:
            pass
        while (await s.complete()).status_code != 503:
            pass
        decode.health_status = 200
        while (await s.client.get("/health")).status_code != 200:
            pass
        assert (await s.complete()).status_code == 200


async def test_health_needs_a_decode_engine_only() -> None:
    async with system([dead_url()], [FakeEngine(answers)]) as s:
        while (await s.client.get("/health")).status_code != 200:
            pass
        assert (await s.complete()).status_code == 200


async def test_the_fleet_and_the_metrics_show_who_is_down_and_why() -> None:
    async with system([dead_url()], [FakeEngine(answers)]) as s:
        while True:
            state = (await s.client.get("/fleet")).json()
            if state["engines"]["prefill"][0]["status"] == "down":
                break
        assert "cannot connect" in state["engines"]["prefill"][0]["last_error"]
        assert state["policy"] == "least_in_flight"
        metrics = (await s.client.get("/metrics")).text
    url = state["engines"]["prefill"][0]["url"]
    assert f'baton:router_engine_up{{engine="{url}",role="prefill"}} 0.0' in metrics


async def test_a_request_is_answered_by_another_engine_when_its_own_is_ejected() -> None:
    hanging, good = FakeEngine(hangs), FakeEngine(answers)
    async with system([FakeEngine(lends)], [hanging, good], policy="round_robin") as s:
        asking = [asyncio.create_task(s.complete()) for _ in range(2)]
        await hanging.was_called.wait()
        (engine,) = (one for one in s.router.fleet.engines if one.url == hanging.url)
        s.router.fleet.health.note_probe(engine, Probe("refused", "gone"), asyncio.get_running_loop().time())
        assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
        await hanging.saw_disconnect.wait()
    assert len(hanging.calls) == 1


async def test_an_engine_with_an_admin_port_is_asked_there_for_its_introduction() -> None:
    servers = Servers()
    admin = FakeEngine(answers, introduces_as="d")
    port = httpx.URL(await servers.start(admin)).port

    async def page(scope: Any, receive: Any, send: Any) -> None:
        is_health = scope["path"] == "/health"
        response = JSONResponse({"admin_port": port} if is_health else {}, 200 if is_health else 404)
        await response(scope, receive, send)

    async with system([FakeEngine(lends)], [FakeEngine(answers, page=page)]) as s:
        (engine,) = (engine for engine in s.router.fleet.engines if engine.role == "decode")
        while engine.introduction is None:
            await s.client.get("/fleet")
        assert engine.introduction.engine_id == "d"
        assert engine.admin_address == f"http://127.0.0.1:{port}"
    await servers.stop()


@pytest.mark.parametrize(
    ("address", "admin"),
    [
        ("http://user:pass@e.example:80/base", "http://user:pass@e.example:9/base"),
        ("https://e.example", "https://e.example:9"),
        ("http://[::1]:80", "http://[::1]:9"),
    ],
)
def test_the_admin_port_replaces_the_port(address: str, admin: str) -> None:
    assert Engine(address, "decode", admin_port=9).admin_address == admin


async def test_engines_get_their_own_key_and_never_the_routers() -> None:
    decode = FakeEngine(answers)
    http = HttpSettings(api_keys=("key-of-router",))
    async with system([FakeEngine(lends)], [decode], doors=http, engine_api_key="key-of-engine") as s:
        s.client.headers["Authorization"] = "Bearer wrong"
        assert (await s.complete()).status_code == 401
        s.client.headers["Authorization"] = "Bearer key-of-router"
        assert (await s.complete()).status_code == 200
    assert [call.headers["authorization"] for call in decode.calls] == ["Bearer key-of-engine"]


async def test_without_keys_of_its_own_the_router_passes_the_clients_on() -> None:
    decode = FakeEngine(answers)
    async with system([FakeEngine(lends)], [decode]) as s:
        s.client.headers["Authorization"] = "Bearer of-client"
        assert (await s.complete()).status_code == 200
    assert decode.calls[0].headers["authorization"] == "Bearer of-client"


async def test_models_and_tokenize_go_to_a_decode_engine() -> None:
    prefill, decode = FakeEngine(lends), FakeEngine(answers)
    async with system([prefill], [decode]) as s:
        assert (await s.client.get("/v1/models?x=1")).status_code == 200
        assert (await s.client.post("/tokenize", json={"prompt": "a"})).status_code == 200
    assert [call.path for call in decode.calls] == ["/v1/models", "/tokenize"]
    assert decode.calls[1].body == {"prompt": "a"}
    assert not prefill.calls


async def test_models_are_asked_of_the_next_engine_when_one_hangs() -> None:
    good = FakeEngine(answers)
    timeouts = LegTimeouts(first_byte_s=LATER_S)
    async with system([FakeEngine(lends)], [FakeEngine(hangs_till_late), good], timeouts=timeouts) as s:
        assert {(await s.client.get("/v1/models")).status_code for _ in range(2)} == {200}
    assert len(good.calls) == 2


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"prefill_urls": ()}, "prefill_urls"),
        ({"decode_urls": ("http://a:1", "http://a:1")}, "decode_urls"),
        ({"decode_urls": ("a:1",)}, "decode_urls"),
        ({"decode_urls": ("http://a:1/v1",)}, "decode_urls"),
        ({"decode_urls": ("http://a:1/",)}, "decode_urls"),
        ({"decode_attempts": 0}, "decode_attempts"),
        ({"min_prefill_tokens": -1}, "min_prefill_tokens"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterSettings(**{"prefill_urls": (P,), "decode_urls": (D0,), **wrong})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (LegTimeouts, {"idle_s": 0}),
        (ProbeSettings, {"every_s": -1}),
        (ProbeSettings, {"down_every_s": 0}),
    ],
)
def test_a_wait_without_an_end_cannot_be_configured(kind: Any, wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        kind(**wrong)
