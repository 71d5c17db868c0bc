"""The next turn's prefill fetches what the last turn's decode has left: same tickets, same leases."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.core.errors import BadTransferParams
from baton.core.timers import Timers
from baton.engine.request import RequestStatus
from tests.connectors.pull_world import (
    BLOCK,
    Engine,
    FakeBlocks,
    FakeRequest,
    World,
)

TURNS = {"turns": {"min_tokens": BLOCK, "ttl_s": 400.0}}
QUESTION = list(range(1, 10))
ANSWER = [20, 21, 22, 23]  # All 13 tokens but the last one are computed: three blocks.
NUM_KEPT = len(QUESTION) + len(ANSWER) - 1
FOLLOW_UP = [*QUESTION, *ANSWER, *range(30, 35)]


@dataclass
class Request(FakeRequest):
    output: list[int] = field(default_factory=list)

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output


@pytest.fixture
def p(world: World) -> Engine:
    return world.engine("p", extra=TURNS)


@pytest.fixture
def d(world: World, p: Engine) -> Engine:
    return world.engine("d", extra=TURNS)


def answer(world: World, p: Engine, d: Engine, request_id: str = "turn") -> dict[str, Any] | None:
    """One whole turn; what D says for the next one."""
    request = Request(request_id, QUESTION, p.prefill(request_id, QUESTION))
    d.half.on_new_request(request)
    d.admit(request)
    world.settle()
    return end_turn(d, request, d.outcomes.pop(request_id).block_ids)


def end_turn(d: Engine, request: Request, block_ids: list[int]) -> dict[str, Any] | None:
    d.half.update_state_after_alloc(request, FakeBlocks(block_ids), 0)
    request.output = list(ANSWER)
    block_ids = block_ids + d.allocate(len(request.all_token_ids) - len(block_ids) * BLOCK)
    d.compute(request.all_token_ids, block_ids)
    request.num_computed_tokens, request.status = (
        len(request.all_token_ids) - 1,
        RequestStatus.FINISHED_STOPPED,
    )
    is_lent, params = d.half.request_finished(request, block_ids[: NUM_KEPT // BLOCK])
    if is_lent:
        d.lent[request.request_id] = block_ids
    else:
        d.give_back(block_ids)
    return params


def kept(world: World, p: Engine, d: Engine) -> dict[str, Any]:
    params = answer(world, p, d)
    assert params is not None
    return params


def ask_again(p: Engine, params: dict[str, Any], tokens: list[int] = FOLLOW_UP) -> Request:
    request = Request("again", tokens, {**params, "transfer_id": "second"})
    p.half.on_new_request(request)
    return request


def finish_prefill(p: Engine, request: Request, block_ids: list[int]) -> dict[str, Any]:
    p.half.update_state_after_alloc(request, FakeBlocks(block_ids), 0)
    p.compute(request.prompt_token_ids, block_ids)
    request.num_computed_tokens = len(request.prompt_token_ids)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    is_lent, params = p.half.request_finished(request, block_ids)
    assert is_lent
    assert params is not None
    p.lent[request.request_id] = block_ids
    return params


def test_d_keeps_prompt_and_answer_and_says_so_in_vllms_words(world: World, p: Engine, d: Engine) -> None:
    params = kept(world, p, d)
    assert params["do_remote_decode"]
    assert not params["do_remote_prefill"]
    assert params["remote_engine_id"] == "d"
    assert params["remote_num_tokens"] == NUM_KEPT
    assert "transfer_id" not in params


def test_p_fetches_it_computes_the_rest_and_lends_as_ever(world: World, p: Engine, d: Engine) -> None:
    request = ask_again(p, kept(world, p, d))
    assert p.half.get_num_new_matched_tokens(request, 0) == (NUM_KEPT, True)
    assert p.admit(request)
    world.settle()
    outcome = p.outcomes.pop("again")
    assert outcome.valid_tokens == NUM_KEPT
    assert p.holds(FOLLOW_UP, outcome.block_ids, blocks=range(NUM_KEPT // BLOCK))
    assert d.half.num_open_loans == 0, "returned as soon as it was read"
    ticket = finish_prefill(p, request, outcome.block_ids)
    assert ticket["do_remote_prefill"]
    assert ticket["transfer_id"] == "second"
    decoding = d.fetch("again", FOLLOW_UP, ticket)
    world.settle()
    assert d.read_out(decoding).valid_tokens == len(FOLLOW_UP)


def test_what_is_here_already_is_not_fetched_and_the_loan_is_returned(
    world: World, p: Engine, d: Engine
) -> None:
    request = ask_again(p, kept(world, p, d))
    assert p.half.get_num_new_matched_tokens(request, NUM_KEPT) == (0, False)
    assert p.half.get_num_new_matched_tokens(request, NUM_KEPT - BLOCK) == (BLOCK, True)
    p.half.update_state_after_alloc(request, FakeBlocks(p.allocate(len(FOLLOW_UP))), 0)
    world.settle()
    assert d.half.num_open_loans == 0


def test_fewer_tokens_than_are_worth_a_fetch_are_computed(world: World) -> None:
    p = world.engine("p", extra={"turns": {"min_tokens": BLOCK + 1}})
    d = world.engine("d", extra=TURNS)
    request = ask_again(p, kept(world, p, d))
    assert p.half.get_num_new_matched_tokens(request, NUM_KEPT - BLOCK) == (0, False)
    assert p.half.get_num_new_matched_tokens(request, NUM_KEPT - 2 * BLOCK) == (2 * BLOCK, True)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_conversation_with_another_past_is_computed_whatever_the_policy(world: World, policy: str) -> None:
    p, d = world.engine("p", extra=TURNS, policy=policy), world.engine("d", extra=TURNS)
    without_thinking = [*QUESTION, ANSWER[-1], 40, 41, 42, 43, 44, 45]
    request = ask_again(p, kept(world, p, d), without_thinking)
    assert p.half.get_num_new_matched_tokens(request, 0) == (0, False)
    world.settle()
    assert p.counted("refused") == {"prompt": 1}
    assert d.half.num_open_loans == 1, "a ticket that is not for us may be somebody else's"


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_ticket_that_two_turns_bring_serves_one_of_them(world: World, policy: str) -> None:
    p, d = world.engine("p", extra=TURNS, policy=policy), world.engine("d", extra=TURNS)
    params = kept(world, p, d)
    first = ask_again(p, params)
    second = Request("third", FOLLOW_UP, dict(params))
    p.half.on_new_request(second)
    assert p.half.get_num_new_matched_tokens(first, 0) == (NUM_KEPT, True)
    assert p.half.get_num_new_matched_tokens(second, 0) == (0, False)


def test_what_nobody_asks_for_again_is_kept_for_its_time_and_no_longer(
    world: World, p: Engine, d: Engine
) -> None:
    params = kept(world, p, d)
    world.pass_time(399.0, every_s=20.0)
    assert d.half.num_open_loans == 1
    world.pass_time(2.0)
    world.assert_whole()
    assert d.counted("num_expired_loans") == 0, "that is no failure of anybody"
    request = ask_again(p, params)
    p.admit(request)
    world.settle()
    assert p.outcomes.pop("again").valid_tokens == 0  # The loan is gone, so P computes the prompt.


def test_once_claimed_it_is_leased_as_any_other_loan(world: World, p: Engine, d: Engine) -> None:
    ask_again(p, kept(world, p, d))
    world.settle()
    p.kill()
    world.pass_time(Timers().ttl_s + 1)
    assert d.half.num_open_loans == 0, "not held for the rest of the 400 s"


def test_a_drain_does_not_wait_for_next_turns(world: World, p: Engine, d: Engine) -> None:
    kept(world, p, d)
    d.half.drain(30.0)
    world.assert_settles_whole()


def test_the_oldest_makes_room_when_too_much_is_kept(world: World) -> None:
    class Pool:
        num_blocks = 16

    p = world.engine("p", extra=TURNS)
    d = world.engine("d", extra={"turns": {"min_tokens": BLOCK, "pool_share_max": 0.5}})
    d.half.bind_gpu_block_pool(Pool())
    for number in range(4):
        assert answer(world, p, d, f"turn-{number}") is not None
        world.settle()
    assert sorted(d.lent) == ["turn-2", "turn-3"], "six of at most eight blocks"


def test_without_the_setting_or_without_both_roles_nothing_is_kept(world: World, p: Engine) -> None:
    assert answer(world, p, world.engine("d")) is None
    assert answer(world, p, world.engine("d2", extra=TURNS, role="kv_consumer"), "b") is None


def test_a_mere_producer_refuses_an_earlier_turns_ticket_by_name(world: World, p: Engine, d: Engine) -> None:
    params = kept(world, p, d)
    mere = world.engine("mere", role="kv_producer", policy="fail")
    with pytest.raises(BadTransferParams) as refused:
        ask_again(mere, params)
    assert refused.value.field == "kv_transfer_params.baton_ticket"
