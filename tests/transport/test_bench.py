"""The transport benchmark runs, and says of each transport how near its limit it comes."""

import io

import pytest
from rich.console import Console

from baton.bench.transports import BLOCK_SIZES, Row, print_table, run


@pytest.mark.processes
@pytest.mark.slow
def test_the_benchmark_measures_each_transport_at_each_block_size() -> None:
    rows = run(total_bytes=2 << 20, repeats=1)
    assert [(r.transport, r.block_bytes) for r in rows] == [
        (t, b) for t in ("local", "tcp") for b in BLOCK_SIZES
    ]
    assert all(r.gb_per_s > 0 and r.limit_gb_per_s > 0 for r in rows)


def test_a_target_is_met_by_the_ratio_or_by_the_speed() -> None:
    at_16k = 16 << 10
    assert Row("local", at_16k, 4.0, "memcpy", 10.0).meets_target is True
    assert Row("local", at_16k, 3.9, "memcpy", 10.0).meets_target is False
    assert Row("tcp", at_16k, 2.0, "loopback stream", 5.0).meets_target is True
    assert Row("tcp", at_16k, 0.8, "loopback stream", 1.0).meets_target is True
    assert Row("tcp", at_16k, 1.9, "loopback stream", 5.0).meets_target is False
    assert Row("tcp", 2 << 10, 1.9, "loopback stream", 5.0).meets_target is None


def test_the_table_names_transport_block_and_verdict() -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    print_table([Row("local", 16 << 10, 4.0, "memcpy", 10.0)], console)
    line = next(line for line in console.export_text().splitlines() if "local" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        "local", "16 KiB", "4.00", "memcpy", "10.00", "0.40", "met",
    ]  # fmt: skip
