"""Table of the contract: complete, consistent with the base classes, and used for forwarding."""

import copy
import inspect
import pickle

import pytest

from baton.contract import (
    KVConnectorBase_V1,
    KVConnectorSchedulerHalf,
    KVConnectorWorkerHalf,
    SupportsHMA,
    TwoHalves,
)
from baton.contract.surface import ROWS, SURFACE, Half, Row
from baton.hosts.vllm.drift import EXTENDED, RECORDS, load_record
from baton.testing.contract.watched_scheduler import WatchedScheduler
from baton.testing.contract.watched_worker import WatchedWorker


def defined(*kinds: type) -> dict[str, str]:
    """The contract's members that these classes define themselves, as "method" or "property" by name."""
    return {
        name: "property" if isinstance(value, property) else "method"
        for kind in kinds
        for name, value in vars(kind).items()
        if (inspect.isfunction(value) or isinstance(value, property | classmethod))
        and not name.startswith("__")
    }


def names(*halves: Half) -> dict[str, str]:
    return {row.name: row.kind for row in ROWS if row.half in halves}


def test_each_member_of_the_base_has_one_row() -> None:
    assert len(SURFACE) == len(ROWS)
    assert names(Half.SCHEDULER, Half.BOTH) == defined(KVConnectorSchedulerHalf, SupportsHMA)
    assert names(Half.WORKER, Half.BOTH) == defined(KVConnectorWorkerHalf)
    assert (
        defined(KVConnectorSchedulerHalf).keys() & defined(KVConnectorWorkerHalf).keys()
        == names(Half.BOTH).keys()
    )
    assert names(Half.CLASS).items() <= defined(KVConnectorBase_V1).items()


def test_vllms_rows_equal_the_recorded_ones() -> None:
    recorded = {
        name
        for record in RECORDS.glob("*.json")
        for base in EXTENDED[:2]
        for name, how in load_record(record.stem)[base].items()
        if how != "attribute" and name != "__init__"
    }
    assert {row.name for row in ROWS if row.by == "vllm"} == recorded


@pytest.mark.parametrize(
    ("kind", "halves"),
    [
        (TwoHalves, (Half.SCHEDULER, Half.WORKER, Half.BOTH)),
        (WatchedScheduler, (Half.SCHEDULER, Half.BOTH)),
        (WatchedWorker, (Half.WORKER, Half.BOTH)),
    ],
)
def test_a_forwarding_class_inherits_no_contract_method(kind: type, halves: tuple[Half, ...]) -> None:
    own = vars(kind).keys() | SupportsHMA.__abstractmethods__
    assert names(*halves).keys() - own == set(), "an inherited method does not reach the half"


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.name in vars(TwoHalves)], ids=lambda row: row.name
)
def test_a_forwarded_method_has_the_contracts_signature(row: Row) -> None:
    own, base = vars(TwoHalves)[row.name], getattr(KVConnectorBase_V1, row.name)
    assert own is not base, "hosts check whether a connector overrides a method"
    assert isinstance(own, property) == (row.kind == "property")
    assert not getattr(own, "__isabstractmethod__", False)
    if row.kind == "method":
        assert own.__name__ == row.name
        assert own.__qualname__ == f"TwoHalves.{row.name}"
        assert inspect.signature(own) == inspect.signature(base)
        assert pickle.loads(pickle.dumps(own)) is own


def test_a_mutable_safe_answer_is_made_anew() -> None:
    for row in ROWS:
        before = copy.copy(row.safe_answer())
        if isinstance(before, set | dict):
            row.safe_answer().clear()
            assert row.safe_answer() is not row.safe_answer()
        assert row.safe_answer() == before
