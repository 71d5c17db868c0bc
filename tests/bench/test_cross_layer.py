"""The benchmark of cross-layer blocks runs, and its reads have the expected runs of bytes."""

import pytest

from baton.core.layout import Region
from baton.protocol.layout_checks import check_layout
from benchmarks import cross_layer
from benchmarks.cross_layer import KINDS, SHAPES, layout_of, spans_of

TOTAL_BYTES = 4 << 20


@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_is_one_run_only_if_both_sides_are_cross_layer(shape: cross_layer.Shape) -> None:
    for kind, (theirs, ours) in KINDS.items():
        local = layout_of(shape, Region(1 << 20, TOTAL_BYTES), is_together=ours)
        remote = layout_of(shape, Region(1 << 30, TOTAL_BYTES), is_together=theirs)
        check_layout(local)
        spans = spans_of(local, remote)
        assert len(spans) == (1 if kind == "cross-layer" else shape.num_layers)
        assert sum(span.nbytes for span in spans) == shape.block_bytes


@pytest.mark.slow
@pytest.mark.processes
def test_the_benchmark_runs() -> None:
    rows = cross_layer.run(total_bytes=TOTAL_BYTES, repeats=1)
    assert {"local", "tcp", "memory"} <= {row.transport for row in rows}
    assert {row.kind for row in rows} == set(KINDS)
    assert all(row.gb_per_s > 0 for row in rows)
