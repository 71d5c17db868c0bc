"""A real `baton route` and fake engines that report what a page must survive and show."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from baton.cli.processes import free_ports
from tests.router.fakes import TICKET, Servers

START_S = 120.0
HELD = "held"  # The prompt of a stream that pauses after its first event.
HOSTILE = '<img src=x onerror="document.title=1">'
EVENTS = [
    b'data: {"id": "c", "choices": [{"index": 0, "text": "a", "token_ids": [1]}]}\n\n',
    b'data: {"id": "c", "choices": [{"index": 0, "text": "b", "finish_reason": "length"}]}\n\n',
    b"data: [DONE]\n\n",
]
METRICS = """baton:kv_cache_usage_perc{{engine="0"}} 0.62
baton:kv_offload_usage{{engine="0"}} 0.31
baton:storage_bytes{{engine="0"}} 4200000000
baton:prefix_cache_queries_total{{engine="0"}} {looked_up}
baton:prefix_cache_hits_total{{engine="0"}} {hit}
"""
PEER = """baton:kv_peer_bytes_total{{engine="0",peer="{peer}"}} {moved}
baton:kv_peer_transfers_total{{engine="0",peer="{peer}"}} {transfers}
baton:kv_peer_wire_seconds_total{{engine="0",peer="{peer}"}} {wire_s}
"""


class FakeEngine:
    """Answers at once; its counters grow with every reading."""

    def __init__(self, name: str, *, producers: tuple[str, ...] = ()) -> None:
        """`producers`: engine ids from which it gets KV. Without any it prefills."""
        self._name, self._producers = name, producers
        self._num_read = 0
        self._arrived_at_s: dict[str, float] = {}
        self.url = ""
        self.goes_on = asyncio.Event()  # Set when held streams may go on.

    def _metrics(self) -> str:
        self._num_read += 1
        n = self._num_read
        text = METRICS.format(looked_up=1000 * n, hit=600 * n)
        for number, peer in enumerate(self._producers):
            moved = (number + 2) * 9_000_000 * n
            text += PEER.format(peer=peer, moved=moved, transfers=5 * n, wire_s=0.03 * n)
        return text

    def _timelines(self, request_id: str) -> dict[str, Any]:
        fetch = {
            "producer": "p0",
            "outcome": "delivered",
            "claimed_s": 0.001,
            "ready_s": 0.002,
            "allocated_s": 0.002,
            "started_s": 0.003,
            "read_s": 0.008,
            "ended_s": 0.009,
            "wire_s": 0.004,
            "tokens": 64,
            "bytes": 1_000_000,
            "descriptors": 4,
            "transport": HOSTILE,
        }
        one = {
            "id": request_id,
            "choice": 0,
            "arrived_at_s": self._arrived_at_s.get(request_id, 0.0),
            "admitted_s": 0.001,
            "scheduled_s": 0.01,
            "first_token_s": 0.02,
            "last_token_s": 0.03,
            "ended_s": 0.03,
            "output_tokens": 2,
            "fetch": fetch if self._producers else None,
            "loan": None
            if self._producers
            else {"outcome": "released", "lent_s": 0.02, "ended_s": 0.03, "blocks": 4},
        }
        return {"timelines": [one]}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path, body = scope["path"], b""
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self._arrived_at_s.setdefault(headers.get("x-request-id", ""), time.time())
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        status, kind, pieces = 200, b"application/json", [b"{}"]
        if path == "/metrics":
            kind, pieces = b"text/plain", [self._metrics().encode()]
        elif path == "/baton/introduction":
            card = {"engine_id": self._name, "introduction": None, "served_model_name": HOSTILE}
            pieces = [json.dumps(card).encode()]
        elif path.startswith("/baton/requests/"):
            pieces = [json.dumps(self._timelines(path.rpartition("/")[2])).encode()]
        elif path == "/v1/completions" and self._producers:
            kind, pieces = b"text/event-stream", EVENTS
        elif path == "/v1/completions":
            answer = {"id": "p", "choices": [{"text": "x"}], "kv_transfer_params": TICKET}
            pieces = [json.dumps(answer).encode()]
        elif path != "/health":
            status = 404
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            if kind == b"text/event-stream" and HELD.encode() in body:
                await self.goes_on.wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class RunningFleet:
    def __init__(self, url: str, engines: list[FakeEngine], loop: asyncio.AbstractEventLoop) -> None:
        """`loop`: the event loop of the engines."""
        self.url = url
        self.engines = engines
        self._loop = loop
        self.client = httpx.Client(base_url=url, timeout=START_S, trust_env=False, verify=False)

    def complete(self) -> None:
        answer = self.client.post("/v1/completions", json={"prompt": "hello", "stream": True})
        assert answer.status_code == 200, answer.text

    @contextmanager
    def running_request(self, request_id: str) -> Iterator[None]:
        """Run a request that has its first event, and gets the rest at the end of the block."""
        body = {"prompt": HELD, "stream": True}
        headers = {"X-Request-Id": request_id}
        with self.client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            yield
            for engine in self.engines:
                self._loop.call_soon_threadsafe(engine.goes_on.set)
            assert "data: [DONE]" in list(lines)

    def state_of(self, engine: FakeEngine) -> str:
        engines = self.client.get("/status").json()["engines"]
        return str(next(one["state"] for one in engines if one["url"] == engine.url))


@contextmanager
def running_fleet(key: str = "") -> Iterator[RunningFleet]:
    """Two prefill engines and two decode engines. `key`: the key that the router asks for."""
    engines = [FakeEngine("p0"), FakeEngine("p1")]
    engines += [FakeEngine(f"d{number}", producers=("p0", "p1")) for number in range(2)]
    loop, servers = asyncio.new_event_loop(), Servers()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        for engine in engines:
            engine.url = asyncio.run_coroutine_threadsafe(servers.start(engine), loop).result(START_S)
        command = [sys.executable, "-m", "baton.cli", "route", "--port", str(port := free_ports(1)[0])]
        for role, some in (("--prefill", engines[:2]), ("--decode", engines[2:])):
            for engine in some:
                command += [role, engine.url]
        command += ["--workers", "1", "--no-first-token"]
        environment = {**os.environ, **({"BATON_API_KEY": key} if key else {})}
        router = subprocess.Popen(command, cwd=Path(__file__).parents[2], env=environment)
        try:
            fleet = RunningFleet(f"http://127.0.0.1:{port}", engines, loop)
            if key:
                fleet.client.headers["authorization"] = f"Bearer {key}"
            with fleet.client:
                ends_at = time.monotonic() + START_S
                while time.monotonic() < ends_at and router.poll() is None:
                    with suppress(httpx.TransportError):
                        if fleet.client.get("/health").status_code == 200:
                            break
                yield fleet
        finally:
            router.kill()
            router.wait()
    finally:
        asyncio.run_coroutine_threadsafe(servers.stop(), loop).result(START_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
