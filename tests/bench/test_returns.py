"""The benchmarks of offload and shared storage measure what they report, with a tiny model."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from baton.bench import tiers
from baton.checkpoints.random_model import write_checkpoint
from lab.bench import offload, shared_storage
from lab.bench.returns import run_command


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, hidden=64, layers=2, heads=4, kv_heads=2, vocab=8192)


def report_of(bench: Any, measured: dict[str, Any]) -> str:
    console = Console(width=120, record=True)
    bench.print_tables(measured, console)
    return console.export_text()


@pytest.mark.slow
def test_a_prompt_returns_from_host_memory_and_the_tables_show_it(model: Path) -> None:
    measured = offload.measure(200, 2, num_blocks=8, turns=3, model=model)
    copies, returns = measured["copies"], measured["returns"]
    assert copies["of_memcpy"]["memcpy"] == 1
    assert len(copies["gb_per_s"]) == 5
    assert returns["tokens_are_equal"]
    assert 100 < returns["loaded_tokens"] < 200
    report = report_of(offload, measured)
    assert "tokens are equal" in report
    assert "store, shuffled" in report
    assert "(goal 5: " in report


@pytest.mark.slow
def test_a_prompt_returns_from_files_and_the_tables_show_it(model: Path) -> None:
    measured = shared_storage.measure(200, 2, chunk_tokens=80, model=model)
    returns = measured["returns"]
    assert returns["tokens_are_equal"]
    assert 100 < returns["loaded_tokens"] <= 160, "two chunks, less the blocks that the engine still has"
    report = report_of(shared_storage, measured)
    assert "tokens are equal" in report
    assert "loaded from files" in report


def test_chunks_are_compared_with_plain_files(tmp_path: Path) -> None:
    rows = {row.what: row for row in tiers.measure(tmp_path, num_chunks=2, turns=2)}
    assert rows["plain write"].ratio == rows["plain read"].ratio == 1
    assert rows["load"].ratio == rows["load"].gb_per_s / rows["plain read"].gb_per_s
    assert rows["store"].ratio == rows["store"].gb_per_s / rows["plain write, fsync"].gb_per_s
    console = Console(width=120, record=True)
    tiers.print_tables(list(rows.values()), [tiers.Lookup("memory", 12.0, 50)], console)
    report = console.export_text()
    assert "lookup of 4,000 tokens in memory: 12 us (goal 50)" in report
    assert "0.75" in report


def test_the_figures_are_kept_and_other_tokens_are_a_failure(tmp_path: Path) -> None:
    def measure(prompt_tokens: int, repeats: int) -> dict[str, Any]:
        return {"returns": {"tokens_are_equal": repeats == 3}, "of": prompt_tokens}

    out = tmp_path / "figures.json"
    arguments = ["--tokens", "70", "--out", str(out)]
    assert run_command("bench", arguments, measure, lambda measured, console: None) == 0
    assert '"of": 70' in out.read_text()
    assert run_command("bench", ["--repeats", "2"], measure, lambda measured, console: None) == 1
