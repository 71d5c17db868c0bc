"""A prompt's KV changes hands: what arrives, what is moved, what is freed."""

from typing import Any

import pytest

from baton.core.errors import BadTransferParams
from baton.engine.request import RequestStatus
from tests.connectors.pull_world import BLOCK, World


def tokens_of(num_tokens: int, first: int = 0) -> list[int]:
    return [(first + i) % 97 for i in range(num_tokens)]


@pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK])
def test_every_byte_arrives_and_every_block_comes_back(world: World, num_tokens: int) -> None:
    p, d = world.engine("p"), world.engine("d")
    tokens = tokens_of(num_tokens)
    request = d.fetch("r", tokens, p.prefill("r", tokens))
    world.settle()
    outcome = d.read_out(request)
    assert outcome.valid_tokens == num_tokens
    assert d.holds(tokens, outcome.block_ids)
    world.assert_settles_whole()


@pytest.mark.parametrize(("producer_tp", "consumer_tp"), [(1, 2), (4, 2)])
def test_every_rank_gets_its_heads(world: World, producer_tp: int, consumer_tp: int) -> None:
    p, d = world.engine("p", tp=producer_tp), world.engine("d", tp=consumer_tp)
    tokens = tokens_of(11)
    request = d.fetch("r", tokens, p.prefill("r", tokens))
    world.settle()
    assert d.holds(tokens, d.read_out(request).block_ids)
    world.assert_settles_whole()


def test_only_what_is_missing_moves_and_leaves_a_record(world: World) -> None:
    p, d = world.engine("p"), world.engine("d")
    tokens = tokens_of(14)
    params = p.prefill("r", tokens)
    request = d.submit("r", tokens, params)
    assert d.half.get_num_new_matched_tokens(request, 2 * BLOCK) == (6, True)
    d.admit(request, num_local=2 * BLOCK)
    world.settle()
    assert d.holds(tokens, d.read_out(request).block_ids)
    (record,) = d.counted("transfers")
    expected = {"request_id": "r", "producer": "p", "transport": "memory", "tokens": 6, "blocks": 2}
    assert {name: record[name] for name in expected} == expected
    assert record["bytes"] == 2 * 2 * 4 * BLOCK * 2 * 4  # Blocks, layers, heads, tokens, K and V, float32.
    world.assert_settles_whole()


def test_a_handoff_leaves_its_times_on_both_sides(world: World) -> None:
    p, d = world.engine("p"), world.engine("d")
    tokens = tokens_of(9)
    request = d.fetch("r", tokens, p.prefill("r", tokens))
    world.settle()
    d.read_out(request)
    world.assert_settles_whole()
    (fetched,), (lent,) = d.counted("transfers"), p.counted("loans")
    times = fetched["times"]
    names = ("claimed_s", "ready_s", "started_s", "read_s", "ended_s")
    in_order = [times[name] for name in names]
    assert in_order == sorted(in_order)
    assert 0.0 < in_order[0] <= times["allocated_s"] <= times["started_s"]
    assert (lent["request_id"], lent["outcome"]) == ("r", "released")
    assert lent["transfer_id"] == fetched["transfer_id"]
    assert lent["lent_s"] <= times["claimed_s"] <= times["ended_s"] <= lent["ended_s"]


def test_a_fetch_that_fails_leaves_its_reason_and_a_loan_that_expires_its_end(world: World) -> None:
    p, d = world.engine("p"), world.engine("d")
    tokens = tokens_of(9)
    params = p.prefill("r", tokens)
    for worker in p.workers:
        p.kill_rank(worker)
    d.fetch("r", tokens, params)
    world.settle()
    (failed,) = d.counted("failed")
    assert (failed["request_id"], failed["producer"]) == ("r", "p")
    assert {failed["reason"]: 1} == d.counted("failures")
    p.prefill("unused", tokens_of(5))
    world.pass_time(31)
    assert [one["outcome"] for one in p.counted("loans") if one["request_id"] == "unused"] == ["expired"]


def test_a_full_local_hit_moves_nothing_and_releases_the_loan_at_once(world: World) -> None:
    p, d = world.engine("p"), world.engine("d")
    tokens = tokens_of(2 * BLOCK)
    request = d.submit("r", tokens, p.prefill("r", tokens))
    assert d.half.get_num_new_matched_tokens(request, 2 * BLOCK) == (0, False)
    assert not d.admit(request, num_local=2 * BLOCK)
    world.assert_settles_whole()
    assert world.network.reads == 0
    assert d.counted("failures") == {}


def test_asking_again_promises_the_same_until_it_is_fetched(world: World) -> None:
    p, d = world.engine("p"), world.engine("d")
    tokens = tokens_of(9)
    request = d.submit("r", tokens, p.prefill("r", tokens))
    world.settle()
    assert [d.half.get_num_new_matched_tokens(request, 0) for _ in range(3)] == [(9, True)] * 3
    assert world.network.reads == 0
    d.admit(request)
    world.settle()
    assert d.half.get_num_new_matched_tokens(request, 0) == (0, False)  # A preempted request asks again.
    d.read_out(request)


def test_many_transfers_share_one_handshake(world: World) -> None:
    p, d = world.engine("p", num_blocks=40), world.engine("d", num_blocks=40)
    prompts = {f"r{i}": tokens_of(9, first=i) for i in range(8)}
    requests = [d.fetch(name, tokens, p.prefill(name, tokens)) for name, tokens in prompts.items()]
    world.settle()
    for request in requests:
        assert d.holds(request.prompt_token_ids, d.read_out(request).block_ids)
    world.assert_settles_whole()
    hellos = [m for e in world.wire.carried for m in e.messages if type(m).__name__ == "Hello"]
    assert len(hellos) == 1


@pytest.mark.parametrize("waits_for", ["its read", "room"])
def test_a_lease_is_renewed_as_long_as_a_request_waits(world: World, waits_for: str) -> None:
    p, d = world.engine("p"), world.engine("d")
    tokens = tokens_of(9)
    request = d.submit("r", tokens, p.prefill("r", tokens))
    if waits_for == "its read":
        world.network.hold()
        d.admit(request)
    world.pass_time(90)
    assert p.lent, "the lease was lost though it was renewed"
    if waits_for == "room":
        d.admit(request)
    world.network.release()
    world.settle()
    assert d.holds(tokens, d.read_out(request).block_ids)
    world.assert_settles_whole()


@pytest.mark.parametrize(
    ("status", "is_lent"),
    [
        (RequestStatus.FINISHED_LENGTH_CAPPED, True),
        (RequestStatus.FINISHED_STOPPED, True),
        (RequestStatus.FINISHED_ABORTED, False),
    ],
)
def test_only_a_finished_prefill_is_lent(world: World, status: RequestStatus, is_lent: bool) -> None:
    p = world.engine("p")
    assert (p.finish_prefill("r", tokens_of(5), status=status) is not None) == is_lent
    assert bool(p.lent) == is_lent


def test_a_draining_engine_lends_nothing_more(world: World) -> None:
    p = world.engine("p")
    p.half.drain(5.0)
    assert p.finish_prefill("r", tokens_of(5)) is None
    world.assert_whole()


def test_the_answer_keeps_the_keys_that_proxies_hand_on(world: World) -> None:
    p = world.engine("p")
    params = p.prefill("r", tokens_of(5), params={"do_remote_decode": True, "transfer_id": "router-1"})
    ticket = params.pop("baton_ticket")
    assert isinstance(ticket, str)
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p",
        "remote_host": "127.0.0.1",
        "remote_port": 1001,
        "remote_block_ids": [p.lent["r"]],
        "remote_request_id": "r",
        "remote_num_tokens": 5,
        "tp_size": 1,
        "transfer_id": "router-1",
    }


def test_an_untouched_loan_ends_by_time_and_is_counted(world: World) -> None:
    p = world.engine("p")
    p.prefill("r", tokens_of(5))
    world.pass_time(31)
    world.assert_whole()
    assert p.counted("num_loans") == p.counted("num_expired_loans") == 1


@pytest.mark.parametrize("name", ["baton_ticket", "transfer_id"])
def test_a_loan_without_a_consumer_is_taken_back_at_once(world: World, name: str) -> None:
    p = world.engine("p")
    params = p.prefill("r", tokens_of(5))
    params = {name: params[name]}
    p.half.take_back({"transfer_id": "another"})
    assert not p.counted("num_loans")
    p.half.take_back(params)
    world.assert_settles_whole()
    p.half.take_back(params)  # Once more: there is nothing left to take.
    world.settle()
    assert p.counted("num_expired_loans") == 0


@pytest.mark.parametrize("name", ["baton_ticket", "transfer_id"])
def test_a_loan_that_is_fetched_is_not_taken_back(world: World, name: str) -> None:
    p, d = world.engine("p"), world.engine("d")
    tokens = tokens_of(9)
    params = p.prefill("r", tokens)
    request = d.submit("r", tokens, params)
    world.settle()  # D claims the loan.
    p.half.take_back({name: params[name]})
    d.admit(request)
    world.settle()
    assert d.read_out(request).valid_tokens == len(tokens)
    world.assert_settles_whole()


def test_a_consumer_that_comes_after_the_take_back_computes(world: World) -> None:
    p, d = world.engine("p"), world.engine("d")
    tokens = tokens_of(9)
    params = p.prefill("r", tokens)
    p.half.take_back(params)
    request = d.fetch("r", tokens, params)
    world.settle()
    assert d.read_out(request).valid_tokens == 0
    world.assert_settles_whole()


@pytest.mark.parametrize(
    "change", [{"baton_ticket": None}, {"baton_ticket": "nonsense"}, {"baton_ticket": 3}]
)
def test_only_our_own_tickets_are_taken_back(world: World, change: dict[str, Any]) -> None:
    p, d = world.engine("p"), world.engine("d")
    params = p.prefill("r", tokens_of(5))
    with pytest.raises(BadTransferParams, match="baton_ticket"):
        p.half.take_back({**params, **change})
    with pytest.raises(BadTransferParams, match="another engine"):
        d.half.take_back(params)
    world.settle()
    assert p.lent
