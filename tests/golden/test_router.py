"""Transcripts of the router: what engines get from it, what its client gets, and what its metrics count.

Each scenario is one request to a real router in front of fake engines. Chunks of a stream that follow each
other are one text, so a router may cut or join them. Answers of the fake engines are not shown: they stand in
the scenario. `N` is a number that differs from run to run. In a push both legs are under way at once; here
one of them ends before the other one gets its answer.
"""

import asyncio
import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httpx
import pytest

from tests.event_loop import run
from tests.golden.golden import check
from tests.router.baton_fakes import baton
from tests.router.fakes import (
    Call,
    FakeEngine,
    Respond,
    System,
    answers,
    breaks,
    dead_url,
    dies,
    lends,
    opened,
    responds,
    system,
)
from tests.router.vllm_fakes import refuses_tickets, vllm

HOP = {"host", "content-length", "accept", "accept-encoding", "connection", "user-agent", "content-type"}
SEEN = re.compile(r"content-type|retry-after|www-authenticate|x-.*")  # Headers of the client's answer.
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
STREAM = {"stream": True}
COUNTS = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
NO_ROOM = responds(503, {"error": {"message": "no room"}})
TOO_LONG = responds(400, {"error": {"message": "too long", "param": "prompt"}})


class Order:
    """Order of push legs. P first: D answers once the router has read P's answer. D first: P never does."""

    def __init__(self, first: str) -> None:
        self._first_is_prefill = first == "P"
        self._num_prefills = 0
        self.client: httpx.AsyncClient | None = None  # The router's client.

    def kept(self, respond: Respond) -> Respond:
        async def answer(call: Call) -> None:
            params = (json.loads(call.received.raw or b"{}") or {}).get("kv_transfer_params") or {}
            is_prefill, is_pushed = bool(params.get("do_remote_decode")), "baton_introduction" in params
            self._num_prefills += is_prefill
            if is_prefill and not self._first_is_prefill:
                await call.wait_disconnect()
            elif not (is_pushed and self._first_is_prefill) or await self._wait_prefills_read(call):
                await respond(call)

        return answer

    async def _wait_prefills_read(self, call: Call) -> bool:
        """Return False if the router leaves first."""
        are_read = asyncio.Event()

        async def watch() -> None:
            while not are_read.is_set():
                assert self.client is not None
                text = (await self.client.get("/metrics")).text
                ended = re.findall(r"router_legs_total\{.*role=\"prefill\"\} (\S+)", text)
                if sum(map(float, ended)) >= self._num_prefills:
                    are_read.set()

        watching = asyncio.create_task(watch())
        try:
            return await opened(are_read, call)
        finally:
            watching.cancel()


@dataclass
class Recorded(FakeEngine):
    """Writes down every request but those of the prober."""

    name: str = ""
    heard: list[str] = field(default_factory=list)
    PROBES: ClassVar = ("/health", "/baton/introduction")

    @classmethod
    def of(cls, engine: FakeEngine, name: str, order: Order) -> "Recorded":
        fields = {each.name: getattr(engine, each.name) for each in dataclasses.fields(engine)}
        return cls(**{**fields, "respond": order.kept(engine.respond)}, name=name)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""

        async def overheard() -> Any:
            nonlocal body
            message = await receive()
            body += message.get("body", b"")
            if message["type"] == "http.request" and not message.get("more_body"):
                self._note(scope, body)
            return message

        overheard.__self__ = receive.__self__  # type: ignore[attr-defined]  # For `Call.cut`.
        await super().__call__(scope, overheard, send)

    def _note(self, scope: Any, body: bytes) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        if scope["path"] in self.PROBES or (scope["path"] == "/v1/models" and "x-request-id" not in headers):
            return
        shown = " ".join(f"{name}={value}" for name, value in sorted(headers.items()) if name not in HOP)
        text = json.dumps(json.loads(body), sort_keys=True) if body else ""
        self.heard.append(f"{self.name} gets {scope['method']} {scope['path']} [{shown}] {text}".rstrip())


@dataclass(frozen=True)
class Scenario:
    """`prefill`, `decode`: functions that make fresh engines."""

    prefill: tuple[Callable[[], FakeEngine | str], ...]
    decode: tuple[Callable[[], FakeEngine | str], ...]
    body: Mapping[str, Any] = field(default_factory=dict)
    path: str = "/v1/completions"
    settings: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes | None = None  # The bytes to send instead of `body`.
    method: str = "POST"


def plain(respond: Respond) -> Callable[[], FakeEngine]:
    return lambda: FakeEngine(respond)


def ours(name: str, **fields: Any) -> Callable[[], FakeEngine]:
    return lambda: baton(name, **fields)


def theirs(**fields: Any) -> Callable[[], FakeEngine]:
    return lambda: vllm(**fields)


def ours_but(name: str, respond: Respond) -> Callable[[], FakeEngine]:
    """One of Baton's engines, whose answers to requests are these."""
    return lambda: FakeEngine(respond, introduces_as=name)


def refuses(name: str) -> Callable[[], FakeEngine]:
    def make() -> FakeEngine:
        engine = baton(name)
        engine.respond = refuses_tickets(engine.respond)
        return engine

    return make


P, D, D2 = ours("p"), ours("d"), ours("d2")
HANDOFFS: dict[str, Scenario] = {
    "whole": Scenario((P,), (D,)),
    "stream": Scenario((P,), (D,), STREAM),
    "stream with counts and ids": Scenario((P,), (D,), COUNTS),
    "chat": Scenario((P,), (D,), {**CHAT, "prompt": None}, "/v1/chat/completions"),
    "chat stream": Scenario((P,), (D,), {**CHAT, **STREAM, "prompt": None}, "/v1/chat/completions"),
    "fields of the client's own": Scenario(
        (P,),
        (D,),
        {"seed": 5, "min_tokens": 2, "logprobs": 1, "logit_bias": {"5": 1.5}, "unknown": {"a": [None]}},
    ),
    "headers": Scenario(
        (P,), (D,), headers={"authorization": "Bearer k", "connection": "x-hop", "x-hop": "1", "x-other": "2"}
    ),
    "first token off": Scenario((P,), (D,), STREAM, settings={"first_token": False}),
    "first token ends the answer": Scenario((ours("p", ends_with_first=True),), (D,), STREAM),
    "one token": Scenario((P,), (D,), {"max_tokens": 1}),
    "one token, streamed": Scenario((P,), (D,), {"max_tokens": 1, **STREAM}),
    "two samples": Scenario((P,), (D,), {"n": 2, **STREAM}),
    "nothing lent": Scenario((ours("p", lends=False),), (D,), STREAM),
    "session": Scenario((P,), (D,), headers={"x-baton-session": "s"}),
    "short prompt": Scenario((P,), (D,), settings={"min_prefill_tokens": 100}),
    "several prompts": Scenario((P,), (D,), {"prompt": ["a", "b"]}),
    "prompt logprobs": Scenario((P,), (D,), {"prompt_logprobs": 1}),
    "P dead": Scenario((dead_url,), (D,)),
    "P dead, on_prefill_failure fail": Scenario((dead_url,), (D,), settings={"on_prefill_failure": "fail"}),
    "P dead, another P": Scenario((dead_url, P), (D,), STREAM, settings={"policy": "round_robin"}),
    "P has no room": Scenario((ours_but("p", NO_ROOM),), (D,), STREAM),
    "P refuses the request": Scenario((ours_but("p", TOO_LONG),), (D,), STREAM),
    "P breaks off": Scenario((ours_but("p", breaks),), (D,)),
    "P breaks off, another P": Scenario(
        (P, ours_but("p", breaks)), (D,), STREAM, settings={"policy": "round_robin"}
    ),
    "P's answer is no completion": Scenario((ours_but("p", responds(200, [1])),), (D,)),
    "P's ticket is no object": Scenario(
        (ours_but("p", responds(200, {"choices": [{}], "kv_transfer_params": 5})),), (D,)
    ),
    "D dead": Scenario((P,), (dead_url,)),
    "D dead, another D": Scenario((P,), (dead_url, D), settings={"policy": "round_robin"}),
    "D has no room": Scenario((P,), (ours_but("d", NO_ROOM),)),
    "D dies before its answer": Scenario((P,), (ours_but("d", dies),), STREAM),
    "D dies before its answer, another D": Scenario(
        (P,), (D2, ours_but("d", dies)), STREAM, settings={"policy": "round_robin"}
    ),
    "D dies in its stream": Scenario((P,), (ours("d", dies_after=2),), STREAM),
    "D dies in its stream, first token off": Scenario(
        (P,), (ours("d", dies_after=2), D2), STREAM, settings={"first_token": False, "policy": "round_robin"}
    ),
    "D refuses the ticket": Scenario((P,), (refuses("d"),), STREAM),
    "D disagrees": Scenario((P,), (ours("d", tokens=(74, 105)),), STREAM),
    "vLLM, whole": Scenario((theirs(),), (theirs(),)),
    "vLLM, stream": Scenario((theirs(introduces=True),), (theirs(),), STREAM),
    "vLLM, stream with counts and ids": Scenario((theirs(introduces=True),), (theirs(),), COUNTS),
    "vLLM, chat stream": Scenario(
        (theirs(introduces=True),), (theirs(),), {**CHAT, **STREAM, "prompt": None}, "/v1/chat/completions"
    ),
    "vLLM, first token ends the answer": Scenario((theirs(tokens=(72,), stops=True),), (theirs(),), STREAM),
    "vLLM, D refuses the ticket": Scenario(
        (theirs(),), (lambda: FakeEngine(refuses_tickets(vllm().respond), is_vllm_of=4096),), STREAM
    ),
    "other engines, whole": Scenario((plain(lends),), (plain(answers),)),
    "other engines, stream": Scenario((plain(lends),), (plain(answers),), STREAM),
}
D_FIRST = (
    "whole",
    "stream",
    "stream with counts and ids",
    "chat stream",
    "first token off",
    "nothing lent",
    "D has no room",
    "D dies before its answer",
    "D dies before its answer, another D",
    "D dies in its stream",
    "D refuses the ticket",
    "D disagrees",
    "vLLM, stream",
)
DOOR: dict[str, Scenario] = {
    "no JSON": Scenario((P,), (D,), raw=b'{"prompt": '),
    "no object": Scenario((P,), (D,), raw=b"[1]"),
    "two values": Scenario((P,), (D,), raw=b"{} {}"),
    "not UTF-8": Scenario((P,), (D,), raw=b'{"prompt": "\xff"}'),
    "kv_transfer_params": Scenario((P,), (D,), {"kv_transfer_params": {"do_remote_prefill": True}}),
    "kv_transfer_params in vllm_xargs": Scenario((P,), (D,), {"vllm_xargs": {"kv_transfer_params": {}}}),
    "unknown path": Scenario((P,), (D,), path="/v1/embeddings"),
    "wrong method": Scenario((P,), (D,), method="GET"),
    "health": Scenario((P,), (D,), method="GET", path="/health"),
    "health without D": Scenario((P,), (dead_url,), method="GET", path="/health"),
    "models": Scenario((P,), (plain(responds(200, {"data": []})),), method="GET", path="/v1/models"),
    "tokenize": Scenario((P,), (plain(responds(200, {"tokens": [1]})),), path="/tokenize"),
    "tokenize, D dead": Scenario((P,), (dead_url,), path="/tokenize"),
    "detokenize": Scenario((P,), (plain(responds(200, {"prompt": "a"})),), {"tokens": [1]}, "/detokenize"),
}


async def transcript(scenario: Scenario, mode: str, order: Order) -> list[str]:
    engines: dict[str, FakeEngine | str] = {}
    for role, makers in (("P", scenario.prefill), ("D", scenario.decode)):
        for number, make in enumerate(makers):
            made, name = make(), f"{role}{number}"
            engines[name] = Recorded.of(made, name, order) if isinstance(made, FakeEngine) else made
    sides = [[engine for name, engine in engines.items() if name[0] == role] for role in "PD"]
    body = {"prompt": "hello", "max_tokens": 3, **scenario.body}
    body = {key: value for key, value in body.items() if value is not None}
    async with system(*sides, mode=mode, **scenario.settings) as s:
        order.client = s.client
        while any(engine.is_up and not engine.is_introduced for engine in s.router.fleet.engines):
            await s.client.get("/fleet")
        answer = await s.client.request(
            scenario.method,
            scenario.path,
            content=scenario.raw if scenario.raw is not None else json.dumps(body).encode(),
            headers={"x-request-id": "id", "content-type": "application/json", **scenario.headers},
        )
        counters = await settled_counters(s, engines)
    recorded = [engine for engine in engines.values() if isinstance(engine, Recorded)]
    lines = [
        line
        for engine in recorded
        for line in sorted(engine.heard, key=lambda line: "/baton/take_back" in line)
    ]
    headers = [f"{name}={value}" for name, value in sorted(answer.headers.items()) if SEEN.fullmatch(name)]
    lines.append(f"client gets {answer.status_code} [{' '.join(headers)}]")
    lines += [f"  {line}" for line in answer.text.splitlines() if line]
    urls = {engine if isinstance(engine, str) else engine.url: name for name, engine in engines.items()}
    counted = sorted(without_luck(line, urls) for line in counters)
    return [*(without_luck(line, urls) for line in lines), *(f"  {line}" for line in counted)]


async def settled_counters(s: System, engines: Mapping[str, FakeEngine | str]) -> list[str]:
    """The router's counters that are not 0, once no request is running and all loans are back."""
    fakes = [engine for engine in engines.values() if isinstance(engine, FakeEngine)]
    while True:
        text = (await s.client.get("/metrics")).text
        samples = re.findall(r"^(baton:router_\w+_total\{?.*?\}?) (\S+)$", text, re.MULTILINE)
        counters = {name: float(value) for name, value in samples if float(value)}
        num_returned = sum(value for name, value in counters.items() if "loan_returns" in name)
        num_taken = sum(len(fake.taken_back) for fake in fakes)
        if "baton:router_in_flight 0.0" in text and num_returned == num_taken:
            return [f"{name} {value:g}" for name, value in counters.items()]
        await asyncio.sleep(0)


def without_luck(line: str, urls: Mapping[str, str]) -> str:
    for url, name in urls.items():
        line = line.replace(url, name)
    line = re.sub(r'("transfer_id": )"[0-9a-f]{32}"', r'\1"N"', line)
    line = re.sub(r'("seed": )\d{6,}', r"\1N", line)
    return re.sub(r"cannot connect: [^\"]*", "cannot connect: ...", line)


@pytest.mark.parametrize(
    ("name", "scenarios", "mode", "first"),
    [
        ("pull", HANDOFFS, "pull", "P"),
        ("push_p_first", HANDOFFS, "push", "P"),
        ("push_d_first", {name: HANDOFFS[name] for name in D_FIRST}, "push", "D"),
        ("door", DOOR, "pull", "P"),
    ],
)
def test_transcripts(name: str, scenarios: Mapping[str, Scenario], mode: str, first: str) -> None:
    lines: list[str] = []
    for title, scenario in scenarios.items():

        async def record(title: str = title, scenario: Scenario = scenario) -> None:
            lines.extend([f"# {title}", *await transcript(scenario, mode, Order(first)), ""])

        run(record())
    check(f"router_{name}", lines)
