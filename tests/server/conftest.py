"""One server for each test: real sockets, a scripted engine."""

from collections.abc import Iterator

import httpx
import pytest

from tests.server.fakes import LiveServer, ScriptedEngine, service_around


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def live(engine: ScriptedEngine) -> Iterator[LiveServer]:
    with service_around(engine) as service:
        server = LiveServer(engine, service)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with live.client() as client:
        yield client
