"""A prompt is read while it is computed: in both orders, by chunk and by layer.

Transcripts (`push_*`) and worlds of `lab.sim` cover preemption, crashes, lost messages and retries.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton.core.errors import BadTransferParams
from baton.core.prefilled import PrefilledTokens
from baton.core.reasons import FailureCode
from baton.engine.request import RequestStatus
from baton.protocol.messages import Announced
from tests.connectors.pull_world import BLOCK, World
from tests.connectors.push_world import PushEngine, PushWorld, stream_params


@pytest.fixture
def world() -> Iterator[PushWorld]:
    world = PushWorld()
    yield world
    world.close()


def tokens_of(num_tokens: int, first: int = 0) -> list[int]:
    return [(first + i) % 97 for i in range(num_tokens)]


def pair(world: PushWorld, **config: Any) -> tuple[PushEngine, PushEngine]:
    return world.engine("p", num_blocks=32, **config), world.engine("d", num_blocks=32, **config)


def early_tokens(d: PushEngine) -> list[int]:
    return [record["early_tokens"] for record in d.counted("transfers")]


@pytest.mark.parametrize("stream", ["off", "chunk", "layer"])
@pytest.mark.parametrize("num_tokens", [1, BLOCK, 3 * BLOCK + 1, 5 * BLOCK])
def test_d_comes_first(world: PushWorld, stream: str, num_tokens: int) -> None:
    p, d = pair(world, stream=stream)
    tokens = tokens_of(num_tokens)
    request = d.follow("r", tokens, p)
    assert d.half.get_num_new_matched_tokens(request, 0) == (num_tokens, True)
    assert d.admit(request)
    world.settle()
    p.begin("r", tokens)
    first = num_tokens // 2
    p.prefill_in_chunks("r", *([first] if first else []), num_tokens - first)
    world.end_delivered(d, request)


def test_the_times_of_a_stream_are_in_order_and_begin_before_p_lends(world: PushWorld) -> None:
    p, d = pair(world, stream="chunk")
    tokens = tokens_of(3 * BLOCK)
    request = d.follow("r", tokens, p)
    d.admit(request)
    world.settle()
    p.begin("r", tokens)
    world.pass_time(1)
    p.prefill_in_chunks("r", BLOCK, 2 * BLOCK)
    world.settle()
    (fetched,), (lent,) = d.counted("transfers"), p.counted("loans")
    times = fetched["times"]
    in_order = [times[name] for name in ("claimed_s", "ready_s", "started_s", "read_s", "ended_s")]
    assert in_order == sorted(in_order)
    assert times["started_s"] <= lent["lent_s"]


@pytest.mark.parametrize("stream", ["off", "chunk", "layer"])
def test_p_finishes_first(world: PushWorld, stream: str) -> None:
    p, d = pair(world, stream=stream)
    tokens = tokens_of(11)
    p.begin("r", tokens)
    p.prefill_in_chunks("r", 8, 3)
    assert p.finished["r"] is not None
    world.pass_time(5)
    request = d.follow("r", tokens, p)
    d.admit(request)
    world.end_delivered(d, request)
    assert early_tokens(d) == [0]


def test_each_chunk_is_read_while_the_next_one_is_to_come(world: PushWorld) -> None:
    p, d = pair(world)
    request = world.stream(p, d, tokens_of(4 * BLOCK + 3))
    read = [world.network.reads]
    for chunk in (BLOCK + 1, BLOCK, 2 * BLOCK):
        p.prefill_in_chunks("r", chunk)
        read.append(world.network.reads)
    assert read == sorted(set(read)), "a chunk was not read before the next one"
    p.prefill_in_chunks("r", 2)
    world.end_delivered(d, request)
    assert early_tokens(d) == [4 * BLOCK]


@pytest.mark.parametrize("asks_late", [False, True])
def test_each_layer_is_read_while_the_next_one_computes(world: PushWorld, asks_late: bool) -> None:
    """Both legs leave the router at once, and one step computes all of a prompt that fits into it."""
    p, d = pair(world, stream="layer")
    tokens = tokens_of(2 * BLOCK)
    d.follow("warm", tokens_of(BLOCK, 50), p, "warm")  # Introductions are over.
    request = d.follow("r", tokens, p)
    reads: list[int] = []

    def read_along(layer: int) -> None:
        if asks_late and layer == 0:
            d.admit(request)
        for _ in range(3):
            world.wire.deliver()
            d.step()
        reads.append(world.network.reads)

    world.settle()
    if not asks_late:
        d.admit(request)
        world.settle()
    p.begin("r", tokens)
    p.on_layer = read_along
    p.prefill_in_chunks("r", 2 * BLOCK)
    assert reads == [1, 2], "a layer was not read before the next one"
    world.end_delivered(d, request, is_last=False)
    assert early_tokens(d) == [2 * BLOCK]


def test_what_p_had_cached_is_read_before_it_computes_anything(world: PushWorld) -> None:
    p, d = pair(world)
    request = world.stream(p, d, tokens_of(5 * BLOCK))
    told: list[Announced] = []

    def look(layer: int) -> None:
        world.wire.deliver()
        told.extend(m for e in world.wire.carried for m in e.messages if isinstance(m, Announced))

    p.on_layer = look
    p.prefill_in_chunks("r", 2 * BLOCK, num_cached=3 * BLOCK)
    assert told[0].num_tokens == 3 * BLOCK
    world.end_delivered(d, request)


def test_only_what_d_has_not_is_read(world: PushWorld) -> None:
    p, d = pair(world)
    request = world.stream(p, d, tokens_of(5 * BLOCK + 2), num_local=2 * BLOCK)
    p.prefill_in_chunks("r", 3 * BLOCK, 2 * BLOCK + 2)
    world.end_delivered(d, request)
    (record,) = d.counted("transfers")
    assert record["tokens"] == 3 * BLOCK + 2
    # Four blocks: layers, heads, tokens, K and V, float32.
    assert record["bytes"] <= 4 * 2 * 4 * BLOCK * 2 * 4


@pytest.mark.parametrize(("producer_tp", "consumer_tp"), [(1, 2), (4, 2)])
def test_every_rank_gets_its_heads(world: PushWorld, producer_tp: int, consumer_tp: int) -> None:
    p, d = (
        world.engine(name, tp=tp, stream="layer") for name, tp in (("p", producer_tp), ("d", consumer_tp))
    )
    request = world.stream(p, d, tokens_of(3 * BLOCK + 3))
    p.prefill_in_chunks("r", BLOCK, BLOCK, BLOCK + 3)
    world.end_delivered(d, request)


def test_an_aborted_prefill_is_computed_by_d(world: PushWorld) -> None:
    p, d = pair(world)
    request = world.stream(p, d, tokens_of(3 * BLOCK))
    p.prefill_in_chunks("r", BLOCK)
    p.end_prefill("r", RequestStatus.FINISHED_ABORTED)
    world.settle()
    assert d.read_out(request).valid_tokens == 0
    assert d.counted("failures") == {FailureCode.PREFILL_FAILED: 1}
    world.assert_settles_whole()


def test_a_prefill_whose_consumer_has_gone_leaves_no_loan(world: PushWorld) -> None:
    """The client left, and its proxy ended the one leg and not the other."""
    p, d = pair(world)
    request = world.stream(p, d, tokens_of(2 * BLOCK + 1))
    p.prefill_in_chunks("r", BLOCK)
    d.abort(request)
    world.settle()
    p.prefill_in_chunks("r", BLOCK + 1)
    assert p.finished["r"] is not None
    world.assert_whole()


def test_one_name_serves_one_request(world: PushWorld) -> None:
    p, d = world.engine("p"), world.engine("d", policy="fail")
    request = world.stream(p, d, tokens_of(9))
    with pytest.raises(BadTransferParams, match="in use"):
        d.follow("s", tokens_of(9), p)
    p.begin("again", tokens_of(9))  # The router's mistake; it is lent, and no consumer hears of it.
    p.prefill_in_chunks("again", 9)
    p.prefill_in_chunks("r", 9)
    world.end_delivered(d, request, is_last=False)
    world.pass_time(31)
    world.assert_whole()


def test_a_full_local_hit_reads_nothing(world: PushWorld) -> None:
    p, d = pair(world)
    tokens = tokens_of(2 * BLOCK)
    assert not d.admit(d.follow("r", tokens, p), num_local=2 * BLOCK)
    p.begin("r", tokens)
    p.prefill_in_chunks("r", 2 * BLOCK)
    assert world.network.reads == 0
    world.pass_time(31)
    world.assert_whole()


def test_the_first_token_comes_with_the_last_block(world: PushWorld) -> None:
    p, d = pair(world)
    sampled = PrefilledTokens((7,), None, b"digest")
    request = world.stream(p, d, tokens_of(9), prefilled_tokens=sampled)
    p.prefill_in_chunks("r", 9)
    world.settle()
    assert d.half.take_prefilled_tokens("r") == sampled
    world.end_delivered(d, request)


def test_the_engine_keeps_stepping_while_something_is_under_way_and_no_longer(world: PushWorld) -> None:
    p, d = pair(world)
    assert not d.half.has_pending_push_work()
    request = world.stream(p, d, tokens_of(9))
    assert d.half.has_pending_push_work()
    assert not p.half.has_pending_push_work()  # A prefill is a request of the host's, which steps for it.
    p.prefill_in_chunks("r", 4)
    assert d.half.has_pending_push_work()
    p.schedule("r", 5)
    p.step()
    assert p.lent
    assert not p.half.has_pending_push_work(), "an engine that lends and waits has nothing to do"
    world.end_delivered(d, request)
    assert not d.half.has_pending_push_work()
    assert not p.half.has_pending_push_work()


@pytest.mark.parametrize(
    ("make_world", "ending", "message"),
    [(World, "", "does not do"), (PushWorld, "AAAAAAA=", "baton_introduction")],
    ids=["an engine that only pulls", "an altered introduction"],
)
def test_a_stream_is_refused(
    world: PushWorld, make_world: Callable[[], World], ending: str, message: str
) -> None:
    params = stream_params(world.engine("p"), "t")
    introduction = params["baton_introduction"]
    params["baton_introduction"] = introduction[: len(introduction) - len(ending)] + ending
    others = make_world()
    with pytest.raises(BadTransferParams, match=message):
        others.engine("d", policy="fail").submit("r", tokens_of(9), params)
    others.close()
