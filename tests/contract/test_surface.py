"""The table of the contract: complete, true to the base classes, and what forwarding makes of it."""

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
from baton.testing.contract.watched_scheduler import WatchedScheduler
from baton.testing.contract.watched_worker import WatchedWorker
from baton.vllm_plugin.drift import RECORDS, load_record
from baton.vllm_plugin.relied_on import EXTENDED


def defined(*kinds: type) -> dict[str, str]:
    """By name, what of the contract these classes define themselves: "method" or "property"."""
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


def test_the_rows_of_vllm_are_those_that_were_recorded() -> None:
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
def test_what_stands_before_a_half_inherits_nothing(kind: type, halves: tuple[Half, ...]) -> None:
    own = vars(kind).keys() | SupportsHMA.__abstractmethods__
    assert names(*halves).keys() - own == set(), "never reaches the half"


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.name in vars(TwoHalves)], ids=lambda row: row.name
)
def test_a_forwarded_method_looks_like_the_contracts(row: Row) -> None:
    own, base = vars(TwoHalves)[row.name], getattr(KVConnectorBase_V1, row.name)
    assert own is not base, "hosts ask whether a connector overrides a method"
    assert isinstance(own, property) == (row.kind == "property")
    assert not getattr(own, "__isabstractmethod__", False)
    if row.kind == "method":
        assert own.__name__ == row.name
        assert own.__qualname__ == f"TwoHalves.{row.name}"
        assert inspect.signature(own) == inspect.signature(base)
        assert pickle.loads(pickle.dumps(own)) is own


def test_a_safe_answer_that_can_be_modified_is_a_new_one_each_time() -> None:
    for row in ROWS:
        before = copy.copy(row.safe_answer())
        if isinstance(before, set | dict):
            row.safe_answer().clear()
            assert row.safe_answer() is not row.safe_answer()
        assert row.safe_answer() == before
