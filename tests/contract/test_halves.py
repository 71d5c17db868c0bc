"""One class for two halves: every method of the base reaches the half of the role."""

import enum
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from baton.contract import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorSchedulerHalf,
    KVConnectorTransferResults,
    KVConnectorWorkerHalf,
    NullSchedulerHalf,
    NullWorkerHalf,
    TwoHalves,
)
from baton.contract.defaults import defined_by
from baton.contract.halves import own_scheduler, own_worker
from baton.contract.surface import ROWS, SURFACE, Half
from baton.core.config import KVTransferConfig

ROLES = {Half.SCHEDULER: [KVConnectorRole.SCHEDULER], Half.WORKER: [KVConnectorRole.WORKER]}
FORWARDED = [row for row in ROWS if row.half is not Half.CLASS and hasattr(KVConnectorBase_V1, row.name)]


class Config:
    kv_transfer_config: KVTransferConfig | None = KVTransferConfig(kv_connector="X", kv_role="kv_producer")


class Joined(TwoHalves):
    @classmethod
    def make_scheduler_half(cls, vllm_config: Any, kv_cache_config: Any) -> KVConnectorSchedulerHalf:
        return NullSchedulerHalf()

    @classmethod
    def make_worker_half(cls, vllm_config: Any, kv_cache_config: Any) -> KVConnectorWorkerHalf:
        return NullWorkerHalf()


class Recorder:
    """Returns the name of any method that is called."""

    def __getattr__(self, name: str) -> Any:
        if SURFACE[name].kind == "property":
            return name
        return lambda *args, **kwargs: (name, args, kwargs)


def joined(role: KVConnectorRole) -> Joined:
    connector = Joined(Config(), role, None)  # type: ignore[arg-type]
    if role is KVConnectorRole.SCHEDULER:
        connector._scheduler_half = Recorder()  # type: ignore[assignment]
    else:
        connector._worker_half = Recorder()  # type: ignore[assignment]
    return connector


@pytest.mark.parametrize(
    ("role", "name"),
    [(role, row.name) for row in FORWARDED for role in ROLES.get(row.half, list(KVConnectorRole))],
)
def test_every_member_is_forwarded_with_its_arguments(role: KVConnectorRole, name: str) -> None:
    method = getattr(joined(role), name)
    if SURFACE[name].kind == "property":
        assert method == name
        return
    parameters = inspect.signature(method).parameters.values()
    arguments = tuple(f"argument {i}" for i, p in enumerate(parameters) if p.kind is p.POSITIONAL_OR_KEYWORD)
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters)
    extra = {"later": "addition"} if takes_more else {}
    answer = method(*arguments, **extra)
    if answer is not None:
        assert answer == (name, arguments, extra)


def test_cross_layer_blocks_are_a_preference_of_the_instance() -> None:
    class Prefers(Joined):
        @classmethod
        def make_worker_half(cls, vllm_config: Any, kv_cache_config: Any) -> KVConnectorWorkerHalf:
            half = NullWorkerHalf()
            half.prefer_cross_layer_blocks = True
            return half

    assert Prefers.prefer_cross_layer_blocks is False
    assert Prefers(Config(), KVConnectorRole.WORKER).prefer_cross_layer_blocks is True  # type: ignore[arg-type]
    assert joined(KVConnectorRole.WORKER).prefer_cross_layer_blocks is False


class TheirRoles(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


TheirRoles.__name__ = "KVConnectorRole"


def test_a_host_calls_the_half_of_a_connector_that_only_forwards() -> None:
    class HasOwnCode(Joined):
        def finish_forward(self) -> None:
            return

    for role, own in ((KVConnectorRole.WORKER, own_worker), (KVConnectorRole.SCHEDULER, own_scheduler)):
        connector, other = Joined(Config(), role, None), HasOwnCode(Config(), role, None)  # type: ignore[arg-type]
        assert own(connector) is connector.either_half
        assert own(other) is other


def test_defaults_of_the_contract_are_not_defined_by_a_half() -> None:
    class Saves(NullWorkerHalf):
        def wait_for_save(self) -> None:
            return

    assert defined_by(NullWorkerHalf) == set()
    assert defined_by(Saves) == {"wait_for_save"}
    assert "build_connector_meta" in defined_by(NullSchedulerHalf)
    assert "take_events" not in defined_by(NullSchedulerHalf)


def test_a_host_may_have_its_own_enum_of_roles() -> None:
    assert TheirRoles.WORKER == KVConnectorRole.WORKER
    assert KVConnectorRole.SCHEDULER != TheirRoles.WORKER
    connector = Joined(Config(), TheirRoles.SCHEDULER)  # type: ignore[arg-type]
    assert connector.role is KVConnectorRole.SCHEDULER
    assert connector.scheduler_half is not None


def test_the_other_half_is_not_accessible() -> None:
    with pytest.raises(AssertionError, match="scheduler role"):
        joined(KVConnectorRole.SCHEDULER).wait_for_save()
    with pytest.raises(AssertionError, match="worker role"):
        joined(KVConnectorRole.WORKER).take_events()


def test_a_connector_needs_a_transfer_config() -> None:
    class Bare:
        kv_transfer_config = None

    with pytest.raises(ValueError, match="kv_transfer_config must be set"):
        Joined(Bare(), KVConnectorRole.SCHEDULER)  # type: ignore[arg-type]


def test_null_halves_answer_nothing() -> None:
    scheduler, worker = NullSchedulerHalf(), NullWorkerHalf()
    request: Any = None
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert scheduler.request_finished(request, [1]) == (False, None)
    worker.bind_connector_metadata(scheduler.build_connector_meta(request))
    worker.start_load_kv(request)
    worker.wait_for_layer_load("layer")
    worker.save_kv_layer("layer", request, None)
    worker.wait_for_save()
    assert worker.get_transfer_results(set()) == KVConnectorTransferResults()
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.build_connector_worker_meta() is None
    worker.clear_connector_metadata()
    assert not worker.has_connector_metadata()
    scheduler.shutdown()
    worker.shutdown()


def test_the_guide_lists_the_hooks_that_the_embedded_engine_does_not_call() -> None:
    root = Path(__file__).parents[2]
    callers = [*(root / "baton" / "engine").rglob("*.py"), root / "baton" / "contract" / "guard.py"]
    engine = "".join(path.read_text() for path in sorted(callers))
    called = set(re.findall(r"(?:half|_half|worker_half|connector|watcher)\)?\.([a-z_]+)", engine))
    hooks = {
        name
        for half in (KVConnectorSchedulerHalf, KVConnectorWorkerHalf)
        for name in vars(half)
        if not name.startswith("_")
    }
    # Called by other hooks: `bind_kv_cache_manager`, `get_transfer_results` and the handshake.
    called |= {"bind_gpu_block_pool", "get_finished", "set_xfer_handshake_metadata"}
    guide = (root / "docs" / "connectors.md").read_text()
    section = guide.partition("## Hooks that only one host calls")[2].partition("\n## ")[0]
    listed = {
        name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in row.split("`")[1::2]
    }
    assert listed - {"supports_sleep_mode"} == hooks - called
