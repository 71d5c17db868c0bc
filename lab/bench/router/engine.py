"""An engine that answers at once, so that what is measured is the router: `engine PORT` serves both roles.

It behaves like vLLM's OpenAI server as far as routers look: `/health`, `/v1/models`, completions whole and
streamed. A request with `max_tokens` 1 and `kv_transfer_params` is a prefill leg and gets a NIXL-shaped
ticket. `max_tokens` is the number of chunks; `user` says when they are written:

    ""          each in a turn of the event loop of its own
    "gap 4"     4 ms apart
    "hold"      the first one; the rest when the client closes the connection, i.e. never

With `return_token_ids` each chunk has its token id, and the first one those of the prompt, as vLLM's.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import NamedTuple, cast

import httptools
import msgspec
import uvloop

HOST = "127.0.0.1"
MODEL = "fake"
TICKET = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(64))],
    "remote_engine_id": "00000000-0000-0000-0000-000000000000",
    "remote_request_id": "cmpl-0",
    "remote_host": HOST,
    "remote_port": 5600,
    "tp_size": 1,
}
COMPLETION = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": MODEL}
CHOICE = {"index": 0, "text": " token", "logprobs": None, "finish_reason": None}
USAGE = {"prompt_tokens": 1024, "completion_tokens": 16, "total_tokens": 1040}
PROMPT_TOKEN_IDS = list(range(1024))


def event(**choice: object) -> bytes:
    chunk = {**COMPLETION, "choices": [{**CHOICE, **choice}]}
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


class Events(NamedTuple):
    first: bytes
    next: bytes
    last: bytes


PLAIN = Events(event(), event(), event(finish_reason="length"))
WITH_IDS = Events(
    event(prompt_token_ids=PROMPT_TOKEN_IDS, token_ids=[5]),
    event(prompt_token_ids=None, token_ids=[5]),
    event(prompt_token_ids=None, token_ids=[5], finish_reason="length"),
)
DONE = b"data: [DONE]\n\n"


class Body(msgspec.Struct):
    max_tokens: int = 16
    stream: bool = False
    user: str = ""
    return_token_ids: bool = False
    kv_transfer_params: dict[str, object] | None = None


BODY = msgspec.json.Decoder(Body)


def whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def completion(text: str, **fields: object) -> bytes:
    choice = {**CHOICE, "text": text, "finish_reason": "length"}
    return whole(json.dumps({**COMPLETION, "choices": [choice], "usage": USAGE, **fields}).encode())


MODELS = whole(
    json.dumps(
        {
            "object": "list",
            "data": [{"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": 8192}],
        }
    ).encode()
)
HEALTHY = whole(b"{}")
UNKNOWN = whole(b'{"detail":"Not Found"}', b"404 Not Found")
PREFILLED = completion(" token", kv_transfer_params=TICKET)
ANSWER = completion(" token" * 16)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


class Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body = bytearray()
        self._transport: asyncio.Transport | None = None
        self._later: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._later is not None:
            self._later.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url.partition(b"?")[0]
        self._body.clear()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._transport is None:
            return
        match self._path:
            case b"/v1/completions" | b"/v1/chat/completions":
                self._complete(self._transport, BODY.decode(self._body))
            case b"/v1/models":
                self._transport.write(MODELS)
            case b"/health" | b"/v1/traces":  # The engine is a collector as well.
                self._transport.write(HEALTHY)
            case _:
                self._transport.write(UNKNOWN)

    def _complete(self, transport: asyncio.Transport, body: Body) -> None:
        if body.stream:
            events = WITH_IDS if body.return_token_ids else PLAIN
            transport.write(STREAM_HEAD + chunk(events.first))
            if body.user != "hold":
                gap_s = float(body.user.removeprefix("gap ") or 0) / 1e3
                self._stream(transport, events, body.max_tokens - 1, gap_s)
        elif body.max_tokens == 1 and body.kv_transfer_params is not None:
            transport.write(PREFILLED)
        else:
            transport.write(ANSWER)

    def _stream(self, transport: asyncio.Transport, events: Events, num_left: int, gap_s: float) -> None:
        loop = asyncio.get_running_loop()
        later: Callable[[Callable[[], None]], asyncio.Handle] = (
            (lambda write: loop.call_later(gap_s, write)) if gap_s else loop.call_soon
        )

        def write() -> None:
            nonlocal num_left
            num_left -= 1
            if num_left:
                transport.write(chunk(events.next))
                self._later = later(write)
            else:
                transport.write(chunk(events.last) + chunk(DONE) + b"0\r\n\r\n")

        self._later = later(write)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Connection, HOST, port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
