"""Engines that are up: events that eject an engine, that bring it back, and that do neither."""

from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse

from baton.core.errors import ConfigError
from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.introductions import Answer
from baton.router.members.probes import Prober
from baton.router.shell.asking import Asker
from baton.router.values.errors import LegFailure
from baton.router.values.settings import LegTimeouts, ProbeSettings, RouterSettings
from tests.router.fakes import (
    FakeEngine,
    Servers,
    answers,
    dead_url,
    lends,
    system,
)

P, D0, D1 = "http://p:1", "http://d:1", "http://d:2"


def make_fleet() -> tuple[Fleet, Engine]:
    settings = RouterSettings(prefill_urls=(P,), decode_urls=(D0, D1), policy="round_robin")
    fleet = Fleet(settings, unix_clock=lambda: 1000.0)
    return fleet, fleet.engines[1]


def fail(fleet: Fleet, engine: Engine, kind: Any) -> None:
    fleet.health.note_failure(
        engine, LegFailure(kind, engine.url, "why", was_sent=kind != "unreachable"), 0.0
    )


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


async def test_models_and_tokenize_go_to_a_decode_engine() -> None:
    prefill, decode = FakeEngine(lends), FakeEngine(answers)
    async with system([prefill], [decode]) as s:
        assert (await s.client.get("/v1/models?x=1")).status_code == 200
        assert (await s.client.post("/tokenize", json={"prompt": "a"})).status_code == 200
    assert [call.path for call in decode.calls] == ["/v1/models", "/tokenize"]
    assert decode.calls[1].body == {"prompt": "a"}
    assert not prefill.calls


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
