"""`baton demo` with fewer prompts: real engines, real bytes, equal tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.usefixtures("forked_programs")]

TIMEOUT_S = 240.0


def demo(model: Path | None, logs: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    of_model = ["--model", str(model)] if model is not None else []
    command = [sys.executable, "-m", "baton.cli", "demo", *of_model, "--log-dir", str(logs)]
    # Settings of `baton serve` must not change the demo.
    environment = {**os.environ, "BATON_BLOCK_SIZE": "4", "COLUMNS": "100"}
    return subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=TIMEOUT_S, env=environment
    )


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize(
    ("options", "expected_lines"),
    [
        (
            ["--prompts", "6", "--mode", "push", "--stream", "layer", "--prefill-block-size", "16"],
            ["6 of 6 answers equal", "below one block", "sent again", "Next:"],
        ),
        # The multi connector pulls, and contains offload, which needs no test of its own here.
        (
            ["--prompts", "4", "--connector", "multi"],
            ["4 of 4 answers equal", "3 prompts were loaded from the store"],
        ),
    ],
    ids=["push", "multi"],
)
def test_the_demo_moves_kv_and_the_tokens_are_equal(
    model: Path, tmp_path: Path, options: list[str], expected_lines: list[str]
) -> None:
    ended = demo(model, tmp_path / "logs", "--num-blocks", "256", *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [line for line in expected_lines if line not in ended.stdout] == []


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_answers_are_those_of_the_weights_through_a_rolling_update(tmp_path: Path) -> None:
    options = ["--update-weights", "--cache-dir", str(tmp_path), "--prompts", "4", "--num-blocks", "256"]
    ended = demo(None, tmp_path / "logs", *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("4 of 4") == 4
    assert "8 of 8" in ended.stdout


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_a_family_can_be_chosen_and_its_model_is_kept(tmp_path: Path) -> None:
    options = ["--family", "deepseek-v3", "--cache-dir", str(tmp_path), "--prompts", "4"]
    options += ["--connector", "tiered"]
    ended = demo(None, tmp_path / "logs", "--num-blocks", "256", *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 of 4 answers equal" in ended.stdout
    assert "3 prompts were loaded from the store" in ended.stdout
    (config,) = tmp_path.glob("*/config.json")
    assert json.loads(config.read_text())["model_type"] == "deepseek_v3"


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
    model: Path, tmp_path: Path, options: list[str], dtype: str
) -> None:
    on_gpu = ("--device", "cuda", "--dtype", dtype)
    ended = demo(model, tmp_path / "logs", "--prompts", "6", *on_gpu, *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "6 of 6 answers equal" in ended.stdout


def test_a_demo_that_cannot_start_reports_the_reason_and_fails(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 512, "max_position_embeddings": 4096}')
    ended = demo(tmp_path, tmp_path / "logs")
    assert ended.returncode == 1
    assert "ended with exit status" in ended.stderr
