"""An exception of the connector about one request affects only that request (I6)."""

import pytest

from baton.core.errors import BadTransferParams
from baton.engine.api import RequestError
from tests.engine_sched.world import World

PROMPT = list(range(1, 19))


def raising_for_a(error: Exception):
    def raise_or(request, *rest):
        if request.request_id == "a":
            raise error
        return (0, False)

    return raise_or


def run_beside_b(world: World) -> None:
    world.add("a", PROMPT)
    run_with_b(world)


def run_with_b(world: World) -> None:
    world.add("b", PROMPT[:7])
    world.end("b")


@pytest.mark.parametrize("where", ["on_new", "verdict", "on_alloc"])
def test_a_users_error_ends_the_request_as_a_users_error(where: str) -> None:
    world = World()
    setattr(world.half, where, raising_for_a(BadTransferParams("expired", field="kv_transfer_params")))
    run_beside_b(world)
    last = world.last_of("a")
    assert last.finish_reason == "error"
    assert last.error == RequestError(
        "kv_transfer_params: expired", is_users=True, field="kv_transfer_params"
    )


@pytest.mark.parametrize("where", ["on_new", "verdict", "on_alloc"])
def test_a_broken_connector_costs_a_recompute_as_long_as_no_load_was_agreed_on(where: str) -> None:
    world = World()
    setattr(world.half, where, raising_for_a(KeyError("remote_engine_id")))
    run_beside_b(world)
    world.check_answer("a")


@pytest.mark.parametrize("is_async", [True, False])
def test_a_connector_that_breaks_while_starting_a_load_ends_the_request(is_async: bool) -> None:
    world = World()
    world.half.verdict = lambda request, local: (8, is_async) if request.request_id == "a" else (0, False)
    world.half.on_alloc = raising_for_a(RuntimeError("half-way"))
    run_beside_b(world)
    last = world.last_of("a")
    assert last.finish_reason == "error"
    assert last.error is not None
    assert not last.error.is_users


def test_a_connector_that_breaks_at_the_end_has_lent_nothing() -> None:
    world = World()
    world.half.lends = lambda request, blocks: (False, None) if request.request_id == "b" else 1 / 0
    run_beside_b(world)
    world.check_answer("a")
    last = world.last_of("a")
    assert last.kv_transfer_params is None


@pytest.mark.parametrize(
    "answer", [(19, True), (-1, False), (0, True), ("all", True), (1.5, False), (object(), True)]
)
def test_an_impossible_match_is_computed_instead(answer: tuple[object, bool]) -> None:
    world = World()
    world.half.verdict = lambda request, local: answer if request.request_id == "a" else (0, False)  # type: ignore[assignment,return-value]
    run_beside_b(world)
    world.check_answer("a")


def test_an_idle_engine_still_returns_the_refusal() -> None:
    world = World()
    world.half.on_new = raising_for_a(BadTransferParams("no"))
    world.add("a", PROMPT)
    assert world.scheduler.has_requests()
    assert not world.scheduler.has_unfinished_requests()
    assert world.step().num_scheduled_tokens == {}
    assert world.answers["a"].reason == "error"


@pytest.mark.parametrize("garbage", [None, 7, "refused", (True,), ("a", "b", "c")])
def test_request_finished_that_returns_none_has_lent_nothing(garbage: object) -> None:
    world = World()
    world.half.lends = lambda request, blocks: garbage if request.request_id == "a" else (False, None)  # type: ignore[assignment,return-value]
    run_beside_b(world)
    world.check_answer("a")


@pytest.mark.parametrize("params", [7, ["a list"], {"a": object()}])
def test_unserialisable_params_are_left_out_and_the_loan_stays(params: object) -> None:
    world = World()
    world.half.lends = lambda request, blocks: (request.request_id == "a", params)  # type: ignore[assignment,return-value]
    world.add("a", PROMPT)
    world.add("b", PROMPT[:7])
    while world.scheduler.has_unfinished_requests():
        world.step()
    world.check_answer("a")
    assert world.scheduler.remote.num_held == 1
    last = world.last_of("a")
    assert last.kv_transfer_params is None
    world.end_send("a")
    world.end("b")


def test_invalid_tokens_of_another_engine_are_sampled_here() -> None:
    world = World()
    world.half.verdict = lambda request, local: (16, True) if request.request_id == "a" else (0, False)
    world.half.prefilled = lambda request_id: [1, 2, 3]  # type: ignore[assignment,return-value]
    world.add("a", PROMPT)
    world.step()
    world.end_load("a")
    run_with_b(world)
    world.check_answer("a")
