"""`baton serve` as a process: its ready line, and its end with its engine."""

import gc
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from baton.checkpoints.random_model import write_checkpoint
from baton.cli.serve import _announce
from baton.core.config import CacheConfig, EngineConfig
from tests.server.fakes import model_config

END_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def test_the_collector_never_visits_what_exists_when_the_server_is_ready() -> None:
    num_frozen = gc.get_freeze_count()
    config = EngineConfig(model_config=model_config(), cache_config=CacheConfig(num_gpu_blocks=2))
    try:
        _announce(config, "http://127.0.0.1:1")
        assert gc.get_freeze_count() > num_frozen
    finally:
        gc.unfreeze()  # Or other tests' garbage would never be collected.


def test_when_the_engine_process_is_killed_the_server_ends_with_status_1(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "toy", hidden=32, layers=2, heads=2, vocab=512, max_position=256)
    command = [sys.executable, "-m", "baton.cli", "serve", str(model), "--port", "0", "--num-blocks", "64"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            ready = r"baton: ready, serving toy at (http://127\.0\.0\.1:\d+)\n"
            [url] = re.fullmatch(ready, process.stdout.readline()).groups()  # type: ignore[union-attr]
            body = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "stream": True}
            with httpx.stream(
                "POST", f"{url}/v1/completions", json=body, timeout=END_S, trust_env=False
            ) as answer:
                events = answer.iter_lines()
                assert next(events).startswith("data: ")
                children = psutil.Process(process.pid).children()
                [core] = [child for child in children if child.name() == "baton-core"]
                os.kill(core.pid, signal.SIGKILL)
                last = [line for line in events if line]
            assert last[-1] == "data: [DONE]"
            # Unless all tokens had been on their way already.
            assert "engine_dead" in last[-2] or '"finish_reason":"length"' in last[-2]
            assert process.wait(END_S) == 1
        finally:
            process.kill()
