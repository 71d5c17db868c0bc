"""Connectors are found by name, module path and entry point; errors name what to change."""

import sys
from types import ModuleType

import pytest

from baton.assemble import connector_factory, make_door
from baton.connectors.pull import BatonPullConnector, EngineIdentity, PullSettings
from baton.connectors.registry import connector_class
from baton.contract import KVConnectorBase_V1, NullSchedulerHalf, NullWorkerHalf
from baton.core.config import KVTransferConfig
from baton.core.errors import BadTransferParams, ConfigError
from tests.connectors.pull_world import engine_config


def transfer(**fields: object) -> KVTransferConfig:
    return KVTransferConfig(**{"kv_connector": "BatonPullConnector", "kv_role": "kv_both", **fields})  # type: ignore[arg-type]


@pytest.fixture
def foreign(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("user_connectors")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


class Old(BatonPullConnector):
    def __init__(self, vllm_config, role):  # type: ignore[no-untyped-def]
        super().__init__(vllm_config, role)


class Half(KVConnectorBase_V1):
    pass


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        ("NoSuchConnector", None, r"NoSuch.*BatonPullConnector"),
        ("NoSuch", "user_connectors", r"kv_connector_module_path: 'user_connectors' has no"),
        ("Old", "missing_connectors", "cannot import"),
        ("Old", "user_connectors", r"kv_cache_config.*two-argument"),
        ("Thing", "user_connectors", "not a subclass of KVConnectorBase_V1"),
        ("Half", "user_connectors", "does not define build_connector_meta"),
    ],
)
def test_what_is_no_connector_is_refused(
    foreign: ModuleType, name: str, module: str | None, message: str
) -> None:
    foreign.Old, foreign.Half, foreign.Thing = Old, Half, dict  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=message):
        connector_class(transfer(kv_connector=name, kv_connector_module_path=module))


def test_a_module_path_wins_over_a_registered_name(foreign: ModuleType) -> None:
    class Mine(BatonPullConnector):
        pass

    foreign.BatonPullConnector = Mine  # type: ignore[attr-defined]
    assert connector_class(transfer(kv_connector_module_path="user_connectors")) is Mine


# --- Settings ----------------------------------------------------------------------------------------


def test_each_rank_has_its_own_data_port() -> None:
    extra = {"data_port": 14700, "data_advertise_port": 15700, "data_advertise_host": "10.0.0.9"}
    options = PullSettings.parse(extra, None).tcp_options(rank=3)
    assert (options.host, options.port) == ("127.0.0.1", 14703)
    assert (options.advertise_host, options.advertise_port) == ("10.0.0.9", 15703)
    assert PullSettings.parse({}, None).tcp_options(rank=3).port == 0


def test_timers_may_be_overridden() -> None:
    settings = PullSettings.parse({"timers": {"ttl_s": 20}}, None)
    assert settings.timers.ttl_s == 20
    assert settings.timers.deadline_s == 120


# --- Assembling --------------------------------------------------------------------------------------


def test_an_engine_without_a_connector_gets_null_halves() -> None:
    import msgspec

    config = msgspec.structs.replace(engine_config("e"), kv_transfer_config=None)
    assert isinstance(connector_factory.scheduler_half(config), NullSchedulerHalf)
    assert isinstance(connector_factory.worker_half(config, 0), NullWorkerHalf)
    validate = make_door(config)
    validate(None)
    validate({})
    with pytest.raises(BadTransferParams, match="no KV connector"):
        validate({"do_remote_decode": True})


def test_each_worker_half_has_its_rank() -> None:
    half = connector_factory.worker_half(engine_config("e", tp=2), 1)
    assert half.worker_half._identity.tp_rank == 1  # type: ignore[attr-defined]


def test_the_key_of_tickets_is_derived_from_the_secret() -> None:
    identity = EngineIdentity.of_engine(engine_config("e"))
    assert identity.secret is not None
    assert identity.ticket_key is not None
    assert identity.ticket_key != identity.secret.key
