"""Scheduler half in vLLM: behaviour beyond that in every host."""

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import convert

from baton.connectors.pull.intent import transfer_of_request
from baton.connectors.pull.producer.loans import Lending
from baton.connectors.pull.scheduler import INTRODUCE
from baton.contract import ConnectorDead, KVConnectorOutput
from baton.core.errors import ConfigError
from baton.core.identity import KVIdentity
from baton.core.ids import Epoch, LoanId
from baton.engine.request import RequestStatus
from baton.hosts.vllm.lent_blocks import LentBlocks
from tests.connectors.pull_world import FakeBlocks, FakeRequest
from tests.vllm_plugin.world import VllmEngine, VllmWorld

TOKENS = list(range(10, 21))


@pytest.fixture
def world() -> Iterator[VllmWorld]:
    world = VllmWorld()
    yield world
    world.close()


def engine(world: VllmWorld, name: str) -> VllmEngine:
    made = world.engine(name)
    assert isinstance(made, VllmEngine)
    return made


# --- Lent blocks -------------------------------------------------------------------------------------


def test_a_lent_request_ends_at_once_and_its_blocks_stay(world: VllmWorld) -> None:
    p = engine(world, "p")
    p.prefill("r", TOKENS)
    [held] = p.lent.values()
    assert [p.pool.blocks[block_id].ref_cnt for block_id in held] == [1] * len(held)
    assert not p.half.has_pending_push_work(), "an engine that only lends needs no steps"


def test_two_requests_of_one_name_are_lent_apart(world: VllmWorld) -> None:
    p, d = engine(world, "p"), engine(world, "d")
    first, second = p.prefill("r", TOKENS), p.prefill("r", TOKENS[::-1])
    request = d.fetch("x", TOKENS[::-1], second)
    world.settle()
    assert d.holds(TOKENS[::-1], d.read_out(request).block_ids)
    assert p.half.num_open_loans == 1
    request = d.fetch("y", TOKENS, first)
    world.settle()
    assert d.holds(TOKENS, d.read_out(request).block_ids)
    world.assert_whole()


def test_an_allocation_that_fails_finds_the_blocks_of_loans_that_have_ended(world: VllmWorld) -> None:
    p = engine(world, "p")
    p.prefill("r", TOKENS)
    assert not p.half.has_pending_block_frees()
    world.now += 100
    p.half._agent.wake(world.now)  # The control thread does the same.
    num_free = p.pool.num_free_blocks
    assert p.half.has_pending_block_frees()
    assert p.pool.num_free_blocks > num_free
    assert not p.half.has_pending_block_frees(), "otherwise vLLM waits for ever instead of preempting"


def test_blocks_that_were_never_held_are_not_freed() -> None:
    lent = LentBlocks()
    lent.release(LoanId(Epoch(1), 1))
    assert len(lent) == 0


def test_an_unknown_block_pool_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="has no blocks, touch, free_blocks, get_num_free"):
        LentBlocks().bind(object())  # type: ignore[arg-type]


def keep(d: VllmEngine, name: str, tokens: list[int]) -> None:
    """Keep the KV of an answer decoded here, for a next turn that may never come."""
    with d.half._lock:
        loan_id = d.half._agent.producer.keep(d.world.now, 480.0)
    assert loan_id is not None
    block_ids = d.allocate(len(tokens))
    d.lent_blocks.hold(loan_id, block_ids)
    d.half._loans._lent[loan_id] = Lending(name, transfer_of_request(name), len(block_ids), d.world.now)
    d.half._loans._kept[loan_id] = len(block_ids)
    d.give_back(block_ids)


def test_kv_kept_for_a_next_turn_is_freed_for_a_waiting_prompt(world: VllmWorld) -> None:
    d = engine(world, "d")
    num_blocks = d.pool.num_free_blocks
    for name in ("oldest", "newer", "newest"):
        keep(d, name, TOKENS)
    assert d.pool.num_free_blocks == num_blocks - 9
    request = FakeRequest("r", list(range((num_blocks - 8) * 4)))
    d.half.get_num_new_matched_tokens(request, 0)
    assert sorted(d.lent) == ["newer", "newest"], "one was enough"
    assert d.half.has_pending_block_frees(), "an allocation has failed"
    assert sorted(d.lent) == ["newest"]
    assert d.half.has_pending_block_frees()
    assert not d.half.has_pending_block_frees(), "nothing is left to wait for"
    world.assert_whole()


# --- Reports -----------------------------------------------------------------------------------------


def test_only_loads_that_vllm_waits_for_are_reported(
    world: VllmWorld, caplog: pytest.LogCaptureFixture
) -> None:
    d = engine(world, "d")
    d.half._fetches.received.add("unknown")
    output = KVConnectorOutput(finished_recving={"of another connector"})
    d.half.update_connector_output(output)
    assert output.finished_recving == {"of another connector"}
    assert "did not report the loads of ['unknown']" in caplog.text


# --- A dead control thread ---------------------------------------------------------------------------


def test_without_its_control_thread_everything_is_computed_here(world: VllmWorld) -> None:
    p, d = engine(world, "p"), engine(world, "d")
    params, lent_here = p.prefill("r", TOKENS), d.prefill("lent by d", TOKENS)
    world.wire.drop = [object]  # All messages are lost, so the load hangs.
    request = d.fetch("r", TOKENS, params)

    def raise_if_dead() -> None:
        raise ConnectorDead("the control thread died")

    d.half._control.raise_if_dead = raise_if_dead  # type: ignore[method-assign]
    world.settle()
    assert d.read_out(request).valid_tokens == 0
    assert not d.admit(d.submit("next", TOKENS, params)), "no new loans may be made"
    assert d.finish_prefill("not lent", TOKENS) is None
    assert lent_here is not None
    world.pass_time(200)
    assert d.half.num_open_loans == 0, "loans must end by time, in the engine's thread"
    assert not d.lent


# --- Introductions -----------------------------------------------------------------------------------


def finish(half: Any, params: dict[str, Any]) -> dict[str, Any] | None:
    request = FakeRequest("r", TOKENS, params)
    half.on_new_request(request)
    half.update_state_after_alloc(request, FakeBlocks([1, 2, 3]), 0)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    keeps, answer = half.request_finished(request, [1, 2, 3])
    assert not keeps
    return answer  # type: ignore[no-any-return]


@pytest.mark.parametrize("wish", [False, "yes", 1, None])
def test_there_is_no_introduction_without_the_request_for_one(world: VllmWorld, wish: Any) -> None:
    assert finish(engine(world, "p").half, {INTRODUCE: wish}) is None


def test_a_connector_without_push_has_no_introduction(world: VllmWorld) -> None:
    answer = finish(engine(world, "p").half, {INTRODUCE: True})
    assert answer is not None
    assert "baton_introduction" not in answer


def test_a_router_learns_with_which_weights_an_engine_computes(world: VllmWorld) -> None:
    half = engine(world, "p").half
    before = finish(half, {INTRODUCE: True})
    assert half.set_weights(None, "v2")
    now = finish(half, {INTRODUCE: True})
    assert before is not None
    assert now == {**before, "baton_kv_identity": {**before["baton_kv_identity"], "version": "v2"}}
    assert convert(now["baton_kv_identity"], KVIdentity) == half._identity.kv_identity
