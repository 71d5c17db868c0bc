"""Restarts of processes that end, up to a limit, with small real processes."""

import os
import signal
import sys
from pathlib import Path

import pytest

from baton.cli import supervision
from baton.cli.processes import ChildDied, Fleet
from baton.cli.supervision import RESTARTS_MAX, RESTARTS_WITHIN_S, Restarts, supervise

pytestmark = pytest.mark.processes

WAITS = [sys.executable, "-S", "-c", "print('started', flush=True); import signal; signal.pause()"]
ENDS = [sys.executable, "-S", "-c", "print('ended', flush=True); raise SystemExit(3)"]


def test_the_delay_doubles_and_the_limit_holds_for_a_time() -> None:
    restarts = Restarts()
    assert [restarts.delay(now) for now in range(RESTARTS_MAX)] == [1, 2, 4, 8, 16]
    assert restarts.delay(RESTARTS_MAX) is None
    assert restarts.delay(RESTARTS_WITHIN_S) == 16, "the first restart no longer counts"
    assert restarts.delay(RESTARTS_WITHIN_S) is None
    assert restarts.delay(10 * RESTARTS_WITHIN_S) == 1


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "FIRST_DELAY_S", 0.0)


@pytest.mark.usefixtures("at_once")
def test_a_process_that_ends_too_often_ends_the_system_and_its_log_covers_all_restarts(
    tmp_path: Path,
) -> None:
    reports: list[str] = []
    with Fleet(tmp_path) as fleet:
        fleet.start("decode-0", ENDS)
        other = fleet.start("prefill-0", WAITS)
        with pytest.raises(ChildDied, match="decode-0 ended with exit status 3"):
            supervise(fleet, [("prefill-0",), ("decode-0",)], reports.append)
        assert fleet.children == [other], "others go on meanwhile"
        assert not other.has_ended()
    assert len(reports) == RESTARTS_MAX
    assert (tmp_path / "decode-0.log").read_text().split() == ["ended"] * (RESTARTS_MAX + 1)


@pytest.mark.usefixtures("at_once")
def test_the_system_continues_without_a_process_while_another_of_its_kind_runs(tmp_path: Path) -> None:
    class Enough(Exception):
        """Raised when the test has seen the expected event."""

    reports: list[str] = []

    def report(line: str) -> None:
        reports.append(line)
        if "continuing without it" in line:
            (decode_1,) = fleet.children
            os.kill(decode_1.pid, signal.SIGKILL)
        if line.startswith("decode-1 was ended by SIGKILL: restarting it"):
            raise Enough

    with Fleet(tmp_path) as fleet:
        fleet.start("decode-0", ENDS)
        fleet.start("decode-1", WAITS)
        with pytest.raises(Enough):
            supervise(fleet, [("decode-0", "decode-1")], report)
    assert sum(line.startswith("decode-0 ended with exit status 3") for line in reports) == RESTARTS_MAX + 1
