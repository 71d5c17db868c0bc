"""`POST /update_weights`: that may update, from where, and what an engine answers about its weights."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from baton.cli.serve_settings import resolve
from baton.core.errors import ConfigError, UserError
from baton.engine.core.client import EngineDeadError, EngineUnreadyError
from baton.engine.core.weights_update import UpdateFailed, UpdateUnderWay
from baton.http.settings import HttpSettings
from tests.server.fakes import LiveServer, ScriptedEngine, service_around
from tests.server.test_introduction import CARD

ADMIN = {"Authorization": "Bearer key-of-admin"}
ROUTER = {"Authorization": "Bearer key-of-router"}


@dataclass
class UpdatedEngine(ScriptedEngine):
    """Takes all weights, or raises `error`."""

    error: Exception | None = None
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    async def update_weights(self, folder: str, version: str | None, *, mode: str, timeout_s: float) -> None:
        self.asked.append((folder, version, mode, timeout_s))
        if self.error is not None:
            raise self.error
        now = msgspec.structs.replace(self.model_config, weights_digest="new", weights_version=version or "")
        self.on_weights(now)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "v2").mkdir(parents=True)
    (tmp_path / "root" / "out").symlink_to(tmp_path / "other")
    (tmp_path / "other").mkdir()
    return tmp_path / "root"


@pytest.fixture
def updated() -> UpdatedEngine:
    return UpdatedEngine()


@pytest.fixture
def client(updated: UpdatedEngine, root: Path) -> Iterator[httpx.Client]:
    keys = HttpSettings(api_keys=("key-of-router",), admin_keys=("key-of-admin",))
    with service_around(updated, limits=keys, weights_root=root, introduction=CARD) as service:
        updated.model_config = service.model_config
        with LiveServer(service) as live, live.client() as client:
            yield client


def test_all_that_the_engine_tells_is_of_the_weights_now(client: httpx.Client, root: Path) -> None:
    before = client.get("/weight_info", headers=ROUTER).json()
    answer = client.post("/update_weights", json={"folder": "v2", "version": "step 2"}, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    told = {"weight_version": "step 2", "weights_digest": "new"}
    assert answer.json() == client.get("/weight_info", headers=ROUTER).json() == told != before
    identity = client.get("/baton/introduction", headers=ROUTER).json()["kv_identity"]
    assert identity == msgspec.to_builtins(CARD.kv_identity.updated("new", "step 2"))
    metrics = client.get("/metrics", headers=ADMIN).text
    assert 'weights_info{engine="0",model_name="toy",version="step 2",weights="new"} 1.0' in metrics
    assert metrics.count("weights_info{") == 1


def test_the_request_has_vllms_modes_and_paths_below_the_root(
    client: httpx.Client, updated: UpdatedEngine, root: Path
) -> None:
    for folder in ("v2", str(root / "v2")):
        body = {"folder": folder, "mode": "keep", "timeout_s": 2.5}
        client.post("/update_weights", json=body, headers=ADMIN)
    assert updated.asked == 2 * [(str(root / "v2"), None, "keep", 2.5)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"folder": "../other"}, "folder"),
        ({"folder": "/"}, "folder"),
        ({"folder": "out"}, "folder"),
        ({"folder": "a\0b"}, "folder"),
        ({"version": "v1"}, "folder"),
        ({"folder": "v2", "mod": "keep"}, "mod"),
        ([], "body"),
    ],
)
def test_other_bodies_are_refused(
    client: httpx.Client, updated: UpdatedEngine, body: Any, param: str | None
) -> None:
    answer = client.post("/update_weights", json=body, headers=ADMIN)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert updated.asked == []


@pytest.mark.parametrize("headers", [{}, ROUTER])
def test_only_the_administrator_updates(
    client: httpx.Client, updated: UpdatedEngine, headers: dict[str, str]
) -> None:
    assert client.post("/update_weights", json={"folder": "v2"}, headers=headers).status_code == 401
    assert updated.asked == []


def test_without_a_root_nobody_does(http: httpx.Client) -> None:
    answer = http.post("/update_weights", json={"folder": "v2"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "updates_not_allowed")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (UserError("is of another architecture", field="folder"), 400, 400),
        (UpdateUnderWay("another update of the weights is under way"), 409, "update_under_way"),
        (UpdateFailed("the old weights go on serving"), 503, "not_updated"),
        (EngineDeadError("gone"), 503, "engine_dead"),
        (EngineUnreadyError("restarts"), 503, "not_ready"),
    ],
)
def test_an_update_that_ends_badly_changes_nothing(
    client: httpx.Client, updated: UpdatedEngine, error: Exception, status: int, code: str | int
) -> None:
    before = client.get("/weight_info", headers=ROUTER).json()
    updated.error = error
    answer = client.post("/update_weights", json={"folder": "v2"}, headers=ADMIN)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert client.get("/weight_info", headers=ROUTER).json() == before


def test_a_server_for_other_hosts_needs_a_key_for_updates(tmp_path: Path) -> None:
    given = {"model": "m", "weights_root": str(tmp_path), "host": "0.0.0.0"}
    with pytest.raises(ConfigError, match="any client could update the weights"):
        resolve(given, environment={})
    resolve(given, environment={"BATON_ADMIN_API_KEY": "key-of-admin"})
    resolve({**given, "host": "127.0.0.1"}, environment={})
