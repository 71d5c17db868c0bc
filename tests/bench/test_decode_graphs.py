"""The benchmark of replayed decode steps runs on any device."""

from pathlib import Path

import pytest

from baton.checkpoints.checkpoint import load_model_config
from baton.checkpoints.random_model import write_checkpoint
from baton.engine.attention.cuda import why_unavailable
from lab.bench import decode_graphs


@pytest.mark.slow
def test_it_runs_in_every_mode(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, hidden=32, layers=1, heads=2, vocab=512)
    model = load_model_config(tmp_path, max_model_len=4096)
    rows = decode_graphs.run(model, "cpu", batches=(2,), steps=2)
    assert [(row.mode, row.num_running) for row in rows] == [(mode, 2) for mode in decode_graphs.MODES]
    assert all(row.step_ms > 0 for row in rows)


@pytest.mark.skipif(why_unavailable() is None, reason="there is a GPU")
def test_without_a_gpu_it_reports_that(capsys: pytest.CaptureFixture[str]) -> None:
    assert decode_graphs.main() == 0
    assert "torch finds no CUDA device" in capsys.readouterr().out
