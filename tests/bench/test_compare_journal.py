"""A journal keeps the measurements of a session, including an interrupted one."""

from pathlib import Path

import pytest

from lab.bench.compare.journal import Journal, Samples, Skipped, read_journal


def write_some(path: Path) -> None:
    with Journal(path) as journal:
        journal.session({"date": "2026-11-20"})
        number = journal.next_round()
        journal.samples("c", "64 tokens", "vllm", "ttft_s", number, [0.1, 0.23456789])
        journal.skipped("raw", "Mooncake", "not installed")


def test_a_journal_is_read_back(tmp_path: Path) -> None:
    write_some(tmp_path / "a.jsonl")
    findings = read_journal(tmp_path / "a.jsonl")
    assert findings.sessions == [{"date": "2026-11-20"}]
    assert findings.samples == [Samples("c", "64 tokens", "vllm", "ttft_s", 1, (0.1, 0.234568))]
    assert findings.skipped == [Skipped("raw", "Mooncake", "not installed")]
    assert findings.rounds("c", "64 tokens", "vllm", "ttft_s") == {1: [0.1, 0.234568]}
    assert findings.rounds("c", "64 tokens", "vllm", "itl_s") == {}


def test_a_part_without_a_figure_is_named(tmp_path: Path) -> None:
    write_some(tmp_path / "a.jsonl")
    assert read_journal(tmp_path / "a.jsonl").not_measured(["c", "raw", "d"]) == ["raw", "d"]


def test_a_second_session_has_rounds_of_its_own(tmp_path: Path) -> None:
    write_some(tmp_path / "a.jsonl")
    write_some(tmp_path / "a.jsonl")
    findings = read_journal(tmp_path / "a.jsonl")
    assert sorted(findings.rounds("c", "64 tokens", "vllm", "ttft_s")) == [1, 2]


def test_an_unfinished_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_some(path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert len(read_journal(path).samples) <= 1


def test_an_interrupted_journal_can_be_extended(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_some(path)
    path.write_bytes(path.read_bytes()[:-5])
    write_some(path)
    findings = read_journal(path)
    assert len(findings.sessions) == 2
    assert len(findings.skipped) == 1


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"kind": "recipe"}\n')
    with pytest.raises(ValueError, match="recipe"):
        read_journal(path)
