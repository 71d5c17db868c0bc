"""A fake engine that speaks as vLLM's server does: no introduction, whole answers with ids, streams without.

Its model: a prompt is answered with `tokens`, less those at the end of the prompt; so an engine
that is asked to continue after a token gives the rest.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.router.baton_fakes import event
from tests.router.fakes import TICKET, Call, FakeEngine, Respond, opened, responds

PROMPT = "hello"
TOKENS = (72, 105, 33)  # "Hi!", of every engine.
EOS = 0


@dataclass
class VllmSpeaker:
    tokens: Sequence[int] = TOKENS
    stops: bool = False  # Whether EOS follows the last token.
    lends: bool = True
    lends_always: bool = False  # Whether it lends even if the first token ends the answer.
    introduces: bool = False  # Whether the router's request for an introduction is answered with one.
    gate: asyncio.Event | None = None  # Holds back the whole answer.
    rest_gate: asyncio.Event | None = None  # Holds back everything after the first event.
    hurries: bool = False  # Whether the first event has two tokens.
    dies_after: int | None = None  # Number of events with tokens after which the connection is cut.
    says: dict[int, str] = field(default_factory=dict)  # Texts of tokens that do not stand for characters.
    message: dict[str, Any] = field(default_factory=dict)  # Further fields of a chat's whole message.
    keeps: dict[str, Any] | None = None  # Params with a stream's last event, as Baton's D has them for turns.
    legs: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, call: Call) -> None:
        body = call.received.body
        params = body.get("kv_transfer_params") or {}
        if "baton_introduce" in params:
            card = {"remote_engine_id": "v", "baton_introduction": f"signed {len(self.legs)}"}
            await call.answer(200, {"choices": [], "kv_transfer_params": card if self.introduces else None})
            return
        if (ticket := params.get("baton_take_back")) is not None:
            call.engine.taken_back.append(ticket)
            await call.answer(200, {"choices": []})
            return
        self.legs.append(body)
        if self.gate is not None and not await opened(self.gate, call):
            return
        prompt = (
            params.get("prompt_token_ids")
            or body.get("prompt")
            or "".join(message["content"] for message in body["messages"])
        )
        ids = list(map(ord, prompt)) if isinstance(prompt, str) else list(prompt)
        output = params.get("baton_output_token_ids", [])  # Only an engine of Baton gets these.
        given = [*ids[len(PROMPT) :], *output]
        assert given == list(self.tokens[: len(given)]), (
            "it is told to continue after another token than its own"
        )
        left = list(self.tokens[len(given) :]) + ([EOS] if self.stops else [])
        limit = (body.get("max_completion_tokens") or body.get("max_tokens", 16)) - len(output)
        given = left[:limit]
        reason = "stop" if given[-1] == EOS else "length"
        answer = self._stream if body.get("stream") else self._whole
        await answer(call, body, ids, given, reason)

    def _text(self, token: int) -> str:
        return self.says.get(token, "" if token == EOS else chr(token))

    async def _whole(
        self, call: Call, body: dict[str, Any], ids: list[int], given: list[int], reason: str
    ) -> None:
        text = "".join(map(self._text, given))
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "stop_reason": None}
        answer: dict[str, Any] = {"id": "cmpl-1", "created": 5, "model": "m", "usage": _usage(ids, given)}
        wants_ids = body.get("return_token_ids")
        if "messages" in body:
            choice["message"] = {"role": "assistant", "content": text, **self.message}
            answer["prompt_token_ids"] = ids if wants_ids else None
        else:
            choice |= {"text": text, "prompt_token_ids": ids if wants_ids else None}
        choice["token_ids"] = given if wants_ids else None
        params = body.get("kv_transfer_params") or {}
        lends = self.lends and (reason == "length" or self.lends_always)
        lent = TICKET if params.get("do_remote_decode") and lends else None
        await call.answer(200, {**answer, "choices": [choice], "kv_transfer_params": lent})

    async def _stream(
        self, call: Call, body: dict[str, Any], ids: list[int], given: list[int], reason: str
    ) -> None:
        head = {"id": "cmpl-1", "created": 6, "model": "m"}
        params = body.get("kv_transfer_params") or {}
        output = params.get("baton_output_token_ids", [])
        wants_ids = body.get("return_token_ids") or params.get("baton_token_ids")
        headers = {"x_baton_given": str(len(output))} if output else {}
        await call.start(200, "text/event-stream; charset=utf-8", x_engine=call.engine.url, **headers)
        if "messages" in body and not output:
            opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            prompt_ids = {"prompt_token_ids": ids} if wants_ids else {}
            await call.piece(event({**head, "choices": [opening], **prompt_ids}))
        groups = [given[:2], *([t] for t in given[2:])] if self.hurries else [[token] for token in given]
        for index, group in enumerate(groups):
            if index == self.dies_after:
                return call.cut()
            is_last = index + 1 == len(groups)
            choice: dict[str, Any] = {"index": 0, "finish_reason": reason if is_last else None}
            text = "".join(map(self._text, group))
            choice |= {"delta": {"content": text}} if "messages" in body else {"text": text}
            if wants_ids:
                choice["token_ids"] = group
                if index == 0 and "messages" not in body and body.get("return_token_ids"):
                    choice["prompt_token_ids"] = ids
            last = {"kv_transfer_params": self.keeps} if is_last and self.keeps else {}
            await call.piece(event({**head, "choices": [choice], **last}))
            if index == 0 and self.rest_gate is not None:
                await self.rest_gate.wait()
        if (body.get("stream_options") or {}).get("include_usage"):
            await call.piece(event({**head, "choices": [], "usage": _usage(ids, [*output, *given])}))
        await call.piece(b"data: [DONE]\n\n", more=False)
        return None


def _usage(ids: Sequence[int], given: Sequence[int]) -> dict[str, int]:
    return {
        "prompt_tokens": len(ids),
        "completion_tokens": len(given),
        "total_tokens": len(ids) + len(given),
    }


def vllm(*, max_model_len: int = 4096, **fields: Any) -> FakeEngine:
    introduces = fields.get("introduces", False)
    return FakeEngine(VllmSpeaker(**fields), is_vllm_of=max_model_len, introduces_by_request=introduces)


def vllm_speaker(engine: FakeEngine) -> VllmSpeaker:
    assert isinstance(engine.respond, VllmSpeaker)
    return engine.respond


def refuses_tickets(otherwise: Respond) -> Respond:
    """D's responder that refuses every ticket of P, and leaves other requests to `otherwise`."""
    refusal = {"error": {"message": "no", "param": "kv_transfer_params.baton_ticket"}}

    async def respond(call: Call) -> None:
        has_paper = bool(call.received.body.get("kv_transfer_params"))
        await (responds(400, refusal) if has_paper else otherwise)(call)

    return respond
