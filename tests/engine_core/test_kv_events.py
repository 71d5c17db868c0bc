"""KV events on the wire: vLLM's format, numbers without gaps, replay, and correct contents."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from baton.core.config import CacheConfig, EngineConfig, KVEventsConfig
from baton.core.errors import ConfigError, UserError
from baton.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from baton.engine.api import SamplingParams
from baton.engine.core.kv_event_publisher import END, KVEventPublisher
from baton.engine.llm import LLM
from baton.router.fleet.block_index import NO_MATCH, BlockIndex, prefix_keys, root_key
from examples.kv_event_subscriber import CacheView, Subscriber
from tests.engine_sched.world import BLOCK, World

WAIT_MS = 30_000  # Only reached when something is wrong.
LOCAL = "tcp://127.0.0.1:*"  # Any free port.
Publish = Callable[..., KVEventPublisher]


def stored(*numbers: int) -> BlockStored:
    return BlockStored(
        block_hashes=[bytes([number]) for number in numbers],
        parent_block_hash=None,
        token_ids=list(range(4)),
        block_size=4,
        medium="GPU",
    )


@pytest.fixture
def publisher() -> Iterator[Publish]:
    made = []

    def make(**fields: Any) -> KVEventPublisher:
        config = KVEventsConfig(
            enable_kv_cache_events=True, **{"endpoint": LOCAL, "replay_endpoint": LOCAL, **fields}
        )
        made.append(KVEventPublisher(config, clock=lambda: 12.5))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def subscribed(context: zmq.Context[Any], publisher: KVEventPublisher, topic: str = "") -> zmq.Socket[bytes]:
    """A subscriber that the publisher knows. Events before the subscription arrives are missed."""
    socket: zmq.Socket[bytes] = context.socket(zmq.SUB)
    socket.connect(publisher.endpoint)
    socket.subscribe(topic)
    while not socket.poll(20):
        publisher.publish([])
    return socket


def replayed(context: zmq.Context[Any], endpoint: str, frames: tuple[bytes, ...]) -> list[list[bytes]]:
    with context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        socket.send_multipart(frames)
        answers: list[list[bytes]] = []
        while not answers or answers[-1][-2] != END:
            assert socket.poll(WAIT_MS)
            answers.append(socket.recv_multipart())
    return answers


def test_the_frames_are_vllms(publisher: Publish, context: zmq.Context[Any]) -> None:
    made = publisher(topic="kv@engine")
    socket = subscribed(context, made, "kv@")
    events: list[KVCacheEvent] = [stored(1, 2), BlockRemoved(block_hashes=[b"\x01"], medium="GPU")]
    made.publish([*events, AllBlocksCleared()])
    while True:
        assert socket.poll(WAIT_MS)
        topic, number, payload = socket.recv_multipart()
        assert topic == b"kv@engine"
        assert len(number) == 8
        if msgspec.msgpack.decode(payload)[1]:
            break
    assert int.from_bytes(number, "big") > 0
    ts, decoded, data_parallel_rank = msgspec.msgpack.decode(payload)
    assert (ts, data_parallel_rank) == (12.5, 0)
    assert decoded == [
        {
            "type": "BlockStored",
            "block_hashes": [b"\x01", b"\x02"],
            "parent_block_hash": None,
            "token_ids": [0, 1, 2, 3],
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        },
        {"type": "BlockRemoved", "block_hashes": [b"\x01"], "medium": "GPU"},
        {"type": "AllBlocksCleared"},
    ]
    socket.close()
    assert msgspec.msgpack.decode(payload, type=KVEventBatch).events == [*events, AllBlocksCleared()]


def test_missed_batches_are_replayed_from_any_number(publisher: Publish, context: zmq.Context[Any]) -> None:
    made = publisher(buffer_steps=5)
    for number in range(8):
        made.publish([stored(number)])
    assert made.replay_endpoint is not None
    # The queue is emptied in order, but a replay may overtake it.
    answers: list[list[bytes]] = []
    while bytes(7) + b"\x07" not in [answer[-2] for answer in answers]:
        answers = replayed(context, made.replay_endpoint, (b"", bytes(8)))
    numbers = [int.from_bytes(answer[-2], "big") for answer in answers[:-1]]
    assert numbers == [3, 4, 5, 6, 7], "only the batches in the buffer"
    assert answers[-1] == [b"", b"", END, b""]
    later = replayed(context, made.replay_endpoint, (b"", (6).to_bytes(8, "big")))
    assert [msgspec.msgpack.decode(answer[-1])[1][0]["block_hashes"] for answer in later[:-1]] == [
        [b"\x06"],
        [b"\x07"],
    ]


def test_a_malformed_request_affects_no_subscriber(publisher: Publish, context: zmq.Context[Any]) -> None:
    made = publisher()
    assert made.replay_endpoint is not None
    with context.socket(zmq.DEALER) as socket:
        socket.connect(made.replay_endpoint)
        for frames in ((b"",), (b"", b"short"), (b"", bytes(8), b"more"), (b"x", bytes(8))):
            socket.send_multipart(frames)
    made.publish([stored(1)])
    assert replayed(context, made.replay_endpoint, (b"", bytes(8)))[-1][-2] == END


def test_a_full_queue_never_holds_the_engine_up_and_the_gap_shows(publisher: Publish) -> None:
    made = publisher(max_queue_size=3)
    made._taken.unbind("inproc://batches")  # The thread takes no batch any more.
    for _ in range(50):
        made.publish([stored(1)])
    assert made.num_dropped > 0
    assert made._next == 50


def test_the_death_of_the_thread_loses_events_only(
    context: zmq.Context[Any], caplog: pytest.LogCaptureFixture
) -> None:
    class Dying(KVEventPublisher):
        def _serve_replay(self, frames: list[bytes]) -> None:
            raise zmq.ZMQError(zmq.ENOBUFS)

    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=LOCAL, replay_endpoint=LOCAL)
    publisher = Dying(config, clock=lambda: 12.5)
    assert publisher.replay_endpoint is not None
    with context.socket(zmq.DEALER) as replay:
        replay.connect(publisher.replay_endpoint)
        replay.send_multipart((b"", bytes(8)))
        publisher._thread.join(WAIT_MS / 1e3)
    assert not publisher._thread.is_alive()
    assert "the engine goes on without them" in caplog.text
    publisher.publish([stored(1)])
    assert publisher.num_dropped == 1
    publisher.close()
    assert "left" not in caplog.text


@pytest.mark.parametrize(
    ("field", "endpoint"), [("endpoint", "tcp://127.0.0.1:port"), ("replay_endpoint", "x")]
)
def test_an_endpoint_that_cannot_be_used_is_named(publisher: Publish, field: str, endpoint: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_events_config.{field}"):
        publisher(**{field: endpoint})


@pytest.mark.parametrize(
    ("endpoint", "warns"),
    [
        ("tcp://127.0.0.1:*", False),
        ("tcp://[::1]:*", False),
        ("tcp://localhost:*", False),
        ("tcp://*:*", True),
        ("tcp://[::]:*", True),
        ("tcp://[::ffff:0.0.0.0]:*", True),
    ],
)
def test_an_endpoint_beyond_the_loopback_is_warned_about(
    publisher: Publish, caplog: pytest.LogCaptureFixture, endpoint: str, warns: bool
) -> None:
    publisher(endpoint=endpoint)
    assert ("readable by hosts that reach" in caplog.text) == warns


def test_a_port_that_is_taken_is_a_configuration_error(publisher: Publish) -> None:
    taken = publisher()
    with pytest.raises(ConfigError, match=r"kv_events_config\.endpoint.*in use"):
        publisher(endpoint=taken.endpoint)


def test_closing_twice_is_harmless(publisher: Publish) -> None:
    made = publisher()
    made.close()
    made.close()


# --- The example's subscriber -------------------------------------------------------------------------


@pytest.mark.slow
def test_the_examples_subscriber_follows_an_engine_and_replays_what_it_missed(
    make_config: Callable[..., EngineConfig],
) -> None:
    events = KVEventsConfig(enable_kv_cache_events=True, endpoint=LOCAL, replay_endpoint=LOCAL)
    config = make_config(cache_config=CacheConfig(num_gpu_blocks=24, block_size=4), kv_events_config=events)
    with LLM(config) as llm:
        made = llm.core._event_publisher
        assert made is not None
        sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        for step in (3, 5, 7):  # No subscriber exists yet; the prompts are more than the cache holds.
            llm.generate([[(step * i) % 500 + 5 for i in range(40)]], sampling)
        subscriber = Subscriber(made.endpoint, made.replay_endpoint)
        number = 0
        while subscriber.view.next_number != made._next:
            number += 1
            if not subscriber.receive(50):
                llm.generate([[number % 500] * 9], sampling)
        (cached,) = llm.core.scheduler.kv_cache.block_pool._cached  # There is one group.
        assert {block for block, _, _ in subscriber.view.blocks} == set(cached)
        assert len(cached) > 3
        subscriber.close()


def test_a_router_finds_prompts_where_an_engine_has_them() -> None:
    world, index = World(num_blocks=500, max_model_len=700, events=True), BlockIndex()
    plain, salted = ([step * i % 47 + 1 for i in range(600)] for step in (3, 5))
    world.add("plain", plain)
    world.add("salted", salted, salt="theirs")
    while world.scheduler.requests:
        world.step()
        index.apply("e", world.scheduler.take_events())

    def found(ids: list[int], salt: str | None) -> int:
        matches = index.match(prefix_keys(ids, BLOCK, root_key(None, salt)), BLOCK)
        return matches.get("e", NO_MATCH).num_tokens

    assert (found(plain, None), found(plain, "theirs")) == (512, 0)
    assert (found(salted, None), found(salted, "theirs"), found(salted, "ours")) == (0, 512, 0)


# --- Events of connectors ------------------------------------------------------------------------------


def test_events_of_a_connector_are_published_with_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(events=True)
    monkeypatch.setattr(world.half, "take_events", lambda: [stored(7)])
    world.add("a", range(1, 10))
    world.step()
    events = world.scheduler.take_events()
    assert stored(7) in events
    assert len(events) > 1


@pytest.mark.parametrize("garbage", [7, ["stored"], [stored(7), {"type": "BlockStored"}]])
def test_objects_of_other_types_are_not_published_as_events(
    monkeypatch: pytest.MonkeyPatch, garbage: Any
) -> None:
    world = World(events=True)
    monkeypatch.setattr(world.half, "take_events", lambda: garbage)
    world.add("a", range(1, 4))
    world.step()
    assert world.scheduler.take_events() == []
    world.run()
    world.check_answer("a")


# --- Consistency with the cache ------------------------------------------------------------------------


class Truth(RuleBasedStateMachine):
    """A subscriber's view equals the contents of the cache after each batch."""

    @initialize(num_blocks=st.integers(6, 20), budget=st.sampled_from([5, 40]))
    def start(self, num_blocks: int, budget: int) -> None:
        self.world = World(num_blocks=num_blocks, budget=budget, max_model_len=40, events=True)
        self.world.half.verdict = self._verdict
        self.world.bad_sync_blocks = lambda load: (
            {load.block_ids[load.first_token // BLOCK]} if self.is_bad else set()
        )
        self.is_bad = False
        self.count = 0
        self.view = CacheView()

    def _verdict(self, request: Any, local: int) -> tuple[int | None, bool]:
        kind = request.request_id.split("-")[1]
        there = request.num_tokens // BLOCK * BLOCK - local
        return (there, kind == "async") if kind != "compute" and there > 0 else (0, False)

    @rule(
        stem=st.integers(0, 2),
        length=st.integers(1, 22),
        kind=st.sampled_from(["compute", "compute", "async", "sync"]),
        max_tokens=st.integers(1, 6),
    )
    def arrive(self, stem: int, length: int, kind: str, max_tokens: int) -> None:
        self.count += 1
        prompt = [1 + (7 * stem + i) % 40 for i in range(length)]
        with suppress(UserError):  # The whole pool could not hold it.
            self.world.add(f"{self.count}-{kind}", prompt, max_tokens=max_tokens)

    @rule(is_bad=st.booleans())
    def step(self, is_bad: bool) -> None:
        self.is_bad = is_bad
        self.world.step()
        self.take()

    @rule(data=st.data(), is_bad=st.booleans())
    def load_ends(self, data: st.DataObject, is_bad: bool) -> None:
        if self.world.half.loads:
            request_id = data.draw(st.sampled_from(sorted(self.world.half.loads)))
            self.world.end_load(request_id, bad_indices={0} if is_bad else set())

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.world.scheduler.requests:
            self.world.scheduler.abort([data.draw(st.sampled_from(sorted(self.world.scheduler.requests)))])

    @rule()
    def reset(self) -> None:
        self.world.scheduler.reset_prefix_cache()
        self.world.step()
        self.take()

    def take(self) -> None:
        events = self.world.scheduler.take_events()
        self.view.apply(0, msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=events)))
        (cached,) = self.world.scheduler.kv_cache.block_pool._cached  # One group.
        assert {block for block, _, _ in self.view.blocks} == set(cached)


TestTruth = Truth.TestCase
TestTruth.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
