"""The router's side of the index process: questions with a deadline, and the life of the process.

A question that is not answered in time finds nothing: the request is routed without the caches.
"""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from baton.core.json_text import NotJson, decode_json
from baton.router.fleet.engine import Engine
from baton.router.request.events import Found, Look
from baton.router.shell import index_process as wire
from baton.router.shell.asking import Asker, AskFailed
from baton.router.shell.frames import FrameStream, child
from baton.router.shell.parts import Parts
from baton.router.shell.tasks import Tasks
from baton.router.values.settings import KVEventsSource, sources_of

logger = logging.getLogger(__name__)

LOOK_S = 0.05
TOKENIZE_S = 0.2  # Time for an engine to return a chat's token ids; a longer wait is not worth it.
PROMPT_BYTES_MAX = 4 << 20  # More is not looked up in time.
CONNECT_S = 0.1  # Time from one attempt to connect to the next one.
# Time from the end of the process to its successor, and from a late answer to the next question.
RETRY_S = 1.0

NOTHING = Found(0, {})


class _Tokenized(msgspec.Struct):
    tokens: msgspec.Raw


class IndexClient:
    """Asks the index for one process of the router. `connect` returns at once and never gives up."""

    def __init__(self, path: str, asker: Asker) -> None:
        self._path, self._asker = path, asker
        self._loop = asyncio.get_running_loop()
        self._stream: FrameStream | None = None
        self._tasks = Tasks()
        self._asks_at_s = 0.0

    @property
    def is_connected(self) -> bool:
        return self._stream is not None

    def connect(self) -> None:
        self._tasks.start(self._connect(), "the index of prefixes is not asked any more")

    async def _connect(self) -> None:
        while True:
            lost = asyncio.Event()
            stream = FrameStream(wire.decode_answer, lambda frame: None, lost.set)
            with suppress(OSError):
                await self._loop.create_unix_connection(lambda: stream, self._path)  # noqa: B023
                self._stream = stream
                await lost.wait()
                self._stream = None
            await asyncio.sleep(CONNECT_S)

    async def close(self) -> None:
        await self._tasks.close()
        if self._stream is not None:
            self._stream.close()

    async def find(self, look: Look) -> Found:
        """Return what the index knows of the prompt, and nothing if it takes too long."""
        prompt = look.prompt
        try:
            if look.tokenizer is not None:
                prompt = await self._tokenized(look.tokenizer, look.chat)
            return await self._ask(as_json(prompt), look)
        except (TimeoutError, ConnectionError, AskFailed, NotJson) as error:
            logger.debug("a prompt was not looked up: %r", error)
            return NOTHING

    async def _tokenized(self, engine: Engine, chat: Mapping[str, Any]) -> msgspec.Raw:
        """Ask an engine for a chat's token ids: only an engine knows the model's template.

        Raises TimeoutError, AskFailed, NotJson.
        """
        url = f"{engine.address}/tokenize"
        answer = await self._asker.ask(url, timeout_s=TOKENIZE_S, method="POST", body=chat)
        return decode_json(answer.body, _Tokenized).tokens

    async def _ask(self, prompt: bytes, look: Look) -> Found:
        if self._stream is None or len(prompt) > PROMPT_BYTES_MAX or self._loop.time() < self._asks_at_s:
            return NOTHING
        question = wire.Look(prompt, look.adapter, look.salt)
        try:
            return await self._stream.ask(question, Found, LOOK_S)
        except TimeoutError:
            self._asks_at_s = self._loop.time() + RETRY_S  # Others need not wait for it as well.
            raise


class IndexOwner:
    """Starts the index process, replaces it if it ends, and ends it."""

    def __init__(self, parts: Parts, log_config: Mapping[str, Any]) -> None:
        fleet, self._introducer = parts.fleet, parts.introducer
        fleet.health.on_ejected.append(self.reset)
        fleet.models.on_updated.append(self._forget_old)
        fleet.on_added.append(self._follow)
        fleet.on_removed.append(self._follow)
        self._fleet = fleet
        self._settings, self._log_config = parts.settings, dict(log_config)
        self._folder = tempfile.mkdtemp(prefix="baton-index-")
        self.path = str(Path(self._folder) / "socket")
        self._tasks = Tasks()
        self._stream: FrameStream | None = None

    def start(self) -> None:
        self._tasks.start(self._keep(), "the index of prefixes is not started any more")

    async def close(self) -> None:
        await self._tasks.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def reset(self, engine: Engine) -> None:
        """Forget what an engine has that is down: it may come back without its cache."""
        if self._stream is not None:
            self._stream.send(wire.Reset(engine.url))

    def _forget_old(self, engine: Engine) -> None:
        if self._stream is not None:
            self._stream.send(wire.Updated(engine.url))

    def _follow(self, engine: Engine) -> None:
        """Tell the index process that the engine has joined or is removed."""
        if self._stream is not None:
            self._stream.send(wire.Follow(self._sources))

    @property
    def _sources(self) -> tuple[KVEventsSource, ...]:
        return sources_of(self._settings.kv_events, [engine.url for engine in self._fleet.engines])

    async def _keep(self) -> None:
        while True:
            try:
                await self._run()
            except OSError as error:
                logger.error("the index of prefixes cannot be started: %s", error)
            await asyncio.sleep(RETRY_S)

    async def _run(self) -> None:
        """Run one process until it ends. Raises OSError."""
        settings = self._settings
        stream = FrameStream(wire.decode_report, self._on_frame)
        async with child("baton.router.shell.index_process", stream) as process:
            stream.send(wire.Begin(self.path, self._sources, settings.tokenizer, self._log_config))
            self._stream = stream
            status = await process.wait()
            logger.error("the index of prefixes has ended with status %d; another one starts", status)

    def _on_frame(self, frame: wire.Ready | wire.Known | wire.Cleared) -> None:
        if isinstance(frame, wire.Ready):
            logger.info("the index of prefixes reads KV events of %d engines", len(self._sources))
        elif isinstance(frame, wire.Cleared):
            self._introducer.refresh_all([one for one in self._fleet.engines if one.url == frame.url])
        elif isinstance(frame, wire.Known):
            for engine in self._fleet.engines:
                engine.num_indexed_blocks = frame.blocks.get(engine.url)


def as_json(prompt: Any) -> bytes:
    """A prompt of a request's body: as the client wrote it, if it is still encoded."""
    return bytes(prompt) if isinstance(prompt, msgspec.Raw) else msgspec.json.encode(prompt)
