"""Fake engines that answer /v1/messages and /v1/responses as vLLM does, and their transcripts."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.router.fakes import TICKET, Call, FakeEngine, opened

TEXTS = ("Hel", "lo", "!")
PATHS = ("/v1/messages", "/v1/responses")
_ASKED = {"model": "m", "unknown": {"a": [1.5, None]}}
_TURN = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
ASKS: dict[str, dict[str, Any]] = {
    "/v1/messages": {**_ASKED, "system": "You are kind.", "messages": [_TURN], "max_tokens": 20},
    "/v1/responses": {**_ASKED, "instructions": "Be kind.", "input": [_TURN], "max_output_tokens": 20},
}


def named(value: dict[str, Any]) -> bytes:
    return f"event: {value['type']}\ndata: {json.dumps(value)}\n\n".encode()


def message_events(texts: Sequence[str] = TEXTS, arguments: Sequence[str] = ()) -> list[bytes]:
    """A message with a block of text, and a call of a tool if there are `arguments`."""
    message = {"id": "1", "type": "message", "role": "assistant", "content": [], "model": "m"}
    found: list[dict[str, Any]] = [{"type": "message_start", "message": message}]
    text: dict[str, Any] = {"type": "text", "text": ""}
    blocks = [(text, "text_delta", "text", texts)]
    if arguments:
        call = {"type": "tool_use", "id": "t", "name": "open", "input": {}}
        blocks.append((call, "input_json_delta", "partial_json", arguments))
    for index, (block, kind, name, parts) in enumerate(blocks):
        found.append({"type": "content_block_start", "index": index, "content_block": block})
        for part in parts:
            delta = {"type": kind, name: part}
            found.append({"type": "content_block_delta", "index": index, "delta": delta})
        found.append({"type": "content_block_stop", "index": index})
    reason = "tool_use" if arguments else "end_turn"
    found.append({"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 3}})
    return [named(value) for value in (*found, {"type": "message_stop"})]


def response_events(
    texts: Sequence[str] = TEXTS, arguments: Sequence[str] = (), params: Any = None
) -> list[bytes]:
    """A response with a message, and a call of a tool if there are `arguments`."""
    response = {"id": "resp_1", "object": "response", "model": "m", "kv_transfer_params": None}
    kinds = [("message", "response.output_text", texts)]
    if arguments:
        kinds.append(("function_call", "response.function_call_arguments", arguments))
    found: list[dict[str, Any]] = [
        {"type": "response.created", "response": response},
        {"type": "response.in_progress", "response": response},
    ]
    for index, (item, kind, parts) in enumerate(kinds):
        found.append({"type": "response.output_item.added", "output_index": index, "item": {"type": item}})
        found += [{"type": f"{kind}.delta", "output_index": index, "delta": part} for part in parts]
        found.append({"type": f"{kind}.done", "output_index": index})
        found.append({"type": "response.output_item.done", "output_index": index, "item": {"type": item}})
    ended = {**response, "status": "completed", "kv_transfer_params": params}
    found.append({"type": "response.completed", "response": ended})
    return [named({**value, "sequence_number": number}) for number, value in enumerate(found)]


EVENTS = {"/v1/messages": message_events, "/v1/responses": response_events}
_ANSWER = {"content": [{"text": "Hello!"}], "usage": {"input_tokens": 30, "output_tokens": 3}}
WHOLE: dict[str, dict[str, Any]] = {
    "/v1/messages": {"id": "1", "type": "message", **_ANSWER},
    "/v1/responses": {"id": "resp_1", "status": "completed", "output": [_ANSWER]},
}


def text_of(stream: bytes) -> str:
    """The text of a stream of one of the dialects."""
    text = ""
    for event in stream.split(b"\n\n"):
        if b"_delta" in event or b"_text.delta" in event:
            delta = json.loads(event.partition(b"data: ")[2])["delta"]
            text += delta if isinstance(delta, str) else delta.get("text", "")
    return text


@dataclass
class DialectSpeaker:
    """An engine of both roles. It lends what a prefill leg asks for, and answers other legs."""

    events: Sequence[bytes] = ()  # The streams of this engine; empty: `EVENTS`.
    dies_after: int | None = None  # Events after which the connection is cut.
    waits_after: int | None = None  # Events after which it waits for `gate`.
    keeps: Any = None  # Params in an answer, as D has them for turns.
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    legs: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, call: Call) -> None:
        path, body = call.received.path, call.received.body
        params = body.get("kv_transfer_params") or {}
        if (ticket := params.get("baton_take_back")) is not None:
            call.engine.taken_back.append(ticket)
            call.engine.heard_of_loan.set()
            return await call.answer(200, {"choices": []})
        self.legs.append(body)
        lent = TICKET if params.get("do_remote_decode") else self.keeps
        if not body.get("stream"):
            return await call.answer(200, {**WHOLE[path], "kv_transfer_params": lent})
        events = self.events or EVENTS[path]()
        await call.start(200, "text/event-stream; charset=utf-8")
        for number, event in enumerate(events):
            if number == self.dies_after:
                return call.cut()
            if number == self.waits_after and not await opened(self.gate, call):
                return None
            await call.piece(event[:9])  # The cut is in the name of the event.
            await call.piece(event[9:])
        return await call.piece(b"", more=False)


def dialect_engine(**fields: Any) -> FakeEngine:
    return FakeEngine(DialectSpeaker(**fields), is_vllm_of=4096)


def legs_of(engine: FakeEngine) -> list[dict[str, Any]]:
    assert isinstance(engine.respond, DialectSpeaker)
    return engine.respond.legs
