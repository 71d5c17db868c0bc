"""A client that disconnects ends its engine requests in any state."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from baton.engine.api import EngineOutput
from baton.server.app import build_app
from tests.server.fakes import ScriptedEngine, service_around

Message = dict[str, Any]


async def leave_during(
    engine: ScriptedEngine, path: str, body: Message | None, is_time: asyncio.Event
) -> list[Message]:
    """Posts, and closes the connection at `is_time`. Returns what the server sent, once it has ended.

    `body`: None for half a body.
    """
    sent: list[Message] = []
    whole = msgspec.json.encode(body) if body is not None else b"{"
    incoming = [{"type": "http.request", "body": whole, "more_body": body is None}]

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


def when(is_so: Callable[[], bool], event: asyncio.Event) -> None:
    """Set the event in the loop iteration in which the condition holds."""
    if is_so():
        event.set()
    else:
        asyncio.get_running_loop().call_soon(when, is_so, event)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_leaving_during_prefill_aborts_every_sample(path: str, stream: bool) -> None:
    engine = ScriptedEngine(gate=asyncio.Event())
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "stream": stream, "n": 2}
    leaving = asyncio.Event()
    when(lambda: len(engine.requests) == 2, leaving)
    await leave_during(engine, path, body, leaving)
    assert sorted(engine.events) == ["0 aborted", "0 submitted", "1 aborted", "1 submitted"]


async def test_leaving_in_the_middle_of_a_stream_aborts_it() -> None:
    gate, leaving = asyncio.Event(), asyncio.Event()
    gate.set()
    engine = ScriptedEngine(answer="a" * 150, gate=gate)

    def has_begun() -> bool:
        if engine.events.count("0 token") >= 3:
            gate.clear()
        return not gate.is_set()

    when(has_begun, leaving)
    body = {"prompt": "a", "stream": True, "max_tokens": 150}
    sent = await leave_during(engine, "/v1/completions", body, leaving)
    assert engine.events[-1] == "0 aborted"
    assert b"[DONE]" not in b"".join(message.get("body", b"") for message in sent)


async def test_a_client_that_stays_is_answered() -> None:
    sent = await leave_during(ScriptedEngine(), "/v1/completions", {"prompt": "a"}, asyncio.Event())
    assert sent[0]["status"] == 200


LENT = {"baton_ticket": "signed"}
LENDING = {"prompt": "a", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_turns", range(12))
async def test_a_client_that_leaves_around_the_last_output_leaves_no_loan(
    stream: bool, num_turns: int
) -> None:
    """The loan is taken back, or the answer with its ticket has been sent, in any iteration of the loop."""
    engine = ScriptedEngine(transfer_params=LENT)
    leaving, turns = asyncio.Event(), iter(range(num_turns))
    when(lambda: bool(engine.requests) and next(turns, None) is None, leaving)
    sent = await leave_during(engine, "/v1/completions", {**LENDING, "stream": stream}, leaving)
    was_sent = b"signed" in b"".join(message.get("body", b"") for message in sent)
    has_begun = "0 token" in engine.events
    assert engine.taken_back == ([LENT] if has_begun and not was_sent else [])


async def test_a_loan_is_returned_if_its_ticket_was_in_an_error() -> None:
    engine = ScriptedEngine(
        failure=EngineOutput(request_id="", new_token_ids=[], finish_reason="abort", kv_transfer_params=LENT)
    )
    sent = await leave_during(engine, "/v1/completions", LENDING, asyncio.Event())
    assert sent[0]["status"] == 503
    assert engine.taken_back == [LENT]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/baton/take_back"])
async def test_a_client_that_leaves_in_its_body_is_a_line_at_debug(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "baton")
    left = asyncio.Event()
    left.set()
    await leave_during(ScriptedEngine(), path, None, left)
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("DEBUG", None)]
    assert "the client has gone" in caplog.text
