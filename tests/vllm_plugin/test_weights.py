"""Meaning of calls to vLLM's engine core for the version of the weights."""

from types import SimpleNamespace
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.hosts.vllm.weights import READS, follow_weights


class Connector:
    """A connector like `ForwardingConnector`: an unnamed version is a new number each time."""

    def __init__(self, *, can_forget: bool = True) -> None:
        self.weights_version = ""
        self.num_unnamed = 0
        self.can_forget = can_forget
        self.holds_ended_loans = True

    def has_pending_block_frees(self) -> bool:
        self.holds_ended_loans = False
        return True

    def set_weights(self, weights: str | None, version: str | None) -> bool:
        assert weights is None, "vLLM knows no digest of changed weights"
        if version is None:
            self.num_unnamed += 1
            version = f"unnamed {self.num_unnamed}"
        self.weights_version = version
        return self.can_forget


def core_of(*connectors: Any) -> Any:
    class Core:
        """The methods of vLLM's EngineCore, with its signatures."""

        def __init__(self) -> None:
            self.calls: list[Any] = []
            self.model_executor = SimpleNamespace(is_sleeping=False)

        def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
            self.calls.append((method, [connector.weights_version for connector in connectors]))
            if method == "breaks":
                raise ValueError("in a worker")
            return [args]

        def set_weight_version(self, weight_version: str) -> None:
            self.calls.append(weight_version)

        def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
            return not any(connector.holds_ended_loans for connector in connectors)

        def sleep(self, level: int = 1, mode: str = "abort") -> None:
            for connector in connectors:
                connector.set_weights(None, None)  # Sleeping resets all caches.
            self.model_executor.is_sleeping = level > 0

        def wake_up(self, tags: list[str] | None = None) -> bool:
            self.model_executor.is_sleeping = tags is not None
            return tags is None

    follow_weights(Core)
    follow_weights(Core)  # A second call changes nothing.
    core = Core()
    multi = SimpleNamespace(_connectors=[SimpleNamespace(), *connectors])  # One connector is not ours.
    core.scheduler = SimpleNamespace(connector=multi if len(connectors) > 1 else connectors[0])  # type: ignore[attr-defined]
    return core


@pytest.mark.parametrize("method", ["update_weights", "reload_weights", "apply_model", "a_users_own", len])
def test_a_call_that_may_change_weights_takes_their_name(method: Any) -> None:
    ours, too = Connector(), Connector()
    core = core_of(ours, too)
    core.set_weight_version("v1")
    assert core.collective_rpc(method, None, (1,)) == [(1,)]
    assert core.calls == ["v1", (method, ["unnamed 1"] * 2)], "other weights while it runs"
    assert [ours.weights_version, too.weights_version] == ["unnamed 2"] * 2


@pytest.mark.parametrize("method", READS)
def test_a_call_that_reads_leaves_their_name(method: str) -> None:
    core = core_of(ours := Connector())
    core.set_weight_version("v1")
    core.collective_rpc(method)
    assert ours.weights_version == "v1"


def test_a_call_that_fails_takes_their_name_too() -> None:
    core = core_of(ours := Connector())
    with pytest.raises(ValueError, match="in a worker"):
        core.collective_rpc("breaks")
    assert ours.weights_version == "unnamed 2"


def test_the_first_version_is_that_of_an_engine_which_never_changed() -> None:
    core = core_of(ours := Connector())
    core.set_weight_version("v1")
    core.set_weight_version("default")
    assert ours.weights_version == ""


def test_weights_that_come_back_after_a_sleep_have_their_name() -> None:
    core = core_of(ours := Connector())
    core.set_weight_version("v1")
    core.sleep(1)
    assert ours.weights_version.startswith("unnamed")
    core.wake_up(["weights"])
    assert ours.weights_version.startswith("unnamed"), "a part still sleeps"
    core.wake_up()
    assert ours.weights_version == "v1"


@pytest.mark.parametrize("change", ["level", "rpc", "name"])
def test_weights_that_a_sleep_discards_or_a_call_changes_do_not_come_back(change: str) -> None:
    core = core_of(ours := Connector())
    core.set_weight_version("v1")
    core.sleep(2 if change == "level" else 1)
    if change == "rpc":
        core.collective_rpc("reload_weights")
    if change == "name":
        core.set_weight_version("v2")
    core.wake_up()
    assert ours.weights_version == "v2" if change == "name" else ours.weights_version.startswith("unnamed")


def test_weights_do_not_change_below_a_connector_that_cannot_forget() -> None:
    core = core_of(Connector(can_forget=False), other := Connector())
    with pytest.raises(RuntimeError, match="cannot forget"):
        core.collective_rpc("update_weights")
    assert core.calls == []
    assert other.weights_version == "unnamed 1", "each is told"


def test_a_paused_engine_can_reset_although_it_takes_no_step_that_ends_loans() -> None:
    assert core_of(Connector(), Connector()).reset_prefix_cache()


def test_an_engine_before_its_scheduler_has_no_connectors() -> None:
    core = core_of(Connector())
    del core.scheduler
    assert core.collective_rpc("update_max_model_len", args=(1,)) == [(1,)]


def test_an_engine_with_other_ways_to_change_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="collective_rpc"):
        follow_weights(type("Core", (), {}))
