"""A prompt is read while it is computed: in both orders, by chunk and by layer, with and without trouble."""

from collections.abc import Iterator

import pytest

from baton.core.errors import BadTransferParams
from baton.core.prefilled import PrefilledTokens
from baton.core.reasons import FailureCode
from baton.protocol.messages import Announced, Finished, Want, Working
from tests.connectors.pull_world import BLOCK, Status
from tests.connectors.push_world import PushEngine, PushWorld, stream_params


@pytest.fixture
def world() -> Iterator[PushWorld]:
    world = PushWorld()
    yield world
    world.close()


def tokens_of(num_tokens: int, first: int = 0) -> list[int]:
    return [(first + i) % 97 for i in range(num_tokens)]


def pair(world: PushWorld, **config: object) -> tuple[PushEngine, PushEngine]:
    return world.engine("p", num_blocks=32, **config), world.engine("d", num_blocks=32, **config)


def assert_delivered(world: PushWorld, d: PushEngine, request_id: str, tokens: list[int]) -> None:
    world.settle()
    outcome = d.outcomes[request_id]
    assert outcome.valid_tokens == len(tokens)
    assert d.holds(tokens, outcome.block_ids)


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
    assert_delivered(world, d, "r", tokens)
    d.read_out(request)
    world.assert_settles_whole()


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
    assert_delivered(world, d, "r", tokens)
    assert early_tokens(d) == [0]
    d.read_out(request)
    world.assert_settles_whole()


def test_each_chunk_is_read_while_the_next_one_is_to_come(world: PushWorld) -> None:
    p, d = pair(world)
    tokens = tokens_of(4 * BLOCK + 3)
    request = d.follow("r", tokens, p)
    d.admit(request)
    p.begin("r", tokens)
    read = [world.network.reads]
    for chunk in (BLOCK + 1, BLOCK, 2 * BLOCK):
        p.prefill_in_chunks("r", chunk)
        read.append(world.network.reads)
    assert read == sorted(set(read)), "a chunk was not read before the next one"
    p.prefill_in_chunks("r", 2)
    assert_delivered(world, d, "r", tokens)
    assert early_tokens(d) == [4 * BLOCK]
    d.read_out(request)
    world.assert_settles_whole()


def test_each_layer_is_read_while_the_next_one_computes(world: PushWorld) -> None:
    p, d = pair(world, stream="layer")
    tokens = tokens_of(2 * BLOCK)
    request = d.follow("r", tokens, p)
    d.admit(request)
    world.settle()
    p.begin("r", tokens)
    world.settle()
    reads: list[int] = []

    def read_along(layer: int) -> None:
        for _ in range(3):
            world.wire.deliver()
            d.step()
        reads.append(world.network.reads)

    p.on_layer = read_along
    p.prefill_in_chunks("r", 2 * BLOCK)
    assert reads == [1, 2], "a layer was not read before the next one"
    assert_delivered(world, d, "r", tokens)
    assert early_tokens(d) == [2 * BLOCK]
    d.read_out(request)
    world.assert_settles_whole()


def test_a_consumer_that_asks_when_the_only_step_has_begun_reads_along_too(world: PushWorld) -> None:
    """Both legs leave the router at once, and one step computes all of a prompt that fits into it."""
    p, d = pair(world, stream="layer")
    tokens = tokens_of(2 * BLOCK)
    d.follow("warm", tokens_of(BLOCK, 50), p, "warm")  # Introductions are over.
    world.settle()
    reads: list[int] = []

    def read_along(layer: int) -> None:
        if layer == 0:
            d.admit(d.follow("r", tokens, p))
        for _ in range(3):
            world.wire.deliver()
            d.step()
        reads.append(world.network.reads)

    p.on_layer = read_along
    p.begin("r", tokens)
    p.prefill_in_chunks("r", 2 * BLOCK)
    assert reads == [1, 2], "a layer was not read before the next one"
    assert_delivered(world, d, "r", tokens)
    assert early_tokens(d) == [2 * BLOCK]


def test_what_p_had_cached_is_read_before_it_computes_anything(world: PushWorld) -> None:
    p, d = pair(world)
    tokens = tokens_of(5 * BLOCK)
    request = d.follow("r", tokens, p)
    d.admit(request)
    p.begin("r", tokens)
    world.settle()
    told: list[Announced] = []

    def look(layer: int) -> None:
        world.wire.deliver()
        told.extend(m for e in world.wire.carried for m in e.messages if isinstance(m, Announced))

    p.on_layer = look
    p.prefill_in_chunks("r", 2 * BLOCK, num_cached=3 * BLOCK)
    assert told[0].num_tokens == 3 * BLOCK
    assert_delivered(world, d, "r", tokens)
    d.read_out(request)
    world.assert_settles_whole()


def test_only_what_d_has_not_is_read(world: PushWorld) -> None:
    p, d = pair(world)
    tokens = tokens_of(5 * BLOCK + 2)
    request = d.follow("r", tokens, p)
    d.admit(request, num_local=2 * BLOCK)
    p.begin("r", tokens)
    p.prefill_in_chunks("r", 3 * BLOCK, 2 * BLOCK + 2)
    assert_delivered(world, d, "r", tokens)
    (record,) = d.counted("transfers")
    assert record["tokens"] == 3 * BLOCK + 2
    assert (
        record["bytes"] <= 4 * 2 * 4 * BLOCK * 4 * 4
    )  # Four blocks: layers, heads, tokens, K and V, float32.
    d.read_out(request)
    world.assert_settles_whole()


@pytest.mark.parametrize("stream", ["chunk", "layer"])
@pytest.mark.parametrize(("producer_tp", "consumer_tp"), [(1, 2), (2, 1), (2, 2), (4, 2)])
def test_every_rank_gets_its_heads(world: PushWorld, stream: str, producer_tp: int, consumer_tp: int) -> None:
    p = world.engine("p", tp=producer_tp, stream=stream)
    d = world.engine("d", tp=consumer_tp, stream=stream)
    tokens = tokens_of(3 * BLOCK + 3)
    request = d.follow("r", tokens, p)
    d.admit(request)
    p.begin("r", tokens)
    p.prefill_in_chunks("r", BLOCK, BLOCK, BLOCK + 3)
    assert_delivered(world, d, "r", tokens)
    d.read_out(request)
    world.assert_settles_whole()


@pytest.mark.parametrize("stream", ["chunk", "layer"])
def test_a_preempted_prefill_is_read_again(world: PushWorld, stream: str) -> None:
    p, d = pair(world, stream=stream)
    tokens = tokens_of(4 * BLOCK + 1)
    request = d.follow("r", tokens, p)
    d.admit(request)
    p.begin("r", tokens)
    p.prefill_in_chunks("r", 2 * BLOCK)
    p.preempt("r")
    world.settle()
    p.prefill_in_chunks("r", BLOCK, 3 * BLOCK + 1)
    assert_delivered(world, d, "r", tokens)
    d.read_out(request)
    world.assert_settles_whole()


def test_a_preemption_under_a_running_read_costs_nothing_but_time(world: PushWorld) -> None:
    p, d = pair(world)
    tokens = tokens_of(4 * BLOCK)
    request = d.follow("r", tokens, p)
    d.admit(request)
    p.begin("r", tokens)
    world.network.hold()
    p.prefill_in_chunks("r", 2 * BLOCK)
    p.preempt("r")
    world.settle()
    p.prefill_in_chunks("r", 2 * BLOCK)
    world.network.release()
    p.prefill_in_chunks("r", 2 * BLOCK)
    assert_delivered(world, d, "r", tokens)
    d.read_out(request)
    world.assert_settles_whole()


def test_what_was_read_of_blocks_that_p_had_lost_is_not_believed(world: PushWorld) -> None:
    p, d = pair(world)
    tokens = tokens_of(4 * BLOCK)
    request = d.follow("r", tokens, p)
    d.admit(request)
    p.begin("r", tokens)
    world.network.hold()
    p.prefill_in_chunks("r", 2 * BLOCK)
    lost = list(p.prefills["r"].block_ids)
    p.preempt("r")
    world.network.release()
    world.settle()  # The read ends only now, with what somebody else has written there.
    p.prefill_in_chunks("r", 3 * BLOCK)
    assert p.prefills["r"].block_ids[:2] == lost, "only the run tells the two apart"
    p.prefill_in_chunks("r", BLOCK)
    assert_delivered(world, d, "r", tokens)
    d.read_out(request)
    world.assert_settles_whole()


def test_an_aborted_prefill_is_computed_by_d(world: PushWorld) -> None:
    p, d = pair(world)
    tokens = tokens_of(3 * BLOCK)
    request = d.follow("r", tokens, p)
    d.admit(request)
    p.begin("r", tokens)
    p.prefill_in_chunks("r", BLOCK)
    p.end_prefill("r", Status.FINISHED_ABORTED)
    world.settle()
    assert d.outcomes["r"].valid_tokens == 0
    assert d.counted("failures") == {FailureCode.PREFILL_FAILED: 1}
    d.read_out(request)
    world.assert_settles_whole()


def test_an_aborted_decode_leaves_nothing_open(world: PushWorld) -> None:
    p, d = pair(world)
    tokens = tokens_of(3 * BLOCK)
    request = d.follow("r", tokens, p)
    d.admit(request)
    p.begin("r", tokens)
    p.prefill_in_chunks("r", BLOCK)
    d.abort(request)
    world.settle()
    p.prefill_in_chunks("r", 2 * BLOCK)
    world.pass_time(40)
    world.assert_whole()


def test_a_prompt_that_is_not_the_same_is_computed_by_d(world: PushWorld) -> None:
    p, d = pair(world)
    request = d.follow("r", tokens_of(9), p)
    d.admit(request)
    p.begin("r", tokens_of(9, first=50))
    p.prefill_in_chunks("r", 9)
    world.settle()
    assert d.outcomes["r"].valid_tokens == 0
    assert world.network.reads == 0
    d.read_out(request)
    world.pass_time(70)
    world.assert_whole()


def test_without_a_prefill_d_gives_up_in_time(world: PushWorld) -> None:
    p, d = pair(world)
    request = d.follow("r", tokens_of(9), p)
    d.admit(request)
    world.pass_time(31)
    assert d.outcomes["r"].valid_tokens == 0
    d.read_out(request)
    world.pass_time(31)
    world.assert_whole()


def test_a_producer_that_dies_while_it_computes_costs_a_recompute(world: PushWorld) -> None:
    p, d = pair(world)
    tokens = tokens_of(3 * BLOCK)
    request = d.follow("r", tokens, p)
    d.admit(request)
    p.begin("r", tokens)
    p.prefill_in_chunks("r", BLOCK)
    p.kill()
    world.pass_time(12)
    assert d.outcomes["r"].valid_tokens == 0
    d.read_out(request)
    world.assert_settles_whole()


def test_a_successor_is_not_taken_for_the_producer(world: PushWorld) -> None:
    p, d = pair(world)
    tokens = tokens_of(3 * BLOCK)
    request = d.follow("r", tokens, p)
    d.admit(request)
    p.begin("r", tokens)
    p.prefill_in_chunks("r", BLOCK)
    p.kill()
    successor = world.engine("p")
    successor.begin("r", tokens)
    world.pass_time(4)
    assert d.outcomes["r"].valid_tokens == 0
    successor.prefill_in_chunks("r", 3 * BLOCK)
    d.read_out(request)
    world.pass_time(70)
    world.assert_whole()


def test_a_consumer_that_dies_costs_p_a_loan_at_most(world: PushWorld) -> None:
    p, d = pair(world)
    tokens = tokens_of(3 * BLOCK)
    d.admit(d.follow("r", tokens, p))
    p.begin("r", tokens)
    p.prefill_in_chunks("r", BLOCK)
    d.kill()
    p.prefill_in_chunks("r", 2 * BLOCK)
    world.pass_time(31)
    world.assert_whole()


def test_lost_messages_are_sent_again(world: PushWorld) -> None:
    p, d = pair(world)
    tokens = tokens_of(3 * BLOCK)
    world.wire.drop = [Want, Announced, Finished, Working]
    request = d.follow("r", tokens, p)
    d.admit(request)
    p.begin("r", tokens)
    p.prefill_in_chunks("r", BLOCK, 2 * BLOCK)
    world.pass_time(3)
    world.wire.drop = []
    world.pass_time(3)
    assert_delivered(world, d, "r", tokens)
    d.read_out(request)
    world.assert_settles_whole()


def test_a_retry_has_a_name_of_its_own(world: PushWorld) -> None:
    p, d = pair(world)
    tokens = tokens_of(3 * BLOCK)
    first = d.follow("r-1", tokens, p, "t1")
    d.admit(first)
    p.begin("r-1", tokens, "t1")
    p.prefill_in_chunks("r-1", BLOCK)
    d.abort(first)
    second = d.follow("r-2", tokens, p, "t2")
    d.admit(second)
    p.begin("r-2", tokens, "t2")
    p.schedule("r-1", 2 * BLOCK)
    p.prefill_in_chunks("r-2", 3 * BLOCK)
    assert_delivered(world, d, "r-2", tokens)
    d.read_out(second)
    world.pass_time(40)
    world.assert_whole()


def test_one_name_serves_one_request(world: PushWorld) -> None:
    p, d = world.engine("p"), world.engine("d", policy="fail")
    tokens = tokens_of(9)
    request = d.follow("r", tokens, p)
    with pytest.raises(BadTransferParams, match="in use"):
        d.follow("s", tokens, p)
    d.admit(request)
    p.begin("r", tokens)
    p.begin("again", tokens)  # The router's mistake; it is lent, and no consumer hears of it.
    p.prefill_in_chunks("again", 9)
    p.prefill_in_chunks("r", 9)
    assert_delivered(world, d, "r", tokens)
    d.read_out(request)
    world.pass_time(31)
    world.assert_whole()


def test_an_engine_does_push_and_pull_at_once(world: PushWorld) -> None:
    p, d = pair(world)
    pushed, pulled = tokens_of(9), tokens_of(9, first=40)
    follower = d.follow("r", pushed, p)
    d.admit(follower)
    fetcher = d.fetch("s", pulled, p.prefill("s", pulled))
    p.begin("r", pushed)
    p.prefill_in_chunks("r", 4, 5)
    assert_delivered(world, d, "r", pushed)
    assert_delivered(world, d, "s", pulled)
    d.read_out(follower)
    d.read_out(fetcher)
    world.assert_settles_whole()


def test_engines_push_to_each_other(world: PushWorld) -> None:
    a, b = pair(world)
    there, back = tokens_of(9), tokens_of(9, first=30)
    to_b, to_a = b.follow("r", there, a, "t1"), a.follow("s", back, b, "t2")
    b.admit(to_b)
    a.admit(to_a)
    a.begin("r", there, "t1")
    b.begin("s", back, "t2")
    a.schedule("r", 4)
    b.prefill_in_chunks("s", 9)
    a.prefill_in_chunks("r", 5)
    assert_delivered(world, b, "r", there)
    assert_delivered(world, a, "s", back)
    b.read_out(to_b)
    a.read_out(to_a)
    world.assert_settles_whole()


def test_a_full_local_hit_reads_nothing(world: PushWorld) -> None:
    p, d = pair(world)
    tokens = tokens_of(2 * BLOCK)
    request = d.follow("r", tokens, p)
    assert not d.admit(request, num_local=2 * BLOCK)
    p.begin("r", tokens)
    p.prefill_in_chunks("r", 2 * BLOCK)
    assert world.network.reads == 0
    world.pass_time(31)
    world.assert_whole()


def test_the_first_token_comes_with_the_last_block(world: PushWorld) -> None:
    p, d = pair(world)
    tokens = tokens_of(9)
    sampled = PrefilledTokens((7,), None, b"digest")
    request = d.follow("r", tokens, p)
    d.admit(request)
    p.begin("r", tokens, prefilled_tokens=sampled)
    p.prefill_in_chunks("r", 9)
    assert_delivered(world, d, "r", tokens)
    assert d.half.take_prefilled_tokens("r") == sampled
    d.read_out(request)


def test_the_engine_keeps_stepping_while_something_is_under_way_and_no_longer(world: PushWorld) -> None:
    p, d = pair(world)
    tokens = tokens_of(9)
    assert not d.half.has_pending_push_work()
    request = d.follow("r", tokens, p)
    d.admit(request)
    assert d.half.has_pending_push_work()
    p.begin("r", tokens)
    assert not p.half.has_pending_push_work()  # A prefill is a request of the host's, which steps for it.
    p.prefill_in_chunks("r", 4)
    assert d.half.has_pending_push_work()
    p.schedule("r", 5)
    p.step()
    assert p.lent
    assert not p.half.has_pending_push_work(), "an engine that lends and waits has nothing to do"
    world.settle()
    d.read_out(request)
    world.settle()
    assert not d.half.has_pending_push_work()
    assert not p.half.has_pending_push_work()


def test_a_peer_that_does_not_answer_delays_no_other_peer(world: PushWorld) -> None:
    p, d = pair(world)
    silent = world.engine("silent")
    stuck = d.follow("stuck", tokens_of(9), silent, "t0")
    d.admit(stuck)
    silent.kill()
    tokens = tokens_of(9, first=20)
    request = d.follow("r", tokens, p)
    d.admit(request)
    p.begin("r", tokens)
    p.prefill_in_chunks("r", 4, 5)
    assert_delivered(world, d, "r", tokens)
    assert "stuck" in d.parked
    d.read_out(request)
    world.pass_time(12)
    assert d.outcomes["stuck"].valid_tokens == 0
    d.read_out(stuck)
    world.assert_settles_whole()


def test_a_stream_is_refused_by_an_engine_that_only_pulls(world: PushWorld) -> None:
    from tests.connectors.pull_world import World

    p = world.engine("p")
    pulls = World()
    with pytest.raises(BadTransferParams, match="does not do"):
        pulls.engine("d", policy="fail").submit("r", tokens_of(9), stream_params(p, "t"))
    pulls.close()


def test_an_altered_introduction_is_refused(world: PushWorld) -> None:
    p, d = world.engine("p"), world.engine("d", policy="fail")
    params = stream_params(p, "t")
    params["baton_introduction"] = params["baton_introduction"][:-8] + "AAAAAAA="
    with pytest.raises(BadTransferParams, match="baton_introduction"):
        d.submit("r", tokens_of(9), params)


def test_a_prefill_whose_consumer_has_gone_leaves_no_loan(world: PushWorld) -> None:
    """The client left, and its proxy ended the one leg and not the other."""
    p, d = pair(world)
    tokens = tokens_of(2 * BLOCK + 1)
    request = d.follow("r", tokens, p)
    d.admit(request)
    p.begin("r", tokens)
    p.prefill_in_chunks("r", BLOCK)
    d.abort(request)
    world.settle()
    p.prefill_in_chunks("r", BLOCK + 1)
    assert p.finished["r"] is not None
    world.assert_whole()


def test_one_that_waits_in_its_place_is_served(world: PushWorld) -> None:
    p, d = pair(world)
    tokens = tokens_of(2 * BLOCK + 1)
    first = d.follow("r", tokens, p)
    d.admit(first)
    p.begin("r", tokens)
    p.prefill_in_chunks("r", BLOCK)
    d.abort(first)
    world.settle()
    second = d.follow("s", tokens, p)
    d.admit(second)
    world.settle()
    p.prefill_in_chunks("r", BLOCK + 1)
    assert_delivered(world, d, "s", tokens)
    d.read_out(second)
    world.assert_settles_whole()
