"""Lifecycle of the server: ordered start and stop, and the exit status if the engine dies."""

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from baton.core.config import EngineConfig
from baton.core.errors import ConfigError
from baton.engine.core.client import EngineClient, EngineDeadError
from baton.http.auth import KeyFiles
from baton.http.registration import Registration
from baton.http.settings import HttpSettings
from baton.http.tls import TlsFiles
from baton.server.registration import Registrar, place_of
from baton.server.run import EXIT_ENGINE_DIED, EXIT_STOPPED, Parts, run
from baton.server.service import check_common_params
from baton.server.settings import ServeSettings
from tests.event_loop import until
from tests.router.fakes import Servers
from tests.server.fakes import WAIT_S, CharacterTokenizer, ScriptedEngine, model_config

CONFIG = EngineConfig(model_config=model_config())


class Process:
    """`run` as a task, with its output."""

    def __init__(
        self,
        engine: ScriptedEngine,
        *,
        shutdown_timeout_s: float = WAIT_S,
        drain_timeout_s: float = 0.0,
        start: Callable[[], Awaitable[EngineClient]] | None = None,
        port: int = 0,
        admin_port: int | None = None,
        http: HttpSettings = HttpSettings(),  # noqa: B008  It is frozen.
        tls: TlsFiles | None = None,
        new_registrar: Callable[[str], Registrar | None] = lambda url: None,
    ) -> None:
        async def start_engine() -> EngineClient:
            return engine

        files: dict[str, Any] = (
            {} if tls is None else {"tls_cert": tls.cert, "tls_key": tls.key, "tls_client_ca": tls.client_ca}
        )
        self.url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.exit: asyncio.Task[int] = asyncio.create_task(
            run(
                CONFIG,
                ServeSettings(
                    port=port,
                    shutdown_timeout_s=shutdown_timeout_s,
                    drain_timeout_s=drain_timeout_s,
                    admin_port=admin_port,
                    **files,
                ),
                Parts(
                    start or start_engine,
                    CharacterTokenizer,
                    check_common_params,
                    http,
                    new_registrar=new_registrar,
                ),
                self.url.set_result,
            )
        )

    async def post(self, **body: object) -> httpx.Response:
        async with self.client(await self.url) as client:
            return await client.post("/v1/completions", json={"prompt": "a", **body})

    async def health(self) -> httpx.Response:
        async with self.client(await self.url) as client:
            return await client.get("/health")

    def client(self, url: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=url, timeout=WAIT_S, trust_env=False)

    async def wait_draining(self) -> None:
        while (await self.health()).status_code == 200:
            pass


def stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_it_serves_until_a_signal_and_stops_the_engine() -> None:
    engine = ScriptedEngine()
    process = Process(engine)
    assert (await process.post()).status_code == 200
    stop_this_process()
    assert await process.exit == EXIT_STOPPED
    assert engine.events[-1] == "closed"


async def test_it_registers_with_its_key_and_leaves_before_it_refuses_requests() -> None:
    heard: list[tuple[Registration, str, int]] = []  # And its key, and the status of /health by then.
    process: Process

    async def router(scope: Any, receive: Any, send: Any) -> None:
        registration = msgspec.json.decode((await receive())["body"], type=Registration)
        key = dict(scope["headers"])[b"authorization"].decode()
        heard.append((registration, key, (await process.health()).status_code))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    servers = Servers()
    place = place_of(await servers.start(router), "secret")

    def new_registrar(url: str) -> Registrar:
        return Registrar([Registration(url, "prefill", "m", ttl_s=3000.0)], [place])

    process = Process(ScriptedEngine(), new_registrar=new_registrar)
    url = await process.url
    await until(lambda: bool(heard))
    stop_this_process()
    assert await process.exit == EXIT_STOPPED
    assert [one[0] for one in heard] == [
        Registration(url, "prefill", "m", ttl_s=3000.0),
        Registration(url, "prefill", "m", ttl_s=0.0),
    ]
    assert {one[1:] for one in heard} == {("Bearer secret", 200)}
    await servers.stop()


async def test_an_admin_port_takes_metrics_and_batons_own_paths() -> None:
    process = Process(ScriptedEngine(), admin_port=0)
    admin_port = (await process.health()).json()["admin_port"]
    async with process.client(await process.url) as client:
        assert (await client.get("/metrics")).status_code == 404
        assert (await client.post("/baton/take_back", json={"baton_ticket": "x"})).status_code == 404
    async with process.client(f"http://127.0.0.1:{admin_port}") as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.post("/baton/take_back", json={"baton_ticket": "x"})).status_code == 202
        assert (await client.get("/v1/models")).status_code == 404
    stop_this_process()
    assert await process.exit == EXIT_STOPPED


async def test_keys_and_host_names_are_checked_on_loopback() -> None:
    process = Process(ScriptedEngine(), http=HttpSettings(api_keys=("key-of-mine",)))
    async with process.client(await process.url) as client:
        key = {"Authorization": "Bearer key-of-mine"}
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/v1/models", headers=key)).status_code == 200
        assert (await client.get("/health", headers={"Host": "evil.example"})).status_code == 403
    stop_this_process()
    assert await process.exit == EXIT_STOPPED


async def test_a_changed_key_holds_at_sighup(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("the-first-key")
    keys = HttpSettings(api_keys=("the-first-key",), key_files=KeyFiles(api_keys=str(file)))
    process = Process(ScriptedEngine(), http=keys)
    async with process.client(await process.url) as client:

        async def status() -> int:
            key = {"Authorization": "Bearer the-second-key"}
            return (await client.get("/v1/models", headers=key)).status_code

        assert await status() == 401
        file.write_text("the-second-key")
        os.kill(os.getpid(), signal.SIGHUP)
        while await status() != 200:
            pass
    stop_this_process()
    assert await process.exit == EXIT_STOPPED


async def test_a_request_in_flight_may_finish_while_it_drains() -> None:
    engine = ScriptedEngine(gate=asyncio.Event())
    process = Process(engine)
    answer = asyncio.create_task(process.post(max_tokens=5))
    await engine.was_asked.wait()
    stop_this_process()
    assert engine.gate is not None
    engine.gate.set()
    assert (await answer).json()["choices"][0]["text"] == "Hello"
    assert await process.exit == EXIT_STOPPED


@pytest.mark.parametrize("drain_timeout_s", [0.0, 0.01])
async def test_a_request_that_does_not_end_in_time_gets_an_error(drain_timeout_s: float) -> None:
    engine = ScriptedEngine(gate=asyncio.Event())
    process = Process(engine, drain_timeout_s=drain_timeout_s, shutdown_timeout_s=0)
    answer = asyncio.create_task(process.post())
    await engine.was_asked.wait()
    stop_this_process()
    assert (await answer).status_code == 503
    assert await process.exit == EXIT_STOPPED
    assert "drain" not in engine.events


async def test_a_drain_refuses_new_requests_finishes_running_ones_and_waits_for_loans() -> None:
    engine = ScriptedEngine(gate=asyncio.Event(), loans=asyncio.Event())
    assert engine.gate is not None
    assert engine.loans is not None
    process = Process(engine, drain_timeout_s=WAIT_S)
    answer = asyncio.create_task(process.post(max_tokens=5))
    await engine.was_asked.wait()
    stop_this_process()
    await process.wait_draining()
    refused = await process.post()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert int(refused.headers["Retry-After"]) > 0
    assert "drain" not in engine.events, "a prefill that still runs may lend what it computes"
    engine.gate.set()
    assert (await answer).json()["choices"][0]["text"] == "Hello"
    assert (await process.health()).json()["error"]["code"] == "draining"
    engine.loans.set()
    assert await process.exit == EXIT_STOPPED
    assert engine.events[-3:] == ["drain", "drained", "closed"]


async def test_a_second_signal_ends_a_drain_at_once() -> None:
    engine = ScriptedEngine(loans=asyncio.Event())
    process = Process(engine, drain_timeout_s=3600, shutdown_timeout_s=3600)
    assert (await process.post()).status_code == 200
    stop_this_process()
    await process.wait_draining()
    stop_this_process()
    assert await process.exit == EXIT_STOPPED
    assert "drained" not in engine.events


async def test_the_exit_status_reports_an_engine_that_dies_during_a_drain() -> None:
    engine = ScriptedEngine(loans=asyncio.Event())
    process = Process(engine, drain_timeout_s=3600)
    assert (await process.post()).status_code == 200
    stop_this_process()
    await process.wait_draining()
    engine.die()
    assert await process.exit == EXIT_ENGINE_DIED


async def test_when_the_engine_dies_pending_answers_are_503_and_the_exit_status_is_1() -> None:
    engine = ScriptedEngine(gate=asyncio.Event())
    process = Process(engine)
    answer = asyncio.create_task(process.post())
    await engine.was_asked.wait()
    engine.die()
    assert (await answer).json()["error"]["code"] == "engine_dead"
    assert await process.exit == EXIT_ENGINE_DIED


async def test_it_can_be_stopped_while_the_engine_still_starts() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def start() -> EngineClient:
        begun.set()
        try:
            await asyncio.Event().wait()
            raise AssertionError("it is never set")
        finally:
            ended.set()

    process = Process(ScriptedEngine(), start=start)
    await begun.wait()
    stop_this_process()
    assert await process.exit == EXIT_STOPPED
    assert ended.is_set()
    assert not process.url.done()


async def test_an_engine_that_does_not_start_is_reported() -> None:
    async def start() -> EngineClient:
        raise EngineDeadError("no memory")

    with pytest.raises(EngineDeadError, match="no memory"):
        await Process(ScriptedEngine(), start=start).exit


async def test_a_port_in_use_is_reported_before_the_engine_is_started() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        engine = ScriptedEngine()
        with pytest.raises(ConfigError) as refused:
            await Process(engine, port=other.getsockname()[1]).exit
    assert refused.value.field == "port"
    assert engine.events == []
