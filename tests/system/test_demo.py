"""`baton demo` with fewer prompts: real engines, real bytes, equal tokens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TIMEOUT_S = 240.0


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize(
    "options",
    [[], ["--mode", "push", "--stream", "layer", "--prefill-block-size", "16"]],
    ids=["pull", "push"],
)
def test_the_demo_hands_over_and_the_tokens_are_equal(
    small_model: Path, tmp_path: Path, options: list[str]
) -> None:
    command = [sys.executable, "-m", "baton.cli", "demo", "--model", str(small_model), "--prompts", "6"]
    command += ["--log-dir", str(tmp_path / "logs"), "--num-blocks", "256", *options]
    # Settings of `baton serve` must not change the demo.
    environment = {**os.environ, "BATON_BLOCK_SIZE": "4", "COLUMNS": "100"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "6 of 6 answers equal" in ended.stdout
    assert "below one block" in ended.stdout
    assert "sent again" in ended.stdout
    assert "Next:" in ended.stdout


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("connector", ["shared-storage", "multi"])
def test_the_demo_of_a_store_asks_twice_and_the_tokens_are_equal(
    small_model: Path, tmp_path: Path, connector: str
) -> None:
    """The Multi connector contains offload, which needs no test of its own here."""
    command = [sys.executable, "-m", "baton.cli", "demo", "--model", str(small_model), "--prompts", "4"]
    command += ["--log-dir", str(tmp_path / "logs"), "--num-blocks", "256", "--connector", connector]
    environment = {**os.environ, "COLUMNS": "100"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 of 4 answers equal" in ended.stdout
    assert "3 prompts were loaded from the store" in ended.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [[], ["--mode", "push", "--stream", "chunk"], ["--mode", "push", "--stream", "layer"]],
    ids=["pull", "chunk", "layer"],
)
def test_three_engines_share_a_gpu_and_the_tokens_are_equal(
    small_model: Path, tmp_path: Path, options: list[str], dtype: str
) -> None:
    command = [sys.executable, "-m", "baton.cli", "demo", "--model", str(small_model), "--prompts", "6"]
    command += ["--log-dir", str(tmp_path / "logs"), "--device", "cuda", "--dtype", dtype, *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "6 of 6 answers equal" in ended.stdout


def test_a_demo_that_cannot_start_reports_the_reason_and_fails(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 512, "max_position_embeddings": 4096}')
    command = [sys.executable, "-m", "baton.cli", "demo", "--model", str(tmp_path)]
    command += ["--log-dir", str(tmp_path / "logs")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 1
    assert "ended with exit status" in ended.stderr
