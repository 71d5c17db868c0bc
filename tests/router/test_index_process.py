"""KV events of real publishers, the index process, and requests that go where their prompt is cached."""

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from baton.checkpoints.random_tokenizer import write_tokenizer
from baton.core.config import KVEventsConfig
from baton.core.errors import ConfigError
from baton.core.kv_events import AllBlocksCleared, BlockStored
from baton.engine.core.kv_event_publisher import KVEventPublisher
from baton.engine.text.tokenizer import Tokenizer
from baton.router.fleet.block_index import home_key, prefix_keys, root_key
from baton.router.fleet.breaker import Probe
from baton.router.fleet.notes import EngineLoad
from baton.router.request.events import Look
from baton.router.shell import index_client
from baton.router.values.settings import KVEventsSource, sources_of
from tests.router.fakes import Call, FakeEngine, Respond, Servers, System, answers, lends
from tests.router.fakes import system as router_system
from tests.router.test_pairs import KV_IDENTITY
from tests.router.test_workers import two_workers, until_gone

pytestmark = [pytest.mark.processes, pytest.mark.slow]

BLOCK, PROMPT = 16, list(range(1, 1025))
KEYS = prefix_keys(PROMPT, BLOCK, root_key(None, None))
LOCAL = "tcp://127.0.0.1:*"
WAIT_S = 60.0


class Publishers:
    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def start(self, endpoint: str = LOCAL) -> KVEventPublisher:
        config = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, replay_endpoint=LOCAL)
        publisher = KVEventPublisher(config, clock=lambda: 0.0)
        self._stack.callback(publisher.close)
        return publisher


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer for the index, whose answers are late on a busy machine."""
    monkeypatch.setattr(index_client, "LOOK_S", WAIT_S)
    monkeypatch.setattr(index_client, "TOKENIZE_S", WAIT_S)


@pytest.fixture
def publishers() -> Any:
    with ExitStack() as stack:
        yield Publishers(stack)


@pytest.fixture
def short_folder() -> Iterator[str]:
    """A socket's path in `tmp_path` would be too long."""
    with TemporaryDirectory() as folder:
        yield folder


def index_process(router: int | None = None) -> psutil.Process:
    """`router`: its process; None: this one."""
    (process,) = [one for one in psutil.Process(router).children() if "index_process" in str(one.cmdline())]
    return process


class Fleet:
    def __init__(self, system: System, p: list[FakeEngine], publishers: list[KVEventPublisher]) -> None:
        self.system, self.p, self.publishers = system, p, publishers

    @property
    def index(self) -> index_client.IndexClient:
        assert self.system.router.control is not None
        assert self.system.router.control.index is not None
        return self.system.router.control.index

    async def indexed(self) -> list[int | None]:
        status = (await self.system.client.get("/status")).json()
        return [one["indexed_blocks"] for one in status["engines"] if one["type"] == "prefill"]

    async def until_indexed(self, *wanted: int) -> None:
        client = self.index
        async with asyncio.timeout(WAIT_S):
            while await self.indexed() != list(wanted) or not client.is_connected:
                pass

    async def asks(self, prompt: Any, **body: Any) -> list[int]:
        """The calls of each prefill engine."""
        before = [len(one.calls) for one in self.p]
        assert (await self.system.complete(prompt=prompt, **body)).status_code == 200
        return [len(one.calls) - number for one, number in zip(self.p, before, strict=True)]


@asynccontextmanager
async def fleet(
    publishers: Publishers,
    num_producers: int = 2,
    decode: Respond = answers,
    others: tuple[KVEventsSource, ...] = (),
    card: dict[str, Any] | None = None,
    can_replay: bool = True,
    **settings: Any,
) -> AsyncIterator[Fleet]:
    """Prefill engines that publish, and a decode engine that is too slow to compute a prompt.

    `card`: of Baton's prefill engines, what their introductions have; None: they are of another kind.
    """
    servers, consumer = Servers(), FakeEngine(decode)
    name = None if card is None else "p"
    producers = [FakeEngine(lends, introduces_as=name, card=card or {}) for _ in range(num_producers)]
    made = [publishers.start() for _ in producers]
    try:
        for engine in (*producers, consumer):
            engine.url, engine.prefills = await servers.start(engine), defaultdict(asyncio.Event)
        sources = tuple(
            KVEventsSource(engine.url, publisher.endpoint, publisher.replay_endpoint if can_replay else None)
            for engine, publisher in zip(producers, made, strict=True)
        )
        urls = [engine.url for engine in producers]
        how = {"policy": "cost", "kv_events": sources + others, **settings}
        async with router_system([*urls], [consumer.url], **how) as system:
            for engine in system.router.fleet.engines:
                engine.prefill_rate.note(1e4 if engine.role == "prefill" else 1.0)
            yield Fleet(system, producers, made)
    finally:
        await servers.stop()


def stored(ids: list[int], name: str = "a", **fields: Any) -> BlockStored:
    names: list[Any] = [f"{name} {number}".encode() for number in range(len(ids) // BLOCK)]
    ids = ids[: len(names) * BLOCK]
    how = {"parent_block_hash": None, "medium": "GPU", **fields}
    return BlockStored(block_hashes=names, token_ids=ids, block_size=BLOCK, **how)


async def test_the_events_of_an_engine_that_joins_later_are_read(publishers: Publishers) -> None:
    publisher, servers = publishers.start(), Servers()
    endpoint, replay = (
        one.replace("127.0.0.1", "{host}") for one in (publisher.endpoint, publisher.replay_endpoint or "")
    )
    publisher.publish([stored(PROMPT)])
    others = (KVEventsSource("*", endpoint, replay),)
    async with fleet(publishers, num_producers=1, others=others, checked_hosts=("127.0.0.1",)) as f:
        await f.until_indexed(0)
        order = {"type": "prefill", "instance": await servers.start(FakeEngine(lends))}
        for _ in range(2):  # The engine joins, leaves, and joins again.
            assert (await f.system.client.post("/instances/add", json=order)).status_code == 200
            await f.until_indexed(0, len(PROMPT) // BLOCK)
            assert (await f.system.client.post("/instances/remove", json=order)).status_code == 200
            await f.until_indexed(0)
    await servers.stop()


@pytest.mark.parametrize(
    ("url", "endpoint"), [("*", "tcp://10.0.0.7:5557"), ("http://p:1", "tcp://{host}:5557")]
)
def test_only_the_source_of_all_engines_has_a_placeholder(url: str, endpoint: str) -> None:
    with pytest.raises(ConfigError, match="kv_events"):
        KVEventsSource(url, endpoint)


def test_the_source_of_all_engines_is_for_those_without_their_own() -> None:
    named = KVEventsSource("http://p:1", "tcp://p:5")
    any_engine = KVEventsSource("*", "tcp://{host}:5557", "tcp://{host}:5558")
    assert sources_of([named, any_engine], ["http://p:1", "http://[::1]:2"]) == (
        named,
        KVEventsSource("http://[::1]:2", "tcp://[::1]:5557", "tcp://[::1]:5558"),
    )


async def test_a_prompt_goes_to_the_engine_that_has_it(publishers: Publishers) -> None:
    async with fleet(publishers) as f:
        f.publishers[1].publish([stored(PROMPT)])
        await f.until_indexed(0, len(PROMPT) // BLOCK)
        for _ in range(3):
            assert await f.asks(PROMPT) == [0, 1]
        explained = (await f.system.client.post("/explain", json={"prompt": PROMPT})).json()
        assert explained["num_prompt_tokens"] == len(PROMPT)
        assert explained["cached_tokens"] == {f.p[1].url: len(PROMPT)}
        assert [one["prefill"] for one in explained["candidates"]] == [f.p[1].url, None]
        assert all(one["is_below_caps"] for one in explained["candidates"])
        client = f.index
        assert (await client.find(Look(PROMPT, None, None))).home == home_key(KEYS, BLOCK)
        f.publishers[0].publish([stored(PROMPT)])
        f.publishers[1].publish([AllBlocksCleared()])
        await f.until_indexed(len(PROMPT) // BLOCK, 0)
        for _ in range(3):
            assert await f.asks(PROMPT) == [1, 0]


async def test_a_decode_engine_reads_what_a_busy_engine_lends(publishers: Publishers) -> None:
    async with fleet(publishers, card={"lends": ["host"]}) as f:
        lender = f.system.router.fleet.engines[1]
        async with asyncio.timeout(WAIT_S):
            while lender.introduction is None:
                await f.system.client.get("/status")
        for engine in f.system.router.fleet.engines[:2]:
            engine.elsewhere = EngineLoad(engine.key, num_queued_tokens=10**9)
        f.publishers[1].publish([stored(PROMPT, medium="CPU")])
        await f.until_indexed(0, len(PROMPT) // BLOCK)
        assert await f.asks(PROMPT) == [0, 1]
        assert f.p[1].calls[0].body["kv_transfer_params"] == {"baton_lend_stored": True}
        metrics = (await f.system.client.get("/metrics")).text
        assert 'baton:router_stored_loans_total{outcome="lent"} 1.0' in metrics


async def test_an_engine_that_empties_its_cache_is_asked_for_its_weights(publishers: Publishers) -> None:
    card = {"kv_identity": {**KV_IDENTITY, "version": "1"}}
    async with fleet(publishers, num_producers=1, card=card) as f:
        (engine, _), client = f.system.router.fleet.engines, f.system.client
        async with asyncio.timeout(WAIT_S):
            while engine.weights != "1":
                await client.get("/status")
            f.publishers[0].publish([stored(PROMPT)])
            await f.until_indexed(len(PROMPT) // BLOCK)
            f.p[0].card["kv_identity"] = {**KV_IDENTITY, "version": "2"}
            f.publishers[0].publish([AllBlocksCleared()])
            while engine.weights != "2":
                await client.get("/status")
            await f.until_indexed(0)
            f.publishers[0].publish([stored(PROMPT)])
            await f.until_indexed(len(PROMPT) // BLOCK)
            # No event reports this update.
            f.p[0].card["kv_identity"] = {**KV_IDENTITY, "version": "3"}
            await f.system.router.control.prober.probe(engine)
            await f.until_indexed(0)


async def test_events_from_before_the_router_are_replayed(publishers: Publishers) -> None:
    class Early(Publishers):
        def start(self, endpoint: str = LOCAL) -> KVEventPublisher:
            publisher = super().start(endpoint)
            publisher.publish([stored(PROMPT[:512])])
            return publisher

    with ExitStack() as stack:
        async with fleet(Early(stack), 1) as f:
            await f.until_indexed(32)


@pytest.mark.parametrize("can_replay", [True, False])
async def test_an_engine_that_restarts_between_two_probes_has_nothing(
    publishers: Publishers, can_replay: bool
) -> None:
    async with fleet(publishers, 2, can_replay=can_replay) as f:
        async with asyncio.timeout(WAIT_S):
            while await f.indexed() != [64, 64]:  # A first event may come before its reader has subscribed.
                for publisher in f.publishers:
                    publisher.publish([stored(PROMPT)])
        f.publishers[0].close()
        publishers.start(f.publishers[0].endpoint)  # The new publisher has no event yet.
        await f.until_indexed(0, 64)


async def test_a_text_is_found_by_the_ids_that_an_engine_gives_it(
    publishers: Publishers, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path, vocab=512, with_bos=True, max_position=4096)
    text = "Once upon a time there was a router. " * 100
    ids = Tokenizer.from_folder(tmp_path).encode(text)
    async with fleet(publishers, tokenizer=str(tmp_path)) as f:
        f.publishers[1].publish([stored(ids)])
        await f.until_indexed(0, len(ids) // BLOCK)
        for _ in range(3):
            assert await f.asks(text) == [0, 1]


CHAT = {
    "messages": [{"role": "user", "content": "Once upon a time. " * 100}],
    "tools": [],
    "metadata": {"not": "for the template"},
}


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_chat_is_found_by_the_ids_that_an_engine_gives_it(
    publishers: Publishers, is_known: bool
) -> None:
    tokenized: list[Any] = []

    async def tokenizes(call: Call) -> None:
        if call.received.path != "/tokenize":
            return await answers(call)
        tokenized.append(call.received.body)
        answer = {"tokens": PROMPT, "count": len(PROMPT), "max_model_len": 4096}
        return await (call.answer(200, answer) if is_known else call.answer(404, {}))

    async with fleet(publishers, decode=tokenizes) as f:
        f.publishers[1].publish([stored(PROMPT)])
        await f.until_indexed(0, 64)
        for _ in range(4):
            answer = await f.system.client.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 200
        # Prompts in no known cache go to one engine too, by their prefix.
        num_calls = [len(one.calls) for one in f.p]
        assert num_calls == [0, 4] if is_known else sorted(num_calls) == [0, 4]
    assert tokenized == [{"messages": CHAT["messages"], "tools": []}] * 4


async def test_an_engine_that_goes_down_is_forgotten(publishers: Publishers) -> None:
    async with fleet(publishers) as f:
        f.publishers[1].publish([stored(PROMPT)])
        await f.until_indexed(0, 64)
        f.publishers[1].close()
        engine = f.system.router.fleet.engines[1]
        f.system.router.fleet.health.note_probe(engine, Probe("refused", "it is away"), 0.0)
        await f.until_indexed(0, 0)


async def test_the_index_process_is_started_again_and_meanwhile_requests_are_served(
    publishers: Publishers,
) -> None:
    async with fleet(publishers) as f:
        f.publishers[1].publish([stored(PROMPT)])
        await f.until_indexed(0, 64)
        process = index_process()
        process.kill()
        process.wait(WAIT_S)
        assert sum(await f.asks(PROMPT)) == 1
        f.publishers[1].publish([stored(PROMPT, "b", parent_block_hash=b"a 63")])
        await f.until_indexed(0, 128)
        assert await f.asks(PROMPT) == [0, 1]


async def test_a_stopped_index_process_is_waited_for_once(
    publishers: Publishers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(publishers) as f:
        f.publishers[1].publish([stored(PROMPT)])
        await f.until_indexed(0, 64)
        monkeypatch.setattr(index_client, "LOOK_S", 0.01)
        monkeypatch.setattr(index_client, "RETRY_S", WAIT_S)
        process, client = index_process(), f.index
        process.suspend()
        try:
            assert [sum(await f.asks(PROMPT)) for _ in range(3)] == [1, 1, 1]
            assert client._stream is not None
            assert client._stream._num_asked == 1
        finally:
            process.resume()


async def test_all_workers_of_a_router_ask_one_index_and_none_leaves_files(
    publishers: Publishers, monkeypatch: pytest.MonkeyPatch, short_folder: str
) -> None:
    """The decode engine would compute the prompt itself, if the prefill engine did not have it.

    At the end the router is killed.
    """
    monkeypatch.setenv("TMPDIR", short_folder)
    publisher, servers, p = publishers.start(), Servers(), FakeEngine(lends)
    events = f"{{prefill}}={publisher.endpoint},{publisher.replay_endpoint}"
    options = ("--policy", "cost", "--kv-events", events)
    async with two_workers(servers, p, FakeEngine(answers), *options) as router, router.client() as client:
        assert len(router.pids) == 3
        index = index_process(router.process.pid)
        assert os.listdir(short_folder)
        publisher.publish([stored(PROMPT)])
        async with asyncio.timeout(WAIT_S):
            while (await client.get("/status")).json()["engines"][0]["indexed_blocks"] != 64:
                pass
        async with asyncio.timeout(WAIT_S):
            while len(p.calls) < 20:  # A worker that does not get its answer in time leaves the prompt to D.
                assert (await client.post("/v1/completions", json={"prompt": PROMPT})).status_code == 200
    await until_gone({index.pid})
    assert os.listdir(short_folder) == []


async def test_what_cannot_be_looked_up_is_served(publishers: Publishers) -> None:
    async with fleet(publishers, 1) as f:
        f.publishers[0].publish([stored(PROMPT)])
        await f.until_indexed(64)
        for prompt in ("a" * 2000, [[1] * 600], [2**40] * 600, ["a" * 2000], {"a": "b" * 2000}):
            assert sum(await f.asks(prompt)) <= 1, prompt
