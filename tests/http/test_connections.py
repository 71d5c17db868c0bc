"""Limits and deadlines of connections and bodies, at a real server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from baton.http.bodies import Bodies, ClientGone
from baton.http.connections import server_config
from baton.http.errors import ApiError
from baton.http.gate import Checks, send_error
from baton.http.settings import HttpSettings
from baton.http.workers import WorkerPool
from baton.router.shell.client_http import Incoming, Listener, Reply
from baton.router.shell.timers import TimerWheel
from tests.event_loop import until
from tests.server.fakes import QuietServer

SOON_S = 0.05  # A deadline that must pass.
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


class Server(QuietServer):
    """Answers each body with its length."""

    def __init__(self, settings: HttpSettings) -> None:
        self.workers = WorkerPool()
        self.bodies = Bodies(settings, self.workers)
        self.clients: list[asyncio.StreamWriter] = []
        super().__init__(server_config(self.app, settings, port=0, log_config=None, lifespan="off"))

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        try:
            async with self.bodies.read(headers, receive) as body:
                answer = str(len(body)).encode()
        except ApiError as error:
            await send_error(send, error)
            return
        except ClientGone:
            return
        start = {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-length", b"%d" % len(answer))],
        }
        await send(start)
        await send({"type": "http.response.body", "body": answer})

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        port = self.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        self.clients.append(writer)
        return reader, writer


class RouterServer(Listener):
    """The router's listener; answers each body with its length."""

    port = 0

    def __init__(self, settings: HttpSettings) -> None:
        self.workers = WorkerPool()
        self.clients: list[asyncio.StreamWriter] = []
        bodies = Bodies(settings, self.workers)
        super().__init__(
            self.answer, settings, Checks(), bodies, TimerWheel(asyncio.get_running_loop()), reads_in_s=SOON_S
        )

    def answer(self, incoming: Incoming, reply: Reply) -> None:
        assert isinstance(incoming.body, bytes)
        reply.whole(200, {}, str(len(incoming.body)).encode())

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.clients.append(writer)
        return reader, writer


async def leave(clients: list[asyncio.StreamWriter]) -> None:
    for client in clients:
        client.close()
        with suppress(ConnectionError):
            await client.wait_closed()


@asynccontextmanager
async def serving_engine(**settings: Any) -> AsyncIterator[Server]:
    server = Server(HttpSettings(**settings))
    task = asyncio.create_task(server.serve())
    await until(server.is_up.is_set)
    try:
        yield server
    finally:
        await leave(server.clients)
        server.should_exit = True
        server.force_exit = True
        await task
        server.workers.close()


@asynccontextmanager
async def serving_router(**settings: Any) -> AsyncIterator[RouterServer]:
    server = RouterServer(HttpSettings(**settings))
    server.port = await server.listen("127.0.0.1", 0)
    try:
        yield server
    finally:
        await leave(server.clients)
        await server.close(0)
        server.workers.close()


Serving = Callable[..., AbstractAsyncContextManager[Server | RouterServer]]


@pytest.fixture(params=[serving_engine, serving_router])
def serving(request: pytest.FixtureRequest) -> Serving:
    """The server of an engine, and the router's."""
    served: Serving = request.param
    return served


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Return what came before the server closed the connection."""
    received = bytearray()
    try:
        while chunk := await reader.read(1 << 16):
            received += chunk
    except ConnectionResetError:
        pass
    return bytes(received)


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nHos"])
async def test_a_connection_without_a_whole_request_is_closed(serving: Serving, sent: bytes) -> None:
    async with serving(header_s=SOON_S) as server:
        reader, writer = await server.connect()
        writer.write(sent)
        assert await ended(reader) == b""


async def test_a_second_request_has_a_deadline_too(serving: Serving) -> None:
    async with serving(header_s=SOON_S) as server:
        reader, writer = await server.connect()
        writer.write(HEAD + b"Content-Length: 2\r\n\r\n{}" + b"GET /")
        assert (await ended(reader)).endswith(b"2")


async def test_an_idle_connection_is_closed(serving: Serving) -> None:
    async with serving(idle_s=1) as server:
        reader, writer = await server.connect()
        writer.write(HEAD + b"Content-Length: 2\r\n\r\n{}")
        assert (await ended(reader)).endswith(b"2")


async def test_a_body_that_does_not_end_is_408(serving: Serving) -> None:
    async with serving(body_s=SOON_S) as server:
        reader, writer = await server.connect()
        writer.write(HEAD + b"Content-Length: 9\r\n\r\n{")
        assert (await ended(reader)).startswith(b"HTTP/1.1 408")
        assert server.bodies.held_bytes == 0


async def test_a_body_that_declares_too_much_is_413_before_it_arrives(serving: Serving) -> None:
    async with serving(max_body_bytes=10) as server:
        reader, writer = await server.connect()
        writer.write(HEAD + b"Content-Length: 11\r\n\r\n")
        assert (await ended(reader)).startswith(b"HTTP/1.1 413")


async def test_all_bodies_share_a_budget_that_is_returned(serving: Serving) -> None:
    async with serving(total_body_bytes=10) as server:
        _, first = await server.connect()
        first.write(HEAD + b"Content-Length: 8\r\n\r\n" + b"1234567")
        await until(lambda: server.bodies.held_bytes == 7)
        reader, second = await server.connect()
        second.write(HEAD + b"Content-Length: 5\r\nConnection: close\r\n\r\n12345")
        assert (await ended(reader)).startswith(b"HTTP/1.1 503")
        first.close()
        await until(lambda: server.bodies.held_bytes == 0)
        reader, third = await server.connect()
        third.write(HEAD + b"Content-Length: 5\r\nConnection: close\r\n\r\n12345")
        assert (await ended(reader)).startswith(b"HTTP/1.1 200")


async def test_beyond_the_limit_the_connection_that_waited_longest_is_closed(serving: Serving) -> None:
    async with serving(max_connections=16) as server:
        _, busy = await server.connect()
        busy.write(HEAD + b"Content-Length: 9\r\n\r\n{")
        await until(lambda: server.bodies.held_bytes > 0)
        idle = [await server.connect() for _ in range(16)]
        assert await ended(idle[0][0]) == b""
        reader, writer = idle[-1]
        writer.write(HEAD + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}")
        assert (await ended(reader)).endswith(b"2")
        assert not busy.transport.is_closing(), "a request in progress is not the first to be closed"
