"""Clients that people use with vLLM, unchanged, with one engine and with a pair and its router.

They run in an environment of their own (`make test-clients`), and are not collected elsewhere. Baton's
processes run in `.venv`. The model is small and random, so answers mean nothing: each test compares the
pair's answer with the single engine's.
"""

import os
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = [] if find_spec("langchain_openai") else ["test_*.py"]

ROOT = Path(__file__).parents[2]
BATON = ROOT / ".venv" / "bin" / "baton"
START_S = 240.0
MAX_MODEL_LEN = 1024
NAME = "toy"


@dataclass(frozen=True)
class Place:
    url: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


@dataclass(frozen=True)
class Places:
    single: Place
    pair: Place

    def __iter__(self) -> Iterator[Place]:
        return iter((self.single, self.pair))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    subprocess.run(
        [BATON, "model", "new", folder, "--hidden", "64", "--layers", "2"], check=True, timeout=START_S
    )
    return folder


@pytest.fixture(scope="session")
def places(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    ports = [free_port() for _ in range(2)]
    common = ["--served-model-name", NAME, "--max-model-len", str(MAX_MODEL_LEN)]
    commands = [
        [BATON, "serve", model, "--port", str(ports[0]), *common],
        [BATON, "up", model, "--port", str(ports[1]), *common, "--log-dir", tmp_path_factory.mktemp("logs")],
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    children = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env)
        for command in commands
    ]
    try:
        wait_for(children[0], b"baton: ready")
        wait_for(children[1], b"Try it")
        yield Places(*(Place(f"http://127.0.0.1:{port}") for port in ports))
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait(START_S)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def wait_for(child: "subprocess.Popen[bytes]", text: bytes) -> None:
    """Read what it prints until it has printed the text."""
    assert child.stdout is not None
    printed, deadline_s = b"", time.monotonic() + START_S
    while text not in printed:
        readable, _, _ = select.select([child.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
        assert readable, f"not ready in time: {printed.decode()}"
        new = os.read(child.stdout.fileno(), 1 << 16)
        assert new, f"has ended: {printed.decode()}"
        printed += new
