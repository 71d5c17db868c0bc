"""A client with a fixed number of connections, each with one request at a time.

A process of its own: it reads one `Job` per line and writes one `Result` per line.
"""

import asyncio
import random
import ssl
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import cast

import httptools
import msgspec
import uvloop

from lab.bench.router.jobs import Job, Result

WAIT_S = 60.0
NO_HEADERS: Mapping[str, str] = {}


class Connection(asyncio.Protocol):
    """One request at a time; `answered` is done with the body."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.answered: asyncio.Future[tuple[int, bytes]] | None = None
        self.begun: asyncio.Future[float] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self.begun, self.answered):
            if future is not None and not future.done():
                future.set_exception(exc or ConnectionResetError("closed by the server"))
                future.exception()  # Retrieved: only one of the two is awaited.

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body.clear()

    def on_body(self, body: bytes) -> None:
        if self.begun is not None and not self.begun.done():
            self.begun.set_result(time.perf_counter())
        self._body += body

    def on_message_complete(self) -> None:
        assert self.answered is not None
        self.answered.set_result((self._parser.get_status_code(), bytes(self._body)))
        self._parser = httptools.HttpResponseParser(self)

    async def send(
        self, port: int, body: bytes, headers: Mapping[str, str] = NO_HEADERS
    ) -> tuple[float, int, bytes]:
        """Return the time of the first byte of the answer's body, its status, and the body."""
        loop = asyncio.get_running_loop()
        self.begun, self.answered = loop.create_future(), loop.create_future()
        assert self.transport is not None
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = (
            "POST /v1/completions HTTP/1.1\r\n"
            f"host: 127.0.0.1:{port}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{more}\r\n"
        )
        self.transport.write(head.encode() + body)
        async with asyncio.timeout(WAIT_S):
            status, answer = await self.answered
        return self.begun.result(), status, answer


async def connect(port: int, tls: ssl.SSLContext | None = None) -> Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(Connection, "127.0.0.1", port, ssl=tls)
    return connection


async def run(job: Job) -> Result:
    result = Result([], [], 0.0, 0)
    left = deque(range(job.num_requests))
    began_s = time.perf_counter()
    tls = ssl.create_default_context(cafile=job.ca) if job.ca else None

    async def client(number: int) -> None:
        rng = random.Random(number)
        first = await connect(job.url_port, tls)
        second = await connect(job.decode_port) if job.decode_port else first
        while left:
            left.pop()
            if job.pause_s:
                await asyncio.sleep(rng.uniform(0, job.pause_s))
            started_s = time.perf_counter()
            body = job.body.encode()
            if job.decode_port:
                body = await prefill(first, job, body)
            port = job.decode_port or job.url_port
            try:
                begun_s, status, answer = await second.send(port, body, job.headers)
                is_good = status == 200 and answer.count(b"data: ") == job.num_events
            except (OSError, TimeoutError):
                is_good, begun_s = False, time.perf_counter()
                second = await connect(port, tls)
            result.num_bad += not is_good
            result.first_s.append(begun_s - started_s)
            result.total_s.append(time.perf_counter() - started_s)

    await asyncio.gather(*(client(number) for number in range(job.num_at_once)))
    result.wall_s = time.perf_counter() - began_s
    return result


async def prefill(connection: Connection, job: Job, body: bytes) -> bytes:
    """Send the prefill leg as a router does. Return the body of the decode leg."""
    fields = msgspec.json.decode(body)
    leg = {**fields, "stream": False, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    _, _, answer = await connection.send(job.url_port, msgspec.json.encode(leg))
    return msgspec.json.encode(
        {**fields, "kv_transfer_params": msgspec.json.decode(answer)["kv_transfer_params"]}
    )


async def hold(job: Job) -> Result:
    """Open `num_at_once` streams, and keep them open; the parent process measures meanwhile."""
    connections: list[Connection] = []
    running: list[asyncio.Task[tuple[float, int, bytes]]] = []
    num_bad = 0
    for _ in range(job.num_at_once):
        connection = await connect(job.url_port)
        sending = asyncio.create_task(connection.send(job.url_port, job.body.encode()))
        running.append(sending)
        await asyncio.sleep(0)  # The task sends.
        assert connection.begun is not None
        try:
            async with asyncio.timeout(WAIT_S):
                await asyncio.shield(connection.begun)
        except (OSError, TimeoutError):
            num_bad += 1
        connections.append(connection)
    print("holding", flush=True)
    await asyncio.sleep(job.hold_s)
    for connection in connections:
        assert connection.transport is not None
        connection.transport.abort()
    await asyncio.gather(*running, return_exceptions=True)
    return Result([], [], 0.0, num_bad)


def main() -> None:
    for line in sys.stdin:
        job = msgspec.json.decode(line, type=Job)
        result = uvloop.run(hold(job) if job.hold_s else run(job))
        with open(sys.stdout.fileno(), "wb", closefd=False) as out:  # PYTHONUNBUFFERED's would write a part.
            out.write(msgspec.json.encode(result) + b"\n")


if __name__ == "__main__":
    main()
