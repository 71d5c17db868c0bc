"""The page and its plots, from a journal."""

from pathlib import Path

import pytest

from lab.bench.compare.journal import Journal
from lab.bench.compare.report import table, write_report


def journal_with_everything(path: Path) -> None:
    with Journal(path) as journal:
        journal.session(
            {
                "date": "2026-11-20 18:00 UTC",
                "machine": "two cores",
                "memory_gib": 8,
                "commit": "abc",
                "versions": {"baton": "0.1.0"},
                "options": {"parts": ["c"]},
            }
        )
        for _ in range(2):
            number = journal.next_round()

            def note(part: str, setting: str, system: str, number: int = number, **values: float) -> None:
                for metric, value in values.items():
                    journal.samples(part, setting, system, metric, number, [value])

            for part, systems in (
                ("a", ("vllm", "vllm baton pull local")),
                ("c", ("vllm", "vllm nixl pull", "vllm baton pull local")),
                ("d", ("vllm", "baton")),
                ("trace", ("vllm", "vllm nixl pull")),
            ):
                for system in systems:
                    figures = {
                        "ttft_s": 0.5,
                        "itl_s": 0.03,
                        "tpot_s": 0.03,
                        "tokens_per_s": 20.0,
                        "cpu_s": 2.0,
                    }
                    note(part, "64 tokens, 1 at once", system, **figures)
                    note(part, "64 tokens, 1 at once", system, failed=0, differing_answers=1, answers=2)
            note("b", "129 tokens", "vllm nixl pull", leg_s=0.2, cached_s=0.05, cpu_s_per_gb=3, gb_per_s=1)
            note("raw", "16 KiB", "baton local", gb_per_s=9.0, cpu_s_per_gb=0.2)
            counts = {"requests": 6, "right": 5, "wrong": 0, "errors": 1, "hung": 0}
            note("faults", "kill -9 of P", "vllm baton pull local", **counts, restart_s=30.0, again_s=0.5)
            note("start", "to ready", "vllm", start_s=31.5)
            note("machine", "c", "all", load_1min=number)
            compared = {"equal": 7, "tied": 1, "different": 0, "shortfall": 2.5e-5, "error": 1e-4}
            note("ties", "128 tokens, 8 at once", "baton", **compared)
        journal.skipped("raw", "Mooncake", "not | here")


def test_a_page_has_every_table(tmp_path: Path) -> None:
    journal_with_everything(tmp_path / "a.jsonl")
    page, *_ = write_report(tmp_path / "a.jsonl", tmp_path / "docs" / "compare.md")
    text = page.read_text()
    assert "| 128 tokens, 8 at once | 14 | 2 | 0 | 2.5e-05 | 1.0e-04 |" in text
    assert text.count("\n## ") == 11
    assert "## Goals: 1 missed" in text  # (d): equal is not a tenth faster.
    assert "| 64 tokens, 1 at once | vllm nixl pull | 500.0 | 500.0 | 1.00 (1.00 to 1.00) |" in text
    assert "| kill -9 of P | vllm baton pull local | 12 | 10 | 0 | 2 | 0 | never | 30.0 | 0.5 |" in text
    assert "* raw: Mooncake: not | here" in text
    assert "* load average while c was measured: 1.5, at most 2.0" in text
    assert all(len(row.split("|")) == len(text.splitlines()[i - 1].split("|"))
               for i, row in enumerate(text.splitlines()) if row.startswith("|---"))  # fmt: skip


def test_its_plots_are_in_the_same_folder(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    journal_with_everything(tmp_path / "a.jsonl")
    page, *pictures = write_report(tmp_path / "a.jsonl", tmp_path / "compare.md")
    assert [picture.name for picture in pictures] == [
        f"compare-{name}.png" for name in ("ttft", "second-leg", "embedded", "raw", "trace")
    ]
    assert all(picture.stat().st_size > 1000 for picture in pictures)
    assert all(f"]({picture.name})" in page.read_text() for picture in pictures)


def test_an_empty_journal_makes_a_page(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    (page,) = write_report(tmp_path / "a.jsonl", tmp_path / "compare.md")
    assert page.read_text().startswith("# Baton compared with its peers")


def test_a_bar_in_a_cell_is_escaped() -> None:
    assert table(("a", "b"), [("x|y", "1")]).splitlines()[-1] == "| x\\|y | 1 |"
