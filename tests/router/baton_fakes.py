"""Fake engines that speak as Baton's servers do: introductions, first-token legs, streams of real chunks."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from baton.core.identity import KVIdentity
from tests.router.fakes import TICKET, Call, FakeEngine, System, opened, system

TOKENS = (72, 105, 33)  # "Hi!", of every engine.


@dataclass
class Speaker:
    """Answers with `tokens`, as P or as D according to the leg's params. An event can delay the answer."""

    tokens: Sequence[int] = TOKENS
    finish: str = "length"  # The finish_reason that comes with the last token.
    ends_with_first: bool = False
    lends: bool = True
    num_cached: int = 0  # Cached prompt tokens that P reports with its loan.
    usage: dict[str, Any] = field(default_factory=dict)  # Fields of `usage` besides the number of tokens.
    gate: asyncio.Event | None = None  # Holds back the whole answer.
    rest_gate: asyncio.Event | None = None  # Holds back all tokens after the first.
    dies_after: int | None = None  # Number of chunks after which the connection is cut.
    is_old: bool = False  # Whether the engine ignores given tokens of an answer.
    legs: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, call: Call) -> None:
        body = call.received.body
        params = body.get("kv_transfer_params") or {}
        self.legs.append(params)
        if self.gate is not None and not await opened(self.gate, call):
            return
        is_prefill = bool(params.get("do_remote_decode"))
        if body.get("stream"):
            await self._stream(call, body, params, is_prefill=is_prefill)
        else:
            await call.answer(200, self._whole(params, is_prefill=is_prefill))

    def _kept(self, params: dict[str, Any], *, is_prefill: bool) -> tuple[list[int], str | None, Any]:
        tokens = list(self.tokens[:1] if self.ends_with_first or is_prefill else self.tokens)
        ends = not is_prefill or self.ends_with_first or not params.get("baton_first_token")
        lent = {**TICKET, "baton_cached_tokens": self.num_cached} if self.num_cached else TICKET
        ticket = lent if is_prefill and self.lends and not self.ends_with_first else None
        return tokens, self.finish if ends else None, ticket

    def _whole(self, params: dict[str, Any], *, is_prefill: bool) -> dict[str, Any]:
        tokens, finish, ticket = self._kept(params, is_prefill=is_prefill)
        answer: dict[str, Any] = {"choices": [{"text": _text(tokens), "finish_reason": finish}]}
        if self.usage:
            answer["usage"] = {"completion_tokens": len(tokens), **self.usage}
        return answer if ticket is None else {**answer, "kv_transfer_params": ticket}

    async def _stream(
        self, call: Call, body: dict[str, Any], params: dict[str, Any], *, is_prefill: bool
    ) -> None:
        tokens, finish, ticket = self._kept(params, is_prefill=is_prefill)
        given = params.get("baton_output_token_ids", [])
        assert tokens[: len(given)] == given, "it is told to continue after other tokens than its own"
        headers = {"x_baton_given": str(len(given))} if given and not self.is_old else {}
        if kv := call.engine.card.get("kv_identity"):
            headers["x_baton_weights"] = KVIdentity(**kv).weights_id
        await call.start(200, "text/event-stream", x_engine=call.engine.introduces_as or "?", **headers)
        if "messages" in body and not given:
            await call.piece(event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
        for index, token in enumerate(tokens):
            if index == self.dies_after:
                return call.cut()
            if index < len(given) and not self.is_old:
                continue
            is_last = index + 1 == len(tokens)
            choice: dict[str, Any] = {"finish_reason": finish if is_last else None}
            if "messages" in body:
                choice["delta"] = {"content": _text([token])}
            else:
                choice["text"] = _text([token])
            names_ids = params.get("baton_token_ids") or (index == 0 and params.get("baton_first_token"))
            if body.get("return_token_ids") or names_ids:
                choice["token_ids"] = [token]
            chunk: dict[str, Any] = {"choices": [choice]}
            if (body.get("stream_options") or {}).get("continuous_usage_stats"):
                chunk["usage"] = {"completion_tokens": index + 1}
            if is_last and ticket is not None:
                chunk["kv_transfer_params"] = ticket
            await call.piece(event(chunk))
            if index == 0 and self.rest_gate is not None and not await opened(self.rest_gate, call):
                return None
        if len(tokens) == self.dies_after:
            return call.cut()
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"completion_tokens": len(tokens), **self.usage}
            await call.piece(event({"choices": [], "usage": usage}))
        await call.piece(b"data: [DONE]\n\n", more=False)
        return None


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _text(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def baton(name: str, **fields: Any) -> FakeEngine:
    return FakeEngine(Speaker(**fields), introduces_as=name)


def speaker(engine: FakeEngine) -> Speaker:
    assert isinstance(engine.respond, Speaker)
    return engine.respond


@asynccontextmanager
async def introduced_system(*engines: Any, **options: Any) -> AsyncIterator[System]:
    """`system` whose router knows all its engines."""
    async with system(*engines, **options) as s:
        await introduced(s)
        yield s


async def introduced(s: System) -> None:
    """Wait until the router has asked all engines what they are."""
    while any(not engine.is_introduced for engine in s.router.fleet.engines):
        await s.client.get("/fleet")


@dataclass
class Streamed:
    status: int
    headers: httpx.Headers
    events: list[Any]  # The last one is "[DONE]".

    @property
    def text(self) -> str:
        choices = [choice for e in self.events[:-1] for choice in e.get("choices", ())]
        return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)

    @property
    def error(self) -> str | None:
        errors = [e["error"]["message"] for e in self.events[:-1] if "error" in e]
        return errors[0] if errors else None


async def stream(
    s: System, path: str = "/v1/completions", *, shown: asyncio.Event | None = None, **body: Any
) -> Streamed:
    """One streamed answer, whole; `shown` is set once its first event is there."""
    asked = {"prompt": "hello", "stream": True, "max_tokens": 3, **body}
    text = ""
    async with s.client.stream("POST", path, json=asked) as answer:
        async for piece in answer.aiter_text():
            text += piece
            if shown is not None and "\n\n" in text:
                shown.set()
    if answer.status_code != 200:
        return Streamed(answer.status_code, answer.headers, [json.loads(text), "[DONE]"])
    found = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return Streamed(200, answer.headers, [e if e == "[DONE]" else json.loads(e) for e in found])
