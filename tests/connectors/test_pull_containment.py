"""A bad request, frame or cache, or a fault of ours, fails alone. Other errors are raised."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from baton.connectors.pull import EngineIdentity, PullSchedulerHalf
from baton.connectors.pull.reads.cache_layout import layout_of
from baton.contract import ConnectorDead
from baton.core.errors import BadTransferParams, ConfigError
from baton.core.ids import Address, BlockId, EngineId, Epoch, LoanId, PromptHash, TransferId
from baton.core.layout import KEYS_AND_VALUES, CacheSpec
from baton.protocol.messages import (
    WIRE_VERSION,
    Announced,
    Envelope,
    Finished,
    Gone,
    Message,
    Released,
    Renew,
    Renewed,
    Stranger,
    Want,
    Withdraw,
)
from baton.protocol.signed_frame import ProcessKey
from baton.transport.control.channel import ControlChannel
from tests.connectors.pull_world import BLOCK, SECRET, FakeRequest, World, engine_config

PATIENCE_S = 60.0
TOKENS = list(range(9))


def breaks(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a fault of ours")


# --- Our own faults ----------------------------------------------------------------------------------


def test_a_fault_at_arrival_is_computed_away(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = world.engine("p"), world.engine("d")
    params = p.prefill("r", TOKENS)
    monkeypatch.setattr(d.half._agent.consumer, "reserve", breaks)
    assert not d.admit(d.submit("r", TOKENS, params))
    world.settle()
    assert d.counted("failures") == {"internal error": 1}


def test_a_fault_at_the_end_of_a_prefill_lends_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    p = world.engine("p")
    with monkeypatch.context() as broken:
        broken.setattr(p.half._loans, "_params", breaks)
        assert p.finish_prefill("r", TOKENS) is None
    world.pass_time(
        31
    )  # No consumer has its ticket; no peer hears that blocks are free which never were lent.
    world.assert_whole()


# --- Peers that misbehave ----------------------------------------------------------------------------


@pytest.fixture
def half() -> Iterator[PullSchedulerHalf]:
    half = PullSchedulerHalf(EngineIdentity.of_engine(engine_config("e")))
    yield half
    half.shutdown()


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while not done():
        assert time.monotonic() < deadline, "it never happened"
        pause.wait(0.005)


class Member:
    """A process that has the cluster secret, and says what it likes."""

    def __init__(self, engine_id: str = "member") -> None:
        self.key = ProcessKey()
        self.address = Address(EngineId(engine_id), self.key.epoch)
        self.channel = ControlChannel(secret=SECRET)

    def say(self, half: PullSchedulerHalf, *messages: Message, sender: Address | None = None) -> None:
        envelope = Envelope(WIRE_VERSION, sender or self.address, half._agent.address, messages)
        assert self.channel.send(half._control.url, self.key.sign(envelope, half._control.public_key))

    def hear(self) -> list[Envelope]:
        return [self.key.open(r.frame, self.address).envelope for r in self.channel.poll(0.05)]


@pytest.fixture
def members() -> Iterator[list[Member]]:
    members = [Member("claimer"), Member("liar")]
    yield members
    for member in members:
        member.channel.close()


def test_a_malformed_frame_is_dropped_and_counted(half: PullSchedulerHalf, members: list[Member]) -> None:
    claimer, _ = members
    claimer.channel.send(half._control.url, b"GET / HTTP/1.1")
    claimer.say(half)
    claimer.channel.poll(0.05)
    wait_until(lambda: half._control.num_bad_frames == 1)
    half.build_connector_meta(None)  # type: ignore[arg-type]
    stats = half.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["num_bad_frames"] == 1


def lend(half: PullSchedulerHalf) -> LoanId:
    with half._lock:
        loan_id = half._agent.producer.lend(half._clock())
    assert loan_id is not None
    return loan_id


@pytest.mark.parametrize(
    "message",
    [
        Want(TransferId("t"), 1, PromptHash(bytes(32)), 9),
        Withdraw(TransferId("t"), 1),
        Renew(LoanId(Epoch(1), 1), 1, 1),
        Released(LoanId(Epoch(1), 1), claim=1),
        Renewed(LoanId(Epoch(1), 1), 1, 1, 1e6),
        Gone(LoanId(Epoch(1), 1), 1),
        Finished(TransferId("t"), 1, 1, "ticket"),
        Announced(TransferId("t"), 1, 1, 4, ((BlockId(7),),)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_nothing_that_a_member_says_in_anothers_name_is_heard(
    half: PullSchedulerHalf, members: list[Member], monkeypatch: pytest.MonkeyPatch, message: Message
) -> None:
    claimer, liar = members
    heard: list[Envelope] = []
    monkeypatch.setattr(half._agent, "receive", lambda envelope, now: heard.append(envelope))
    liar.say(half, message, sender=claimer.address)
    liar.say(half, message)  # This one has the liar's own name.
    wait_until(lambda: not liar.hear() and bool(heard))
    assert [envelope.sender for envelope in heard] == [liar.address]
    assert half._control.num_forged_frames == 1  # type: ignore[attr-defined]


def test_a_member_cannot_say_that_another_is_gone(half: PullSchedulerHalf, members: list[Member]) -> None:
    producer, liar = members
    with half._lock:
        half._control.route(producer.address, producer.channel.url, producer.key.public)
        assert half._agent.consumer.reserve(
            LoanId(producer.address.epoch, 1), producer.address, half._clock()
        )
        half._control.flush()
    wait_until(lambda: bool(producer.hear()))
    liar.say(half, Stranger(producer.address), Renew(LoanId(half._agent.address.epoch, 9), 1, 1))
    wait_until(lambda: bool(liar.hear()))  # The frame has been read to its end.
    assert half.num_open_fetches == 1


def test_what_is_meant_for_a_predecessor_is_answered_and_changes_no_way(
    half: PullSchedulerHalf, members: list[Member]
) -> None:
    claimer, _ = members
    predecessor = Address(half._agent.address.engine_id, Epoch(1))
    envelope = Envelope(WIRE_VERSION, claimer.address, predecessor, (Renew(LoanId(Epoch(1), 1), 1, 1),))
    claimer.channel.send(half._control.url, claimer.key.sign(envelope, None))
    heard: list[Envelope] = []
    wait_until(lambda: bool(heard.extend(claimer.hear()) or heard))
    assert (heard[0].sender, heard[0].messages) == (half._agent.address, (Stranger(predecessor),))
    assert not half._control._ways  # type: ignore[attr-defined]


def test_a_ticket_with_the_key_of_another_process_is_refused(
    half: PullSchedulerHalf, members: list[Member]
) -> None:
    producer, liar = members
    with half._lock, pytest.raises(BadTransferParams, match="key of another process"):
        half._control.route(producer.address, liar.channel.url, liar.key.public)


def test_such_a_ticket_is_counted_and_its_prompt_is_computed(half: PullSchedulerHalf, world: World) -> None:
    """The engines of `World` have no keys, so that none fits their addresses."""
    request = FakeRequest("r", TOKENS, world.engine("p").prefill("r", TOKENS))
    half.on_new_request(request)
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)
    stats = half.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["refused"] == {"params": 1}
    assert half.num_open_fetches == 0


def test_a_turn_that_fails_costs_the_control_thread_nothing_else(
    half: PullSchedulerHalf, members: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    claimer, _ = members
    loan_id = lend(half)
    with monkeypatch.context() as broken:
        failed = threading.Event()

        def breaks_once(*args: Any) -> None:
            failed.set()
            breaks()

        broken.setattr(half._agent, "receive", breaks_once)
        claimer.say(half, Renew(loan_id, claim=1, sequence=1))
        wait_until(lambda: not claimer.hear() and failed.is_set())
    claimer.say(half, Renew(loan_id, claim=1, sequence=2))
    wait_until(lambda: bool(claimer.hear()))
    half.build_connector_meta(None)  # type: ignore[arg-type]
    assert half.num_open_loans == 1


def test_the_death_of_the_control_thread_is_heard(
    half: PullSchedulerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half._agent, "wake", breaks)
    half._control._channel.wake()  # type: ignore[attr-defined]
    wait_until(lambda: not half._control._thread.is_alive())  # type: ignore[attr-defined]
    with pytest.raises(ConnectorDead, match="control thread of the pull connector died"):
        half.build_connector_meta(None)  # type: ignore[arg-type]


def test_a_port_that_is_taken_is_the_operators_error() -> None:
    taken = ControlChannel()
    try:
        identity = EngineIdentity.of_engine(engine_config("e", extra={"port": taken.port}))
        with pytest.raises(ConfigError, match="port"):
            PullSchedulerHalf(identity)
    finally:
        taken.close()


# --- Caches ------------------------------------------------------------------------------------------


def test_layers_of_one_storage_share_a_region() -> None:
    identity = EngineIdentity.of_engine(engine_config("e"))
    cache = torch.zeros(2, 8, 4, BLOCK, 4)
    layout = layout_of({"a": cache[0], "b": cache[1]}, identity)
    assert [(r.address, r.nbytes) for r in layout.regions] == [(cache.data_ptr(), cache.nbytes)]
    assert [layer.offset for layer in layout.layers] == [0, cache[0].nbytes]
    assert (layout.num_blocks, layout.block_tokens) == (8, BLOCK)
    assert {layer.spec for layer in layout.layers} == {CacheSpec(KEYS_AND_VALUES, "float32", 4)}


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (torch.zeros(8, BLOCK), "has shape"),
        (torch.zeros(8, BLOCK, 4), "has 1 KV heads; this rank holds 4 of 4"),
        (torch.zeros(8, 4, BLOCK * 2, 4), "block_size is"),
        (torch.zeros(8, 4, 4, BLOCK).transpose(2, 3), "content of a token and head contiguous"),
    ],
)
def test_a_cache_that_no_plan_can_describe_is_refused(cache: torch.Tensor, message: str) -> None:
    identity = EngineIdentity.of_engine(engine_config("e"))
    with pytest.raises(ConfigError, match=rf"kv_caches\.layer.*{message}"):
        layout_of({"layer": cache}, identity)
    with pytest.raises(ConfigError, match="no layers"):
        layout_of({}, identity)
