"""The process that knows which prefixes engines have: it reads their KV events and answers the router.

    engines --ZeroMQ: PUB, and ROUTER for replays--> index process
    router processes --Unix socket: Look--> index process --Found--> router processes

Tokenising and hashing of prompts happen here too, so that a long prompt stops no router's event loop. Events
hold token ids and are not authenticated: the operator chooses the endpoints. After a wrong event the router
may choose an engine that is not the best. The process ends with its parent, and then removes the socket and
its folder.
"""

import asyncio
import logging
import logging.config
import os
import socket
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import zmq
import zmq.asyncio

from baton.core.errors import panics_as
from baton.core.json_text import NotJson, decode_json
from baton.core.kv_events import AllBlocksCleared, KVEventBatch
from baton.router.fleet.block_index import BlockIndex, Match, home_key, prefix_keys, root_key
from baton.router.request.events import Found
from baton.router.shell.event_feed import Apply, EventFeed, FeedEffect, Forget, Replay
from baton.router.shell.frames import Answered, Asked, FrameStream
from baton.router.values.settings import KVEventsSource

logger = logging.getLogger(__name__)

CHECK_S = 10.0  # An engine without an event for so long is asked whether one was missed.
REPLAY_S = 10.0
REPORT_S = 0.25
BREATH = 64  # Batches that are applied before others have a turn.
NUMBER_BYTES = 8
BATCHES_MAX = 100_000  # Batches that wait to be read, as many as vLLM's publisher keeps.
TASKS_MAX = 512  # More questions are not answered: the router has given up by then.
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)


class _Frame(msgspec.Struct, frozen=True, array_like=True): ...


class Begin(_Frame, frozen=True, tag="Begin"):
    """The first frame that the parent sends."""

    path: str  # Path of the Unix socket, in a folder of its own.
    sources: tuple[KVEventsSource, ...]
    tokenizer: str | None
    log_config: dict[str, Any]


class Ready(_Frame, frozen=True, tag="Ready"):
    """Report to the parent: the socket is there."""


class Known(_Frame, frozen=True, tag="Known"):
    """Report to the parent, every REPORT_S: the number of blocks by engine."""

    blocks: dict[str, int]


class Cleared(_Frame, frozen=True, tag="Cleared"):
    """Report to the parent: the engine has emptied its cache; perhaps it has other weights."""

    url: str


class Reset(_Frame, frozen=True, tag="Reset"):
    """Order of the parent: forget this engine's blocks, since it may be another process now."""

    url: str


class Updated(_Frame, frozen=True, tag="Updated"):
    """Order of the parent: forget this engine's blocks, since it has other weights."""

    url: str


class Follow(_Frame, frozen=True, tag="Follow"):
    """Order of the parent: read the events of these engines from now on."""

    sources: tuple[KVEventsSource, ...]


class Look(_Frame, frozen=True, tag="Look"):
    """A router asks which engines have the beginning of this prompt."""

    prompt: bytes  # JSON: token ids, or a text.
    adapter: str | None
    salt: str | None


FromParent: TypeAlias = Begin | Reset | Updated | Follow
decode_from_parent = msgspec.msgpack.Decoder(FromParent).decode
decode_report = msgspec.msgpack.Decoder(Ready | Known | Cleared).decode
decode_question = msgspec.msgpack.Decoder(Asked[Look]).decode
decode_answer = msgspec.msgpack.Decoder(Answered).decode
_decode_batch = msgspec.msgpack.Decoder(KVEventBatch).decode


async def _drop_received(events: "zmq.asyncio.Socket") -> None:
    """Drop what has come before the end of the connection: blocks of a process that has ended."""
    with suppress(zmq.Again):
        for number in range(BATCHES_MAX):
            await events.recv_multipart(zmq.NOBLOCK)
            if number % BREATH == 0:
                await asyncio.sleep(0)


class _Source:
    """The events of one engine. `follow` runs until it is cancelled; then `stop`."""

    def __init__(
        self,
        source: KVEventsSource,
        index: BlockIndex,
        context: "zmq.asyncio.Context",
        on_cleared: Callable[[str], None],
    ) -> None:
        self.source, self._index, self._context, self._on_cleared = source, index, context, on_cleared
        self._has_stopped = False
        self._feed = EventFeed(can_replay=source.replay_endpoint is not None)
        self._replaying: asyncio.Task[None] | None = None

    async def follow(self) -> None:
        with (
            self._context.socket(zmq.SUB) as events,
            events.get_monitor_socket(zmq.EVENT_DISCONNECTED) as disconnects,
        ):
            events.setsockopt(zmq.IPV6, 1)
            events.setsockopt(zmq.RCVHWM, BATCHES_MAX)
            events.connect(self.source.endpoint)
            events.subscribe(b"")
            poller = zmq.asyncio.Poller()
            for one in (events, disconnects):
                poller.register(one, zmq.POLLIN)
            self.reset()
            num_read = 0
            while True:
                ready = dict(await poller.poll(CHECK_S * 1e3))
                if disconnects in ready:
                    # The next process at this address may be another one, which publishes nothing for now.
                    await disconnects.recv_multipart()
                    await _drop_received(events)
                    self.reset()
                    continue
                if not ready:
                    self._carry_out(self._feed.check())
                if events not in ready:
                    continue
                frames = await events.recv_multipart()
                if len(frames) == 3 and (batch := self._decode(frames[2])) is not None:
                    number = int.from_bytes(frames[1], "big")
                    self._carry_out(self._feed.on_live(number, batch.events))
                num_read += 1
                if num_read % BREATH == 0:
                    await asyncio.sleep(0)

    def reset(self) -> None:
        self._carry_out(self._feed.begin())

    def stop(self) -> None:
        """Read no more events, and forget this engine's blocks."""
        self._has_stopped = True
        if self._replaying is not None:
            self._replaying.cancel()
        self._index.forget(self.source.url)

    def _carry_out(self, effects: Iterable[FeedEffect]) -> None:
        if self._has_stopped:
            return
        for effect in effects:
            match effect:
                case Apply(events):
                    self._index.apply(self.source.url, events)
                    if any(isinstance(event, AllBlocksCleared) for event in events):
                        self._on_cleared(self.source.url)
                case Forget():
                    self._index.forget(self.source.url)
                case Replay(first):
                    self._replaying = asyncio.create_task(self._replay(first))

    async def _replay(self, first: int) -> None:
        assert self.source.replay_endpoint is not None
        is_complete = False
        try:
            with self._context.socket(zmq.DEALER) as asking:
                asking.setsockopt(zmq.LINGER, 0)
                asking.setsockopt(zmq.IPV6, 1)
                asking.connect(self.source.replay_endpoint)
                async with asyncio.timeout(REPLAY_S):
                    await asking.send_multipart([b"", first.to_bytes(NUMBER_BYTES, "big")])
                    await self._read_replay(asking)
            is_complete = True
        except TimeoutError:
            logger.warning("%s did not repeat its KV events", self.source.url)
        finally:
            self._carry_out(self._feed.on_replay_end(is_complete=is_complete))

    async def _read_replay(self, asking: "zmq.asyncio.Socket") -> None:
        num_read = 0
        while True:
            frames = await asking.recv_multipart()
            if len(frames) != 4 or frames[2] == END:
                return
            if (batch := self._decode(frames[3])) is not None:
                number = int.from_bytes(frames[2], "big")
                self._carry_out(self._feed.on_replayed(number, batch.events))
            num_read += 1
            if num_read % BREATH == 0:
                await asyncio.sleep(0)

    def _decode(self, payload: bytes) -> KVEventBatch | None:
        """A batch that cannot be read counts as lost."""
        try:
            return _decode_batch(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            logger.warning("%s sent KV events that cannot be read: %s", self.source.url, error)
            return None


class IndexProcess:
    def __init__(self, begin: Begin) -> None:
        self._index = BlockIndex()
        self._context = zmq.asyncio.Context()
        self._first = begin.sources
        self._sources: dict[str, tuple[_Source, asyncio.Task[None]]] = {}
        self._path = begin.path
        self._tokenizer: Any = None
        if begin.tokenizer is not None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(Path(begin.tokenizer) / "tokenizer.json"))
        self._tasks: set[asyncio.Task[None]] = set()
        self._parent: FrameStream | None = None

    async def report(self, parent: FrameStream) -> None:
        while True:
            parent.send(Known({url: self._index.num_blocks(url) for url in self._sources}))
            await asyncio.sleep(REPORT_S)

    async def start(self, parent: FrameStream) -> None:
        """Open the socket, follow the engines, and report to the parent."""
        self._parent = parent
        self.follow(self._first)
        loop = asyncio.get_running_loop()
        with suppress(FileExistsError):  # An earlier process may have removed it.
            Path(self._path).parent.mkdir(mode=0o700)
        await loop.create_unix_server(self._connection, self._path)
        parent.send(Ready())
        self._keep(self.report(parent))

    def follow(self, sources: Iterable[KVEventsSource]) -> None:
        """Read the events of these engines, and of no others."""
        wanted = {one.url: one for one in sources}
        for url in self._sources.keys() - wanted.keys():
            gone, task = self._sources.pop(url)
            task.cancel()
            gone.stop()
        for url in wanted.keys() - self._sources.keys():
            source = _Source(wanted[url], self._index, self._context, self._hear_cleared)
            self._sources[url] = source, self._keep(source.follow())

    def _hear_cleared(self, url: str) -> None:
        if self._parent is not None:
            self._parent.send(Cleared(url))

    def hear(self, order: FromParent) -> None:
        match order:
            case Reset(url):
                if (found := self._sources.get(url)) is not None:
                    found[0].reset()
            case Updated(url):
                if url in self._sources:
                    self._index.forget_old(url)
            case Follow(sources):
                self.follow(sources)
            case Begin():
                raise AssertionError("the process has begun")

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("the index of prefixes has failed", exc_info=error)
            os._exit(1)  # The parent starts another one.

    def _connection(self) -> FrameStream:
        def on_frame(asked: Asked[Look]) -> None:
            if len(self._tasks) < TASKS_MAX:
                self._keep(self._answer(stream, asked))

        stream = FrameStream(decode_question, on_frame)
        return stream

    async def _answer(self, stream: FrameStream, asked: Asked[Look]) -> None:
        look = asked.question
        ids = await self._ids_of(look.prompt)
        cached: dict[str, Match] = {}
        home = 0
        with suppress(OverflowError, TypeError):  # The engine refuses such ids.
            for size in sorted(set(self._index.block_sizes().values())):
                keys = prefix_keys(ids, size, root_key(look.adapter, look.salt))
                cached |= self._index.match(keys, size)
                home = home or home_key(keys, size)
        stream.answer(asked, Found(len(ids), cached, home))

    async def _ids_of(self, prompt: bytes) -> list[int]:
        try:
            value = decode_json(prompt)
        except NotJson:
            return []
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
            value = value[0]
        if isinstance(value, str) and self._tokenizer is not None:
            return await asyncio.to_thread(self._encode, value)
        return value if isinstance(value, list) else []

    def _encode(self, text: str) -> list[int]:
        """Return no ids for a text at which the library fails: the engine reports the error."""
        try:
            with panics_as(ValueError):
                return list(self._tokenizer.encode(text).ids)
        except Exception:
            return []


async def _run(stream: socket.socket) -> int:
    """Return the exit status."""
    frames: asyncio.Queue[FromParent | None] = asyncio.Queue()  # None: the parent has ended.
    parent = FrameStream(decode_from_parent, frames.put_nowait, lambda: frames.put_nowait(None))
    await asyncio.get_running_loop().create_unix_connection(lambda: parent, sock=stream)
    begin = await frames.get()
    if not isinstance(begin, Begin):
        return 0
    logging.config.dictConfig(begin.log_config)
    try:
        process = IndexProcess(begin)
        await process.start(parent)
        while (frame := await frames.get()) is not None:
            process.hear(frame)
        return 0
    except Exception:
        logger.critical("the index of prefixes cannot be started, or has failed", exc_info=True)
        return 1
    finally:
        with suppress(OSError):  # A router that was killed could not remove them.
            os.unlink(begin.path)
            os.rmdir(os.path.dirname(begin.path))


def main(descriptor: int) -> None:
    os._exit(asyncio.run(_run(socket.socket(fileno=descriptor))))  # ZeroMQ would wait for its peers.
