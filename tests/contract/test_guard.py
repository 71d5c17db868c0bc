"""Errors of a connector: answered as the table defines, and charged to a request or to a step."""

from functools import partial
from typing import Any

import pytest

from baton.contract import ConnectorDead, NullSchedulerHalf
from baton.contract.guard import Guard, SchedulerGuard
from baton.contract.surface import ROWS, Row, Scope
from baton.core.errors import BadTransferParams

ABOUT_A_REQUEST = {Scope.REQUEST, Scope.ENDED}


def fail(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_failure_is_answered_safely_and_charged_by_its_scope(row: Row) -> None:
    guard = Guard()
    assert guard.contain(row.name, partial(fail, RuntimeError("no"))) == row.safe_answer()
    assert guard.contain(row.name, partial(fail, RuntimeError("later")), "another") == "another"
    assert guard.num_errors == 2
    assert guard.error == (None if row.scope in ABOUT_A_REQUEST else f"{row.name}: RuntimeError: no")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_user_error_is_raised_while_the_request_can_be_refused(row: Row) -> None:
    guard = Guard()
    ask: Any = partial(guard.contain, row.name, partial(fail, BadTransferParams("expired")))
    if row.scope is Scope.REQUEST:
        with pytest.raises(BadTransferParams):
            ask()
    else:
        assert ask() == row.safe_answer()
    assert guard.num_errors == (row.scope is not Scope.REQUEST)


def test_a_failed_load_marks_the_step_even_if_later_loads_succeed() -> None:
    guard = Guard()
    assert not guard.load("start_load_kv", partial(fail, RuntimeError("no")))
    assert guard.load("wait_for_layer_load", lambda: None)
    assert guard.loads_failed


def test_only_a_step_method_can_report_a_dead_connector() -> None:
    guard = SchedulerGuard(NullSchedulerHalf())
    guard.contain("request_finished", partial(fail, ConnectorDead("its thread")))
    assert guard.end_step() is None
    guard.contain("take_events", partial(fail, ConnectorDead("its thread")))
    assert guard.end_step() == "take_events: ConnectorDead: its thread"
