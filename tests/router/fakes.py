"""Real HTTP servers on the loopback that behave, or misbehave, as a test tells them to.

Only real servers show what matters to a router: connections that break or stall, and bytes as they come.
"""

import asyncio
import json
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import uvicorn

from baton.cli.processes import free_ports
from baton.http.settings import HttpSettings
from baton.router.processes.app import Router
from baton.router.values.settings import LegTimeouts, ProbeSettings, RouterSettings
from tests.event_loop import pass_time

JSON = {"Content-Type": "application/json"}
LATER_S = 600.0  # A deadline that passes only if a test lets it; see `event_loop.pass_time`.


class Servers:
    """Apps of real servers in this event loop, ended together.

    uvicorn's own `serve` takes the process's signals and looks ten times a second whether it should end.
    """

    def __init__(self) -> None:
        self._running: list[tuple[uvicorn.Server, socket.socket]] = []

    async def start(self, app: Any) -> str:
        """Serve the app and return its URL."""
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            app,
            log_level="critical",
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=10_000,  # Also when time jumps: idle connections stay as they are.
        )
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        self._running.append((server, listener))
        await server.startup(sockets=[listener])
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        """Shut the servers down as uvicorn's `shutdown` does, without its sleeps."""
        for server, listener in self._running:
            for accepting in server.servers:
                accepting.close()
            listener.close()
            for connection in list(server.server_state.connections):
                connection.shutdown()
        for server, _ in self._running:
            while server.server_state.connections or server.server_state.tasks:  # noqa: ASYNC110
                await asyncio.sleep(0)  # uvicorn offers nothing to wait for.
        for _ in range(5):
            await asyncio.sleep(0)  # A closed transport releases its socket some turns of the loop later.


@dataclass
class Received:
    path: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)


Respond = Callable[["Call"], Awaitable[None]]


@dataclass
class Call:
    """One request at a fake engine, to be answered by the test."""

    received: Received
    receive: Any
    send: Any
    engine: "FakeEngine"

    async def start(self, status: int, content_type: str, **headers: str) -> None:
        pairs = [(b"content-type", content_type.encode())]
        pairs += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": pairs})

    async def piece(self, piece: bytes, *, more: bool = True) -> None:
        await self.send({"type": "http.response.body", "body": piece, "more_body": more})

    async def answer(self, status: int, body: Any, **headers: str) -> None:
        await self.start(status, "application/json", **headers)
        await self.piece(json.dumps(body).encode(), more=False)

    async def stream(self, *events: bytes) -> None:
        await self.start(200, "text/event-stream")
        for event in events:
            await self.piece(event)
        await self.piece(b"", more=False)

    def cut(self) -> None:
        """Reset the connection, as the kernel does for a process that was killed."""
        self.receive.__self__.transport.abort()

    async def wait_disconnect(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.engine.saw_disconnect.set()


@dataclass
class FakeEngine:
    """`respond` is called for every request but those of the prober, which are answered by the fields.

    A request counts as received only if its sender stays until its body is complete. A push's decode leg is
    answered once its prefill leg is here, since a real D waits for P; either may come first.
    """

    respond: Respond
    health_status: int = 200
    introduces_as: str | None = None  # None: not an engine of Baton.
    is_vllm_of: int | None = None  # The max_model_len of a vLLM. None: not a vLLM.
    introduces_by_request: bool = False  # Whether `respond` answers what a router asks a vLLM's connector.
    models: Any = None  # Answer at /v1/models, in place of a vLLM's usual one.
    says_max_model_len: int | None = None  # The max_model_len of an engine of Baton.
    card: dict[str, Any] = field(default_factory=dict)  # Further fields of the introduction page.
    num_introductions: int = 0
    can_push: bool = True
    calls: list[Received] = field(default_factory=list)
    saw_disconnect: asyncio.Event = field(default_factory=asyncio.Event)
    was_called: asyncio.Event = field(default_factory=asyncio.Event)
    taken_back: list[Any] = field(default_factory=list)
    heard_of_loan: asyncio.Event = field(default_factory=asyncio.Event)
    is_stopped: bool = False  # Simulates SIGSTOP: the engine accepts connections and answers nothing.
    num_probes: int = 0
    page: Any = None  # An ASGI application that answers the router's own questions instead.
    url: str = ""
    # Events of prefill legs that have come, by transfer id. All engines of a system share them.
    prefills: defaultdict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        call = Call(Received(scope["path"], headers, body), receive, send, self)
        if self.page is not None and "x-request-id" not in headers:
            await self.page(scope, receive, send)
            return
        if scope["path"] == "/health":
            self.num_probes += 1
        if self.is_stopped:
            self.was_called.set()
            await call.wait_disconnect()
            return
        if scope["path"] == "/health":
            await call.answer(self.health_status, {})
            return
        if scope["path"] == "/baton/introduction":
            self.num_introductions += 1
            text = f"signed {self.num_introductions}" if self.can_push else None
            card = {
                "engine_id": self.introduces_as,
                "introduction": text,
                "kv_role": "kv_both",
                "max_model_len": self.says_max_model_len,
                **self.card,
            }
            await (call.answer(200, card) if self.introduces_as else call.answer(404, {}))
            return
        if scope["path"] == "/baton/take_back":
            self.taken_back.append(call.received.body)
            self.heard_of_loan.set()
            await call.answer(202, {})
            return
        if scope["path"] == "/v1/models" and "x-request-id" not in headers:  # The router itself asks.
            cards = {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": self.is_vllm_of}]}
            models = cards if self.models is None else self.models
            await (call.answer(200, models) if self.is_vllm_of else call.answer(404, {}))
            return
        if b'"baton_introduce":true' in body and not self.introduces_by_request:
            await call.answer(200, {"choices": [{"text": "x"}]})
            return
        self.calls.append(call.received)
        self.was_called.set()
        is_json = body.startswith(b"{")  # Else it is a form.
        params = (call.received.body.get("kv_transfer_params") if is_json else None) or {}
        if params.get("do_remote_decode"):
            self.prefills[params["transfer_id"]].set()
        if "baton_introduction" in params and not await opened(self.prefills[params["transfer_id"]], call):
            return
        await self.respond(call)


async def opened(gate: asyncio.Event, call: Call) -> bool:
    """Wait for the gate. False: the router has disconnected first."""
    opening, leaving = asyncio.ensure_future(gate.wait()), asyncio.ensure_future(call.wait_disconnect())
    try:
        await asyncio.wait((opening, leaving), return_when=asyncio.FIRST_COMPLETED)
        return opening.done()
    finally:
        opening.cancel()
        leaving.cancel()


TICKET = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill-0",
    "remote_block_ids": [[3, 1, 2]],
    "baton_ticket": "signed",
    "some_future_key": {"nested": [1, None]},
}


async def lends(call: Call) -> None:
    """A prefill engine as it should be."""
    await call.answer(200, {"id": "p", "choices": [{"text": "x"}], "kv_transfer_params": TICKET})


async def answers(call: Call) -> None:
    """A decode engine as it should be."""
    if call.received.raw and call.received.body.get("stream"):
        await call.stream(b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n")
    else:
        await call.answer(200, {"choices": [{"text": "answer"}]})


def responds(status: int, body: Any) -> Respond:
    async def respond(call: Call) -> None:
        await call.answer(status, body)

    return respond


async def hangs(call: Call) -> None:
    await call.wait_disconnect()


async def hangs_till_late(call: Call) -> None:
    """Hang for longer than a deadline of `LATER_S`."""
    pass_time(LATER_S)
    await call.wait_disconnect()


def after(event: asyncio.Event, respond: Respond) -> Respond:
    async def later(call: Call) -> None:
        if await opened(event, call):
            await respond(call)

    return later


async def dies(call: Call) -> None:
    """An engine that is killed before it answers."""
    call.cut()


async def breaks(call: Call) -> None:
    """An engine that is killed in the middle of its answer."""
    await call.start(200, "application/json", content_length="1000")
    await call.piece(b"{")
    call.cut()


def dead_url() -> str:
    """A URL at which no process listens."""
    return f"http://127.0.0.1:{free_ports(1)[0]}"


QUIET = ProbeSettings(every_s=3600, timeout_s=3600, down_every_s=3600)


@dataclass
class System:
    client: httpx.AsyncClient  # A client of the router.
    router: Router

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": "hello", **body})


@asynccontextmanager
async def system(
    prefill: list[FakeEngine | str], decode: list[FakeEngine | str], **settings: Any
) -> AsyncIterator[System]:
    """Fake engines and a real router in front of them. The prober asks once, then stays quiet.

    Deadlines that only a stalled machine would miss are long: for connections, and for answers to the prober.
    """
    servers = Servers()
    prefills: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
    try:
        urls = []
        for engine in (*prefill, *decode):
            if isinstance(engine, FakeEngine):
                engine.url, engine.prefills = await servers.start(engine), prefills
                urls.append(engine.url)
            else:
                urls.append(engine)
        settings.setdefault("decode_leg", "at_once")  # All fakes share a host.
        settings.setdefault("probe", QUIET)
        settings.setdefault("doors", HttpSettings(idle_s=1e4, header_s=1e4))  # Also when time jumps.
        timeouts, sources = settings.pop("timeouts", LegTimeouts()), settings.pop("sources", ())
        settings["timeouts"] = msgspec.structs.replace(timeouts, connect_s=2 * LATER_S)
        router = Router(
            RouterSettings(
                prefill_urls=tuple(urls[: len(prefill)]), decode_urls=tuple(urls[len(prefill) :]), **settings
            ),
            sources=sources,
        )
        try:
            router.start()
            url = f"http://127.0.0.1:{await router.listen('127.0.0.1', 0)}"
            # No TLS here, and loading the machine's certificates takes longer than most of these tests.
            async with httpx.AsyncClient(base_url=url, timeout=None, verify=False) as client:
                yield System(client, router)
        finally:
            await router.close()  # The router ends before the engines: it leaves those that do not answer.
    finally:
        await servers.stop()
