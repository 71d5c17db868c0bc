"""Every method of the contract reaches every child of a Multi connector, with its own part."""

import inspect
from typing import Any

import pytest

from baton.connectors.multi import MultiSchedulerHalf, MultiWorkerHalf
from baton.connectors.multi.connector import BatonMultiConnector
from baton.connectors.multi.metadata import ChildPart, MultiHandshake, MultiMetadata
from baton.contract import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    NullSchedulerHalf,
    NullWorkerHalf,
    SupportsHMA,
)
from baton.contract.surface import ROWS, SURFACE, Half, Scope, rows_of
from tests.connectors.pull_world import FakeRequest

INHERITED = {"_get_connector_metadata", "has_connector_metadata"}
"""About the Multi's own metadata, which it has bound itself as any half does."""


def members(half: Half) -> set[str]:
    return {row.name for row in rows_of(half)} - INHERITED - SupportsHMA.__abstractmethods__


@pytest.mark.parametrize(
    ("half", "multi"),
    [(Half.SCHEDULER, MultiSchedulerHalf), (Half.WORKER, MultiWorkerHalf)],
)
def test_no_method_of_a_half_is_inherited(half: Half, multi: type) -> None:
    assert members(half) <= set(vars(multi))


def test_no_class_method_is_inherited() -> None:
    assert {row.name for row in ROWS if row.half is Half.CLASS} - {"role"} <= set(vars(BatonMultiConnector))
    assert set(vars(MultiSchedulerHalf)) >= SupportsHMA.__abstractmethods__


class Told(KVConnectorMetadata, KVConnectorHandshakeMetadata):
    def __init__(self, name: str) -> None:
        self.name = name


def recording(half: type, name: str, log: list[tuple[str, str, tuple[Any, ...]]]) -> Any:
    """A half that records each call with its arguments, and answers as a null half does."""

    def recorder(method: str) -> Any:
        def record(self: Any, *args: Any, **kwargs: Any) -> Any:
            log.append((name, method, (*args, *kwargs.items())))
            return getattr(super(kind, self), method)(*args, **kwargs)

        return record

    methods = {
        method: recorder(method)
        for method, value in inspect.getmembers(half, inspect.isfunction)
        if not method.startswith("_") and method not in INHERITED
    }
    kind: Any = type("Recording", (half,), methods)
    return kind()


def arguments_of(method: Any) -> list[Any]:
    """A value for each parameter; those that a Multi connector reads have their own form."""
    known: dict[str, Any] = {
        "request": FakeRequest("r", list(range(9))),
        "request_id": "r",
        "connector_output": KVConnectorOutput(),
        "finished_req_ids": {"gone"},
        "num_computed_tokens": 4,
        "num_external_tokens": 0,
        "rank": MultiWorkerHalf([(name, NullWorkerHalf()) for name in "ab"]),
        "kv_connector_metadata": MultiMetadata((ChildPart(Told("a")), ChildPart(Told("b")))),
        "connector_metadata": MultiMetadata((ChildPart(Told("a")), ChildPart(Told("b")))),
        "block_ids": [1],
    }
    handshake = MultiHandshake((Told("a"), Told("b")))
    if method.__name__ == "set_xfer_handshake_metadata":
        known["metadata"] = {0: handshake}
    if method.__name__ == "set_xfer_handshake_metadata_pp_aware":
        known["metadata"] = {(0, 0): handshake}
    wanted = [p for p in inspect.signature(method).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return [known.get(p.name, f"the {p.name}") for p in wanted]


ONLY_THE_LOADER = {  # See test_multi_rules.
    "get_loaded_kv_cache_group_ids",
    "get_external_cache_hit_sources",
    "take_prefilled_tokens",
    "get_load_failure",
}
INSTEAD = {
    "get_finished": "get_transfer_results",  # Called by hosts; it calls `get_finished`.
    "set_xfer_handshake_metadata": "set_xfer_handshake_metadata_pp_aware",
}


@pytest.mark.parametrize("name", sorted(members(Half.SCHEDULER) - ONLY_THE_LOADER))
def test_each_call_reaches_every_scheduler_half(name: str) -> None:
    log: list[tuple[str, str, tuple[Any, ...]]] = []
    multi = MultiSchedulerHalf(
        [(child, recording(NullSchedulerHalf, child, log)) for child in "ab"], block_tokens=4
    )
    if isinstance(getattr(MultiSchedulerHalf, name), property):
        assert getattr(multi, name) == getattr(NullSchedulerHalf(), name)
        return
    method = getattr(multi, name)
    method(*arguments_of(method))
    called = [child for child, method_name, _ in log if method_name == INSTEAD.get(name, name)]
    assert called == ["a", "b"]


@pytest.mark.parametrize("name", sorted(members(Half.WORKER)))
def test_each_call_reaches_every_worker_half(name: str) -> None:
    log: list[tuple[str, str, tuple[Any, ...]]] = []
    multi = MultiWorkerHalf([(child, recording(NullWorkerHalf, child, log)) for child in "ab"])
    if not callable(getattr(MultiWorkerHalf, name)):
        return
    multi.bind_connector_metadata(MultiMetadata((ChildPart(Told("a")), ChildPart(Told("b")))))
    bound = [args[0].name for _, method, args in log if method == "bind_connector_metadata"]
    assert bound == ["a", "b"], "each child gets its own metadata"
    if name == "get_block_ids_with_load_errors":
        multi.get_transfer_results(set())  # Called together with the results.
    log.clear() if name not in ("bind_connector_metadata", "get_block_ids_with_load_errors") else None
    method = getattr(multi, name)
    extra = {"later": "addition"} if name in ("start_load_kv", "save_kv_layer") else {}
    if name != "bind_connector_metadata":
        method(*arguments_of(method), **extra)
    calls = [(child, args) for child, method_name, args in log if method_name == INSTEAD.get(name, name)]
    assert [child for child, _ in calls] == ["a", "b"]
    if extra:
        assert all(args[-1] == ("later", "addition") for _, args in calls)


class Idle(NullWorkerHalf):
    def takes_part(self, connector_metadata: KVConnectorMetadata) -> bool:
        return False


TOLD = ChildPart(Told("of its scheduler half"))


@pytest.mark.parametrize(
    ("metadata", "takes_part"),
    [
        (MultiMetadata((TOLD, TOLD)), False),
        (MultiMetadata((ChildPart(None), ChildPart(None))), False),
        (MultiMetadata((TOLD, TOLD), ended=frozenset({"r"})), True),
        (MultiMetadata((TOLD, ChildPart(None, sync_blocks=frozenset({1})))), True),
        (MultiMetadata((ChildPart(Told("a"), begun=("r",)), TOLD)), True),
    ],
)
def test_it_takes_part_for_loads_though_no_child_does(metadata: MultiMetadata, takes_part: bool) -> None:
    assert MultiWorkerHalf([("a", Idle()), ("b", Idle())]).takes_part(metadata) is takes_part


@pytest.mark.parametrize("error", [False, True])
def test_it_takes_part_if_a_child_does_or_raises(error: bool) -> None:
    class Busy(NullWorkerHalf):
        def takes_part(self, connector_metadata: KVConnectorMetadata) -> bool:
            if error:
                raise RuntimeError("broken")
            return True

    multi = MultiWorkerHalf([("a", Idle()), ("b", Busy())])
    assert multi.takes_part(MultiMetadata((TOLD, TOLD)))
    assert not multi.takes_part(MultiMetadata((TOLD, ChildPart(None))))


CONTAINED = {name for name in members(Half.SCHEDULER) if SURFACE[name].scope is not Scope.START}


@pytest.mark.parametrize("child", ["a", "b"])
@pytest.mark.parametrize("name", sorted(CONTAINED - ONLY_THE_LOADER))
def test_an_error_of_one_scheduler_half_does_not_reach_the_others(name: str, child: str) -> None:
    log: list[tuple[str, str, tuple[Any, ...]]] = []

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken")

    raising: Any = type("Raising", (NullSchedulerHalf,), {name: fail})
    sibling = recording(NullSchedulerHalf, "sibling", log)
    halves = {"a": sibling, "b": sibling} | {child: raising()}
    multi = MultiSchedulerHalf(list(halves.items()), block_tokens=4)
    method = getattr(multi, name)
    method(*arguments_of(method))
    assert [method_name for _, method_name, _ in log].count(name) == 1
    stats = multi.get_kv_connector_stats()
    if name != "get_kv_connector_stats":
        assert stats is not None, "the error must be counted"
