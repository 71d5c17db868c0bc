"""Journals that are read again: of the chaos matrix, of `baton bench compare`, and of the handoff bench."""

import json
from pathlib import Path

from lab.bench.compare.journal import Findings, Journal, Samples, Skipped, read_journal
from lab.bench.handoff.command import RESULTS
from lab.bench.handoff.goals import Results
from lab.chaos.cell import Record
from lab.chaos.faults import FAULTS
from lab.chaos.modes import MODES
from tests.golden.golden import ROOT, check
from tests.golden.shapes import shape


def test_records_of_the_chaos_matrix() -> None:
    """A line that does not fit is left out, and its cell runs again: hours of it."""
    check("chaos", shape(Record))


def test_names_of_modes_and_faults() -> None:
    check(
        "chaos_names",
        [*(f"mode {mode.name}" for mode in MODES), *(f"fault {fault.name}" for fault in FAULTS)],
    )


COMPARED = (
    '{"kind": "session", "date": "2026-11-20"}\n'
    '{"kind": "samples", "part": "c", "setting": "64 tokens", "system": "vllm", "metric": "ttft_s", '
    '"round": 1, "values": [0.1, 0.2]}\n'
    '{"kind": "skipped", "part": "raw", "what": "Mooncake", "reason": "not installed"}\n'
)


def test_the_journal_of_compare(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.session({"date": "2026-11-20"})
        journal.samples("c", "64 tokens", "vllm", "ttft_s", journal.next_round(), [0.1, 0.2])
        journal.skipped("raw", "Mooncake", "not installed")
    assert path.read_text() == COMPARED
    assert read_journal(path) == Findings(
        sessions=[{"date": "2026-11-20"}],
        samples=[Samples("c", "64 tokens", "vllm", "ttft_s", 1, (0.1, 0.2))],
        skipped=[Skipped("raw", "Mooncake", "not installed")],
    )


def test_the_published_results_of_the_handoff_bench() -> None:
    """The next session reads them and adds to them."""
    published = json.loads((ROOT / "docs" / "benchmarks" / RESULTS).read_text())
    kept = json.loads(json.dumps(Results.of_json(published).to_json()))
    assert [kept[key] for key in ("lengths", "overheads")] == [
        published[key] for key in ("lengths", "overheads")
    ]
