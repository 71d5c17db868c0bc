"""The transport benchmark runs, and reports each transport's ratio to its limit."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from baton.bench.transports import (
    BLOCK_SIZES,
    Comparison,
    Row,
    compare,
    integrity_costs,
    of_starts,
    plot,
    print_comparisons,
    print_table,
    run,
)
from baton.transport.nixl.agent import is_installed


@pytest.mark.processes
@pytest.mark.slow
def test_the_benchmark_measures_each_transport_at_each_block_size() -> None:
    rows = run(total_bytes=2 << 20, repeats=1)
    names = [
        "local",
        "local, cross-memory",
        *(["nixl"] if is_installed() else []),
        "tcp",
        "tcp, encrypt",
        "tcp, off",
    ]
    assert [(r.transport, r.block_bytes) for r in rows] == [(t, b) for t in names for b in BLOCK_SIZES]
    assert list(integrity_costs(rows, "tcp, encrypt")) == list(BLOCK_SIZES)
    assert all(r.gb_per_s > 0 and r.limit_gb_per_s > 0 for r in rows)


def test_a_target_is_met_by_the_ratio_to_the_limit_of_the_run() -> None:
    at_16k = 16 << 10
    assert Row("local", at_16k, 8.5, "memcpy", 10.0).meets_target is True
    assert Row("local", at_16k, 8.4, "memcpy", 10.0).meets_target is False
    assert Row("tcp", at_16k, 0.65, "loopback stream", 1.0).meets_target is True
    assert Row("tcp, off", at_16k, 0.65, "loopback stream", 1.0).meets_target is False
    assert Row("tcp", 4 << 10, 1.9, "loopback stream", 5.0).meets_target is None


def test_a_row_is_that_of_the_start_with_the_median_ratio() -> None:
    starts = [[Row("local", 1, speed, "memcpy", limit)] for speed, limit in ((9, 9), (4, 5), (3, 6))]
    assert of_starts(starts) == starts[1]


def test_the_plot_has_our_transports_and_nixl(tmp_path: Path) -> None:
    rows = [Row("local", size, 6.0, "memcpy", 10.0, 0.2) for size in BLOCK_SIZES]
    picture = plot(rows, {"NIXL": dict.fromkeys(BLOCK_SIZES, 3.0)}, tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_names_transport_block_and_verdict() -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    print_table([Row("local", 16 << 10, 9.0, "memcpy", 10.0, 0.25)], console)
    line = next(line for line in console.export_text().splitlines() if "local" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        "local", "16 KiB", "9.00", "0.25", "memcpy", "10.00", "0.90", "0.85 met",
    ]  # fmt: skip


def test_ours_is_compared_with_nixl_over_the_same_kind_of_path() -> None:
    at_16k = 16 << 10
    rows = [Row("local", at_16k, 6.0, "memcpy", 10.0), Row("tcp", at_16k, 1.0, "loopback stream", 2.0)]
    nixl = {"NIXL": {at_16k: 1.0}, "NIXL over tcp": {at_16k: 0.5}, "NIXL, no reader thread": {at_16k: 8.0}}
    assert compare(rows, nixl) == [
        Comparison("local", "NIXL", at_16k, 6.0),
        Comparison("tcp", "NIXL over tcp", at_16k, 2.0),
        Comparison("local", "NIXL, no reader thread", at_16k, 0.75),
    ]
    assert [c.meets_target for c in compare(rows, nixl)] == [True, True, False]
    console = Console(record=True, width=120, file=io.StringIO())
    print_comparisons(compare(rows, nixl), console)
    text = console.export_text()
    assert "met" in text
    assert "missed" in text
