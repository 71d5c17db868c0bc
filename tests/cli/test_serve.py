"""`baton serve` as a process: ready line, answers, and how it ends."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from baton.engine.checkpoints.random_model import write_checkpoint

START_S = 120.0  # The machine may be busy.
END_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("model") / "toy", hidden=32, layers=2, heads=2, vocab=512, max_position=256
    )


def wait_ready(process: "subprocess.Popen[str]") -> str:
    """The URL of the ready line."""
    assert process.stdout is not None
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if select.select([process.stdout], [], [], deadline_s - time.monotonic())[0]:
            line = process.stdout.readline()
            if found := re.fullmatch(r"baton: ready, serving toy at (http://127\.0\.0\.1:\d+)\n", line):
                return found[1]
            assert line, "the server ended before it was ready"
    raise AssertionError("the server was not ready in time")


@contextmanager
def serving(model: Path, tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    command = [sys.executable, "-m", "baton.cli", "serve", str(model), "--port", "0", "--num-blocks", "64"]
    with (
        (tmp_path / "log").open("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            yield process, wait_ready(process)
        finally:
            for child in (
                psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            ):
                child.kill()
            process.kill()


def core_of(process: "subprocess.Popen[str]") -> psutil.Process:
    children = psutil.Process(process.pid).children()
    [core] = [child for child in children if child.name() == "baton-core"]
    return core


def test_it_answers_and_a_signal_ends_it_and_its_engine_with_status_0(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as (process, url):
        core = core_of(process)
        body = {"prompt": "Hello", "max_tokens": 6, "temperature": 0, "return_token_ids": True}
        with httpx.Client(base_url=url, timeout=END_S, trust_env=False) as client:
            first, second = (client.post("/v1/completions", json=body).json() for _ in range(2))
            assert first["choices"] == second["choices"]
            assert len(first["choices"][0]["token_ids"]) <= 6
            assert client.get("/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0
        assert not core.is_running()


def test_when_the_engine_process_is_killed_the_server_ends_with_status_1(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as (process, url):
        with httpx.stream(
            "POST",
            f"{url}/v1/completions",
            json={"prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "stream": True},
            timeout=END_S,
            trust_env=False,
        ) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(core_of(process).pid, signal.SIGKILL)
            last = [line for line in lines if line]
        assert last[-1] == "data: [DONE]"
        # Unless all tokens had been on their way already.
        assert "engine_dead" in last[-2] or '"finish_reason":"length"' in last[-2]
        assert process.wait(END_S) == 1
