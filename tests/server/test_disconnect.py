"""A client that goes away ends its engine requests, whatever they are doing."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from baton.server.app import build_app
from tests.server.fakes import WAIT_S, ScriptedEngine, service_around

Message = dict[str, Any]


async def leave_during(
    engine: ScriptedEngine, path: str, body: Message, is_time: asyncio.Event
) -> list[Message]:
    """Posts, and closes the connection at `is_time`. Returns what the server sent, once it has ended."""
    sent: list[Message] = []
    incoming = [{"type": "http.request", "body": msgspec.json.encode(body), "more_body": False}]

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await is_time.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(dict(message))

    scope: Message = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    with service_around(engine) as service:
        await build_app(service)(scope, receive, send)
    return sent


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await main()

    asyncio.run(bounded())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_leaving_during_prefill_aborts_every_sample(path: str, stream: bool) -> None:
    async def main() -> None:
        engine = ScriptedEngine(gate=asyncio.Event())
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "stream": stream, "n": 2}
        leaving = asyncio.Event()

        def watch() -> None:
            if len(engine.requests) == 2:
                leaving.set()
            else:
                asyncio.get_running_loop().call_soon(watch)

        watch()
        await leave_during(engine, path, body, leaving)
        assert sorted(engine.events) == ["0 aborted", "0 submitted", "1 aborted", "1 submitted"]

    run(main)


def test_leaving_in_the_middle_of_a_stream_aborts_it() -> None:
    async def main() -> None:
        leaving = asyncio.Event()
        engine = ScriptedEngine(gate=asyncio.Event())
        assert engine.gate is not None
        engine.gate.set()

        def answer(request: Any) -> str:
            return "a" * 150

        def watch() -> None:
            if engine.events.count("0 token") >= 3:
                assert engine.gate is not None
                engine.gate.clear()
                leaving.set()
            else:
                asyncio.get_running_loop().call_soon(watch)

        engine.answer = answer
        watch()
        sent = await leave_during(
            engine, "/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 150}, leaving
        )
        assert engine.events[-1] == "0 aborted"
        assert b"[DONE]" not in b"".join(message.get("body", b"") for message in sent)

    run(main)


def test_a_client_that_stays_is_answered() -> None:
    async def main() -> None:
        sent = await leave_during(ScriptedEngine(), "/v1/completions", {"prompt": "a"}, asyncio.Event())
        assert sent[0]["status"] == 200

    run(main)
