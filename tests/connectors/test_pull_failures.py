"""Whatever goes wrong, a request ends in bounded time, its blocks say the truth, and no block is lost.

`test_failure_labels` has a case for each kind of failure; `lab.sim` draws them at random.
"""

import base64
from typing import Any

import msgspec
import pytest

from baton.core.config import ClusterSecret
from baton.core.errors import BadTransferParams
from baton.core.reasons import FailureCode
from baton.protocol.messages import Renewed, Welcome
from baton.protocol.ticket import Ticket
from baton.testing.host.config import model_config
from tests.connectors.pull_world import BLOCK, Engine, World

TOKENS = list(range(11))


def assert_failed(
    world: World,
    d: Engine,
    request: Any,
    code: FailureCode,
    *,
    num_local: int = 0,
    p_is_not_told: bool = False,
) -> None:
    """Nothing that was to be fetched counts as valid, everything is returned, and the host can ask why."""
    assert d.half.get_load_failure(request.request_id) == code
    assert d.read_out(request).valid_tokens == num_local
    world.settle()
    if p_is_not_told:
        world.pass_time(31)
    world.assert_whole()
    assert code in d.counted("failures"), d.counted("failures")
    assert set(d.counted("peer_failures")) == {"p"}


# --- The producer dies -------------------------------------------------------------------------------


def test_a_producer_dead_before_the_handshake(world: World) -> None:
    p, d = world.engine("p"), world.engine("d")
    params = p.prefill("r", TOKENS)
    p.kill()
    request = d.fetch("r", TOKENS, params)
    world.settle()
    assert d.parked, "it may yet answer"
    world.pass_time(6)
    assert_failed(world, d, request, FailureCode.NO_ANSWER)


def test_a_restarted_producer_fails_what_was_fetched_from_its_predecessor(world: World) -> None:
    p, d = world.engine("p"), world.engine("d")
    world.network.hold()
    request = d.fetch("r", TOKENS, p.prefill("r", TOKENS))
    world.settle()
    p.kill()
    world.network.release()
    successor = world.engine("p")
    world.pass_time(9)  # One renewal: Stranger.
    assert_failed(world, d, request, FailureCode.READ_FAILED)
    again = d.fetch("r2", TOKENS, successor.prefill("r2", TOKENS))
    world.settle()
    assert d.holds(TOKENS, d.read_out(again).block_ids)


def test_a_consumer_that_dies_costs_the_producer_one_lease(world: World) -> None:
    p, d = world.engine("p"), world.engine("d")
    world.network.hold()
    d.fetch("r", TOKENS, p.prefill("r", TOKENS))
    world.settle()
    d.kill()
    world.pass_time(20)
    assert p.lent
    world.pass_time(11)
    world.assert_whole()
    assert p.counted("num_expired_loans") == 1


# --- The lease ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_loan_that_ended_while_the_request_waited_for_room(world: World, policy: str) -> None:
    """Not promised; or under policy fail promised and then failed, so that the host applies the policy."""
    p, d = world.engine("p"), world.engine("d", policy=policy)
    params = p.prefill("r", TOKENS)
    world.pass_time(31)
    request = d.submit("r", TOKENS, params)
    world.settle()
    assert d.admit(request) == (policy == "fail")
    world.settle()
    if policy == "fail":
        assert_failed(world, d, request, FailureCode.LEASE_EXPIRED)
    else:
        assert "r" in d.recomputed
        world.assert_whole()


# --- The ticket --------------------------------------------------------------------------------------


def altered(params: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The same answer with a ticket in which somebody has changed a field, and could not sign it again."""
    sealed = base64.urlsafe_b64decode(params["baton_ticket"])
    body, mac = msgspec.msgpack.decode(sealed)
    ticket = msgspec.structs.replace(msgspec.msgpack.decode(body, type=Ticket), **changes)
    text = base64.urlsafe_b64encode(msgspec.msgpack.encode((msgspec.msgpack.encode(ticket), mac))).decode()
    return {**params, "baton_ticket": text}


def refused(
    world: World, d: Engine, request_id: str, tokens: list[int], params: Any, **request: Any
) -> dict[str, int]:
    """Computed here, and no message was sent. Returns the reasons."""
    before = len(world.wire.carried)
    asked = d.submit(request_id, tokens, params, **request)
    assert not d.admit(asked)
    world.settle()
    assert len(world.wire.carried) == before, "a ticket that fails may be somebody else's"
    reasons: dict[str, int] = d.counted("refused")
    return reasons


@pytest.mark.parametrize(
    ("of_p", "tokens", "salt", "changes", "reason"),
    [
        ({}, [*TOKENS[:-1], 42], "alice", {}, "prompt"),
        ({}, TOKENS, "bob", {}, "prompt"),
        ({}, TOKENS, "alice", {"control_url": "tcp://6.6.6.6:666"}, "signature"),
        ({"secret": ClusterSecret(b"another cluster's secret")}, TOKENS, "alice", {}, "signature"),
        ({"model": model_config(architecture_digest="deeper")}, TOKENS, "alice", {}, "model"),
        ({"model": model_config(weights_digest="finetuned")}, TOKENS, "alice", {}, "weights"),
    ],
    ids=[
        "another prompt",
        "another salt",
        "altered",
        "another cluster's",
        "another model's",
        "other weights",
    ],
)
def test_a_ticket_that_does_not_fit_is_refused(
    world: World, of_p: dict[str, Any], tokens: list[int], salt: str, changes: dict[str, Any], reason: str
) -> None:
    p, d = world.engine("p", **of_p), world.engine("d")
    params = altered(p.prefill("r", TOKENS, cache_salt="alice"), **changes)
    assert refused(world, d, "r", tokens, params, cache_salt=salt) == {reason: 1}


def test_a_refused_ticket_under_policy_fail_is_the_callers_error(world: World) -> None:
    p, d = world.engine("p"), world.engine("d", policy="fail")
    params = p.prefill("r", TOKENS)
    with pytest.raises(BadTransferParams, match=r"kv_transfer_params\.baton_ticket.*another prompt"):
        d.submit("r", [1, 2, 3], params)
    assert not d.half._fetches._fetches, "the half forgets what the host forgets"


def test_a_host_that_cannot_bear_exceptions_gets_none(world: World) -> None:
    p, d = world.engine("p"), world.engine("d", policy="fail", extra={"raises_user_errors": False})
    params = p.prefill("r", TOKENS)
    assert refused(world, d, "r", [1, 2, 3], params) == {"prompt": 1}
    assert refused(world, d, "s", TOKENS, {"do_remote_prefill": True}) == {"prompt": 1, "params": 1}


def test_a_ticket_is_good_for_one_request_at_a_time(world: World) -> None:
    p, d = world.engine("p"), world.engine("d")
    params = p.prefill("r", TOKENS)
    first = d.submit("r", TOKENS, params)
    second = d.submit("r2", TOKENS, params)
    assert not d.admit(second)
    assert d.admit(first)
    world.settle()
    assert d.holds(TOKENS, d.read_out(first).block_ids)
    assert d.counted("refused") == {"in use": 1}
    world.assert_settles_whole()


# --- Ends and ranks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_reading", [False, True])
def test_an_abort_keeps_the_blocks_until_no_read_can_touch_them(world: World, is_reading: bool) -> None:
    p, d = world.engine("p"), world.engine("d")
    request = d.fetch("r", TOKENS, p.prefill("r", TOKENS))
    if is_reading:
        world.network.hold()
        world.wire.deliver()
        d.step()
    d.abort(request)
    assert d.held
    world.assert_settles_whole()
    assert d.counted("failures") == {}


def test_an_abort_after_the_delivery_was_decided(world: World) -> None:
    p, d = world.engine("p"), world.engine("d")
    world.wire.drop = [Renewed]
    request = d.fetch("r", TOKENS, p.prefill("r", TOKENS))
    world.settle()
    world.wire.drop = []
    world.now += 8
    while d.half.num_open_fetches:
        world.wire.deliver()  # Delivered between two steps: the next step will say so.
    d.abort(request)
    world.assert_settles_whole()


def test_a_request_rejected_before_admission_releases_its_loan_at_once(world: World) -> None:
    p, d = world.engine("p"), world.engine("d")
    request = d.submit("r", TOKENS, p.prefill("r", TOKENS))
    assert d.half.request_finished(request, []) == (False, None)
    world.assert_settles_whole()
    assert d.counted("failures") == {}


def test_a_failing_rank_waits_for_its_siblings_read_before_blocks_are_free(world: World) -> None:
    p, d = world.engine("p", tp=2), world.engine("d", tp=2)
    world.network.hold()
    request = d.fetch("r", TOKENS, p.prefill("r", TOKENS))
    for _ in range(2):
        world.wire.deliver()
        d.step()
    assert world.network.held_count == 2
    world.network.fail_next("cable pulled")
    world.network.release(1)
    d.step()
    assert d.parked, "a sibling's read may still write there"
    world.settle()
    assert_failed(world, d, request, FailureCode.READ_FAILED)


def test_after_a_partial_hit_only_the_fetched_part_is_invalid(world: World) -> None:
    p, d = world.engine("p"), world.engine("d")
    world.network.fail_next("cable pulled")
    request = d.fetch("r", TOKENS, p.prefill("r", TOKENS), num_local=BLOCK)
    world.settle()
    assert_failed(world, d, request, FailureCode.READ_FAILED, num_local=BLOCK)


def test_a_peer_that_failed_is_left_alone_for_a_while_and_then_tried_again(world: World) -> None:
    p, d = world.engine("p"), world.engine("d")
    world.wire.drop = [Welcome]
    first = d.fetch("r", TOKENS, p.prefill("r", TOKENS))
    world.pass_time(6)
    assert_failed(world, d, first, FailureCode.NO_ANSWER, p_is_not_told=True)
    world.wire.drop = []
    second = d.fetch("r2", TOKENS, p.prefill("r2", TOKENS))
    world.settle()
    assert d.holds(TOKENS, d.read_out(second).block_ids)
    world.assert_settles_whole()


def test_shutdown_releases_what_is_claimed(world: World) -> None:
    p, d = world.engine("p"), world.engine("d")
    world.network.hold()
    d.fetch("r", TOKENS, p.prefill("r", TOKENS))
    world.settle()
    d.is_alive = False
    d.shutdown()
    world.assert_settles_whole()
