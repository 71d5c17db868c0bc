"""A server with few file descriptors, and clients that take more of them than it has."""

import resource
import socket
import subprocess
import sys
from contextlib import ExitStack

import httpx
import pytest

pytestmark = pytest.mark.processes

DESCRIPTORS = 128
CONNECTIONS = 400
WAIT_S = 60.0  # Far more than anything here takes.
SERVER = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
import logging, socket, uvicorn
from baton.http.connections import server_config
from baton.http.settings import HttpSettings

logging.basicConfig(level="INFO")

async def app(scope, receive, send):
    await send({{"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}})
    await send({{"type": "http.response.body", "body": b"ok"}})

listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
print(listener.getsockname()[1], flush=True)
config = server_config(app, HttpSettings(header_s=600), log_config=None, lifespan="off")
uvicorn.Server(config).run(sockets=[listener])
"""


def test_idle_connections_beyond_the_descriptors_leave_room_for_requests() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2 * CONNECTIONS:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * CONNECTIONS), hard))
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{SERVER}"]
    with (
        ExitStack() as stack,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server,
    ):
        stack.callback(server.kill)
        assert server.stdout is not None
        assert server.stderr is not None
        port = int(server.stdout.readline())
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S, trust_env=False) as client:
            for _ in range(CONNECTIONS):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(3):
                assert client.get("/", headers={"Connection": "close"}).text == "ok"
        server.kill()
        log = server.stderr.read()
        assert "more than 32 are open" in log
        assert len(log) < 10_000, "messages that repeat are left out"
