"""One log line per interval with the connector's statistics; no line without counts."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from baton.connectors.pull.stats import PullStats
from baton.contract import KVConnectorStats
from baton.server.connector_log import INTERVAL_S, ConnectorLog

pytestmark = pytest.mark.usefixtures("at_info")


@pytest.fixture
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.server.connector_log")


class Timers:
    def __init__(self) -> None:
        self.due: list[tuple[float, Callable[[], None]]] = []

    def __call__(self, delay_s: float, call: Callable[[], None]) -> None:
        self.due.append((delay_s, call))

    def run(self) -> None:
        due, self.due = self.due, []
        for _, call in due:
            call()


def loans(count: int) -> dict[str, Any]:
    stats = PullStats()
    for _ in range(count):
        stats.add(num_loans=1)
    return stats.data


def test_an_interval_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    timers = Timers()
    log = ConnectorLog(PullStats, later=timers)
    for count in (1, 2, 0, 4):
        log.observe(loans(count))
    assert [delay_s for delay_s, _ in timers.due] == [INTERVAL_S]
    assert not caplog.messages
    timers.run()
    (line,) = caplog.messages
    assert line.startswith("KV connector: 0 transfers")
    assert "7 loans" in line
    assert not timers.due, "no line without new counts"
    log.observe(loans(1))
    timers.run()
    assert "1 loans" in caplog.messages[-1]


def test_remaining_counts_are_logged_once_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    timers = Timers()
    log = ConnectorLog(PullStats, later=timers)
    log.observe(loans(3))
    log.flush()
    timers.run()
    assert len(caplog.messages) == 1


def test_an_error_of_the_connector_costs_only_its_line(caplog: pytest.LogCaptureFixture) -> None:
    def build(raw: dict[str, Any]) -> KVConnectorStats:
        raise KeyError("not mine")

    ConnectorLog(build, later=Timers()).observe({"a": 1})

    class Broken(PullStats):
        def reduce(self) -> dict[str, int | float | str]:
            raise ZeroDivisionError

    timers = Timers()
    ConnectorLog(Broken, later=timers).observe(loans(1))
    timers.run()
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
