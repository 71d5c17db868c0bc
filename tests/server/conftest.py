"""One server for each module, one scripted engine for each test; real sockets."""

from collections.abc import Iterator

import httpx
import pytest

from tests.server.fakes import LiveServer, ScriptedEngine, service_around


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with service_around(ScriptedEngine()) as service, LiveServer(service) as server:
        yield server


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def live(server: LiveServer, engine: ScriptedEngine) -> LiveServer:
    """The module's server, with an engine and metrics of the test's own."""
    server.reset(engine)
    return server


@pytest.fixture
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with live.client() as client:
        yield client
