"""A server around a scripted engine and a tokenizer of one token per character."""

import asyncio
import json
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
import uvicorn

from baton.core.config import ModelConfig
from baton.engine.api import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    PromptLogprobs,
    SchedulerStats,
    TokenLogprob,
    TokenLogprobs,
)
from baton.engine.core.client import EngineDeadError
from baton.engine.text.chat_template import ChatTemplate
from baton.http.bodies import Bodies
from baton.http.connections import server_config
from baton.http.settings import HttpSettings
from baton.http.workers import WorkerPool
from baton.router.processes.app import Router
from baton.router.values.settings import RouterSettings
from baton.server.app import build_app
from baton.server.metrics import ServerMetrics
from baton.server.service import Service, check_common_params
from baton.server.tokens import PromptEncoder
from baton.testing.host import config as toy

EOS = 0
SPECIAL = {EOS: "<eos>", 1: "<user>", 2: "<assistant>"}
VOCAB_SIZE = 0x3000
MAX_MODEL_LEN = 200
JSON = {"Content-Type": "application/json"}
LOOK_EVERY_S = 0.001  # Interval between two looks at the loop.
WAIT_S = 60.0  # Far more than anything here takes; a test that needs it has failed.


TEMPLATE = (
    "{% if spin %}{% for i in range(spin) %}{% for j in range(spin) %}{% endfor %}{% endfor %}{% endif %}"
    # Refuses with all its input in the text, for tests to read.
    "{% if shows_input %}{{ raise_exception({'messages': messages, 'tools': tools, 'documents': documents, "
    "'reasoning_effort': reasoning_effort|default(none), 'enable_thinking': enable_thinking|default(none)}"
    "|tojson) }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('the template knows user and assistant') }}{% endif %}"
    "{{ '\x01' if message.role == 'user' else '\x02' }}{{ message.content }}"
    "{% endfor %}{{ '\x02' if add_generation_prompt else '' }}"
)


class CharacterTokenizer:
    """Token ids are code points; three of them are special."""

    chat_template = ChatTemplate(TEMPLATE, {})
    digest = "characters"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(
            ("" if skip_special_tokens else SPECIAL[token]) if token in SPECIAL else chr(token)
            for token in token_ids
        )

    def special_text(self, token_id: int) -> str | None:
        return SPECIAL.get(token_id)

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes:
        return self.decode([token_id], skip_special_tokens=False).encode()

    def detokenizer(self, *, skip_special_tokens: bool = True) -> "CharacterText":
        return CharacterText(self, skip_special_tokens)


class CharacterText:
    """Tokens above 0x2000 are halves of characters: no text until the second half."""

    def __init__(self, tokenizer: CharacterTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._half: int | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token in token_ids:
            if token >= 0x2000 and self._half is None:
                self._half = token
            elif self._half is not None:
                text, self._half = text + "€", None
            else:
                text += self._tokenizer.decode([token], skip_special_tokens=self._skip)
        return text

    def flush(self) -> str:
        rest, self._half = ("\N{REPLACEMENT CHARACTER}" if self._half is not None else ""), None
        return rest


@dataclass
class ScriptedEngine:
    """Answers with the characters of `answer`, one a step; ends as the real engine would.

    A step waits for `gate`, if there is one. `transfer_params` is what a connector would return.
    """

    answer: str | Callable[[EngineRequest], str] = "Hello, world!"
    end_with_eos: bool = True
    gate: asyncio.Event | None = None
    loans: asyncio.Event | None = None  # Set when all loans have ended; a drain waits for it.
    failure: EngineOutput | None = None  # Output whose fields replace those of output number `fail_at`.
    fail_at: int = 0
    transfer_params: dict[str, Any] | None = None
    introduces_as: str | None = None
    unready_reason: str | None = None
    num_cached_tokens: int = 0
    num_transferred_tokens: int = 0
    num_at_first: int = 1  # Tokens of the first output. More: it has loaded tokens of the answer.
    on_stats: Callable[[SchedulerStats], None] | None = None
    requests: list[EngineRequest] = field(default_factory=list)
    events: list[str] = field(default_factory=list)  # Events in order.
    taken_back: list[dict[str, Any]] = field(default_factory=list)
    was_asked: asyncio.Event = field(default_factory=asyncio.Event)  # Set when the first request arrives.
    _dead: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_dead(self) -> bool:
        return self._dead.is_set()

    def die(self) -> None:
        self._dead.set()

    async def wait_dead(self) -> None:
        await self._dead.wait()

    async def drain(self, timeout_s: float) -> bool:
        self.events.append("drain")
        if self.loans is not None:
            await self.loans.wait()
        self.events.append("drained")
        return True

    async def introduction(self) -> str | None:
        return self.introduces_as

    def take_back(self, params: dict[str, Any]) -> None:
        self.taken_back.append(params)

    async def close(self) -> None:
        self.events.append("closed")
        self._dead.set()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        number = len(self.requests)
        self.requests.append(request)
        self.was_asked.set()
        self.events.append(f"{number} submitted")
        try:
            async for output in self._outputs(request):
                self.events.append(f"{number} token")
                yield output
            self.events.append(f"{number} finished")
        except (GeneratorExit, asyncio.CancelledError):
            self.events.append(f"{number} aborted")
            raise

    async def _outputs(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        params = request.sampling_params
        text = self.answer(request) if callable(self.answer) else self.answer
        token_ids = [ord(character) for character in text] + ([EOS] if self.end_with_eos else [])
        new: list[int] = []
        for position, token in enumerate(token_ids):
            await self._step()
            if self.failure is not None and position == self.fail_at:
                yield self.failure
                return
            reason: FinishReason | None = None
            stop_id = None
            if token == EOS and not params.ignore_eos:
                reason, stop_id = "stop", EOS
            elif token in params.stop_token_ids:
                reason, stop_id = "stop", token
            elif position + 1 == params.max_tokens or position + 1 == len(token_ids):
                reason = "length"
            new.append(token)
            if position + 1 < self.num_at_first and reason is None:
                continue
            logprobs = None
            if params.logprobs is not None:
                logprobs = [_logprobs(each, params.logprobs) for each in new]
            yield EngineOutput(
                request_id=request.request_id,
                new_token_ids=new,
                new_logprobs=logprobs,
                prompt_logprobs=_prompt_logprobs(request) if position < self.num_at_first else None,
                finish_reason=reason,
                stop_token_id=stop_id,
                kv_transfer_params=self.transfer_params if reason else None,
                num_cached_tokens=self.num_cached_tokens,
                num_transferred_tokens=self.num_transferred_tokens,
                weights_id="of these weights",
            )
            if reason is not None:
                return
            new = []

    async def _step(self) -> None:
        if self.gate is None:
            await asyncio.sleep(0)
        else:
            opened, died = asyncio.ensure_future(self.gate.wait()), asyncio.ensure_future(self._dead.wait())
            try:
                await asyncio.wait((opened, died), return_when=asyncio.FIRST_COMPLETED)
            finally:
                opened.cancel()
                died.cancel()
        if self.is_dead:
            raise EngineDeadError("killed by the test")


def _prompt_logprobs(request: EngineRequest) -> PromptLogprobs | None:
    count = request.sampling_params.prompt_logprobs
    if count is None:
        return None
    entries = [_logprobs(token, count) for token in request.prompt_token_ids[1:]]
    shown = [one for entry in entries for one in (entry.chosen, *entry.top)]
    return PromptLogprobs(
        1 + min(count, 3),
        array("i", [one.token_id for one in shown]).tobytes(),
        array("f", [one.logprob for one in shown]).tobytes(),
        array("i", [entry.chosen.rank for entry in entries]).tobytes(),
    )


def _logprobs(token: int, count: int) -> TokenLogprobs:
    chosen = TokenLogprob(token, -0.5, 2)
    top = (TokenLogprob(ord("x"), -0.25, 1), chosen, TokenLogprob(ord("y"), float("-inf"), 3))
    return TokenLogprobs(chosen, top[:count])


def model_config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "num_kv_heads": 2,
        "head_dim": 8,
        "hidden_size": 32,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": (EOS,),
        "architecture_digest": "a",
    }
    return toy.model_config(**{**fields, **changes})


@contextmanager
def service_around(engine: ScriptedEngine, **changes: Any) -> Iterator[Service]:
    tokenizer = CharacterTokenizer()
    workers = WorkerPool()
    limits = changes.get("limits", HttpSettings())
    encoder = PromptEncoder(tokenizer, model_config(), workers, limits)
    fields: dict[str, Any] = {
        "engine": engine,
        "model_config": model_config(),
        "tokenizer": tokenizer,
        "encoder": encoder,
        "bodies": Bodies(limits, workers),
        "metrics": ServerMetrics("toy"),
    }
    try:
        yield Service(**{**fields, **changes})
    finally:
        encoder.close()
        workers.close()


class QuietServer(uvicorn.Server):
    """Reports when it is up; leaves the test's signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = threading.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}"


class LiveLoop(ABC):
    """A server on a loopback port, in a thread with a loop of its own."""

    def __init__(self) -> None:
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @abstractmethod
    async def _serve(self) -> None:
        """Serve until `_stop` was called. Set `_is_up` once requests can be sent."""

    @abstractmethod
    def _stop(self) -> None: ...

    @property
    @abstractmethod
    def url(self) -> str: ...

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            runner.run(self._serve())

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_up.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def call(self, function: Callable[[], Any]) -> None:
        """Run in the server's loop, where the engine's events are."""
        self._loop.call_soon_threadsafe(function)

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=WAIT_S, trust_env=False)

    @contextmanager
    def longest_turn(self) -> Iterator[list[float]]:
        """Measure the most processor seconds between two looks at the loop; the list holds them at the end.

        A stream of tokens stands still for as long. Processor time, not wall-clock time: a machine that is
        busy with other work does not count.
        """
        longest = [0.0]

        async def tick() -> None:
            last_s = time.thread_time()
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                now_s = time.thread_time()
                longest[0] = max(longest[0], now_s - last_s)
                last_s = now_s

        ticking = asyncio.run_coroutine_threadsafe(tick(), self._loop)
        try:
            yield longest
        finally:
            ticking.cancel()


class LiveServer(LiveLoop):
    """The engine's server."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        app, limits = build_app(service), service.limits
        config = server_config(
            app, limits, port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=5
        )
        self._server = QuietServer(config)
        self._is_up = self._server.is_up
        self.service = service

    async def _serve(self) -> None:
        await self._server.serve()

    def _stop(self) -> None:
        self._server.should_exit = True

    @property
    def url(self) -> str:
        return self._server.url

    def reset(self, engine: ScriptedEngine) -> None:
        """Reset between tests, when no request runs."""
        self.service.engine = engine
        self.service.check_params = check_common_params
        self.service.is_draining = False
        self.service.metrics = ServerMetrics("toy")
        engine.on_stats = self.service.metrics.observe_stats


def read_stream(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a streamed answer."""
    with http.stream("POST", path, json={"stream": True, **body}) as answer:
        assert answer.status_code == 200, answer.read()
        *events, last = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


class LiveRouter(LiveLoop):
    """A router."""

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__()
        self._settings = settings
        self._is_told = asyncio.Event()

    async def _serve(self) -> None:
        router = Router(self._settings)
        port = await router.listen("127.0.0.1", 0)
        router.start()
        self._url = f"http://127.0.0.1:{port}"
        self._is_up.set()
        await self._is_told.wait()
        await router.close(5.0)

    def _stop(self) -> None:
        self.call(self._is_told.set)

    @property
    def url(self) -> str:
        return self._url


def router_before(engine: LiveServer, **settings: Any) -> LiveRouter:
    """A router that asks this engine for prefill and decode."""
    return LiveRouter(RouterSettings(prefill_urls=(engine.url,), decode_urls=(engine.url,), **settings))
