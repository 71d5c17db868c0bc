"""Plan, journal and report of the matrix, without processes or a clock."""

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from lab.chaos.cell import Record
from lab.chaos.faults import FAULTS
from lab.chaos.matrix import (
    QUICK,
    Shard,
    append_record,
    plan_cells,
    read_journal,
    without_done,
)
from lab.chaos.modes import MODES
from lab.chaos.report import write_report
from lab.chaos.verdicts import Counts

COUNTS = Counts(
    requests=10,
    right=9,
    clear_errors=1,
    wrong=0,
    unclear=0,
    hung=0,
    left=0,
    longest_wait_s=1.25,
    median_wait_s=0.1,
    open_longest_s=0.4,
    after_begin_s=0.2,
    after_end_s=0.3,
    details=(),
)


def record(mode: str = "pull", fault: str = "kill-p", **fields: object) -> Record:
    return Record(**{"mode": mode, "fault": fault, "commit": "abc", "counts": COUNTS, **fields})  # type: ignore[arg-type]


def report(*records: Record) -> str:
    return write_report(records, machine="2 cores", date="2026-01-01")


def test_names_are_unique_and_the_quick_run_lists_existing_cells() -> None:
    assert len({mode.name for mode in MODES}) == len(MODES)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {(mode.name, fault.name) for mode, fault in plan_cells(quick=True)} == set(QUICK)


def test_faults_run_only_in_modes_that_meet_their_needs() -> None:
    cells = {(mode.name, fault.name) for mode, fault in plan_cells()}
    assert ("pull", "partition") in cells
    assert ("local", "partition") not in cells
    assert ("local", "kill-p") in cells
    assert {mode for mode, fault in cells if fault == "rank-p"} == {"tp2to1"}


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_partition_the_cells(count: int) -> None:
    parts = [plan_cells(shard=Shard(index + 1, count)) for index in range(count)]
    assert [cell for part in parts for cell in part] == plan_cells()


def test_cells_that_share_a_system_follow_each_other() -> None:
    keys = [(mode.name, fault.variant) for mode, fault in plan_cells()]
    changes = sum(a != b for a, b in pairwise(keys))
    assert changes == len(set(keys)) - 1


def test_a_journal_resumes_a_run_and_ignores_other_commits(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert read_journal(path) == []
    written = [record(), record(fault="none", commit="old"), record(fault="reset", skipped="refused")]
    for each in written:
        append_record(path, each)
    path.write_bytes(path.read_bytes() + b'{"mode": "of another version"}\n{"torn\n')
    assert read_journal(path) == written
    cells = plan_cells(modes=["pull"], faults=["kill-p", "none", "reset"])
    rest = [fault.name for _, fault in without_done(cells, read_journal(path), "abc")]
    assert rest == ["none", "reset"]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"counts": msgspec.structs.replace(COUNTS, wrong=2)}, "2 wrong"),
        ({"counts": msgspec.structs.replace(COUNTS, hung=1)}, "1 hung"),
        ({"counts": msgspec.structs.replace(COUNTS, unclear=1)}, "1 unclear"),
        ({"held": ["p0 num_requests_delayed_free=1"]}, "held: p0"),
        ({"processes_left": ["baton-core 17"]}, "baton-core 17"),
        ({"files_left": 3}, "3 files left"),
        ({"silent_pairs": ["p0>d0"]}, "p0>d0"),
        ({"ended": ["d1"]}, "ended: d1"),
        ({"broken": "the switch has ended"}, "broken"),
    ],
)
def test_a_defect_is_in_the_record_and_the_report(fields: dict[str, object], word: str) -> None:
    bad = record(**fields)
    assert len(bad.defects) == 1
    assert word in bad.defects[0]
    text = report(record(fault="none"), bad)
    assert "| kill-p | BAD |" in text
    assert "| none | ok |" in text
    assert f"* pull, kill-p: {bad.defects[0]}" in text


def test_the_last_record_of_a_cell_counts() -> None:
    text = report(record(held=["p0 x=1"]), record())
    assert "BAD |" not in text
    assert "1 cells, 10 requests: 9 right, 1 clear errors" in text


def test_missed_goals_are_listed_and_are_not_defects() -> None:
    slow = record(counts=msgspec.structs.replace(COUNTS, longest_wait_s=61.0), serves_again_s=5.0, strikes=0)
    text = report(slow)
    assert slow.defects == []
    for words in ("waited 61.0 s", "served 5.0 s after", "affected no packet"):
        assert words in text


def test_messages_of_clear_errors_are_listed() -> None:
    text = report(record(counts=msgspec.structs.replace(COUNTS, errors=("no decode engine is up",))))
    assert "* pull, kill-p: no decode engine is up" in text


def test_a_cell_that_was_not_run_is_reported_with_the_reason() -> None:
    text = report(record(fault="loss", counts=None, skipped="namespaces are refused"), record())
    assert "| loss | - |" in text
    assert "* loss: not run; namespaces are refused" in text
