"""A host's sleep as vLLM 0.33 orders it, over real transports: the memory goes, and comes back empty.

EngineCore.sleep    reset_cache (refused while a block is lent or being filled), then unregister_kv_caches
EngineCore.wake_up  restore_kv_caches; the scheduler half is not told
"""

from collections.abc import Callable, Iterator

import pytest
import torch

from baton.assemble import connector_factory
from baton.connectors.pull.scheduler import PullSchedulerHalf
from baton.connectors.pull.worker import PullWorkerHalf
from baton.contract import KVConnectorOutput
from baton.core.config import EngineConfig
from baton.core.errors import TransferError
from baton.engine.request import RequestStatus
from baton.testing.host.model import HEAD_DIM
from baton.transport.base.interface import Completion
from baton.transport.local.transport import LocalTransport
from tests.connectors.pull_world import BLOCK, HEADS, LAYERS, FakeRequest, engine_config
from tests.connectors.wired_world import OURS, TOKENS, Engine, ask, engines_of, lend

QUICK = {"round_trip_max_s": 0.05, "ttl_s": 2.0, "deadline_s": 5.0, "loan_max_s": 10.0}
SLEPT = -1.0  # What the memory holds when it is the host's again.


class SleepingEngine(Engine):
    def sleep(self) -> None:
        self.scheduler.reset_cache()
        self.worker.unregister_kv_caches()
        self.cache.fill_(SLEPT)

    def wake_up(self) -> None:
        self.worker.restore_kv_caches()

    @property
    def half(self) -> PullSchedulerHalf:
        half = self.scheduler.scheduler_half  # type: ignore[attr-defined]
        assert isinstance(half, PullSchedulerHalf)
        return half

    @property
    def half_of_rank(self) -> PullWorkerHalf:
        half = self.worker.worker_half  # type: ignore[attr-defined]
        assert isinstance(half, PullWorkerHalf)
        return half

    def load_ended(self) -> set[int]:
        return self.step_until(lambda output: bool(output.finished_recving)).invalid_block_ids

    def lending_ended(self) -> KVConnectorOutput:
        return self.step_until(lambda output: bool(output.finished_sending))


Start = Callable[[EngineConfig], SleepingEngine]


@pytest.fixture
def start() -> Iterator[Start]:
    with engines_of(SleepingEngine) as start_engine:
        yield start_engine


def pair(start: Start, transport: str, connector: str = "BatonPullConnector") -> list[SleepingEngine]:
    extra = {"transports": [transport], "timers": QUICK, "shutdown_timeout_s": 1.0}
    return [start(engine_config(name, connector=connector, extra=extra)) for name in ("p", "d")]


def hand_over(p: SleepingEngine, d: SleepingEngine, request_id: str) -> None:
    params, theirs = lend(p, request_id)
    ask(d, params, request_id)
    assert d.handed_over(request_id) == set()
    assert torch.equal(d.cache[:, OURS], p.cache[:, theirs])
    assert p.lending_ended().finished_sending == {request_id}


@pytest.mark.parametrize("transport", ["local", "tcp"])
@pytest.mark.parametrize("sleeper", ["p", "d"])
def test_engines_hand_over_before_and_after_one_has_slept(start: Start, transport: str, sleeper: str) -> None:
    p, d = pair(start, transport)
    hand_over(p, d, "before")
    one = p if sleeper == "p" else d
    for request_id in ("after", "after the second sleep"):
        one.sleep()
        one.wake_up()
        one.step()  # A step of the first prompt that is computed after the sleep.
        hand_over(p, d, request_id)


@pytest.mark.parametrize("transport", ["local", "tcp"])
@pytest.mark.parametrize("is_connected", [True, False])
def test_a_read_of_memory_that_was_given_away_fails_and_is_recomputed(
    start: Start, transport: str, is_connected: bool
) -> None:
    p, d = pair(start, transport)
    if is_connected:
        hand_over(p, d, "before")
    params, _ = lend(p, "r")
    p.sleep()
    ask(d, params)
    assert d.load_ended() == set(OURS)


@pytest.mark.parametrize("transport", ["local", "tcp"])
@pytest.mark.parametrize("is_connected", [True, False])
def test_a_ticket_of_before_the_sleep_never_leads_to_new_bytes(
    start: Start, transport: str, is_connected: bool
) -> None:
    p, d = pair(start, transport)
    if is_connected:
        hand_over(p, d, "before")
    params, _ = lend(p, "old")
    p.sleep()
    p.wake_up()
    assert p.lending_ended().finished_sending == {"old"}
    assert p.half.num_open_loans == 0
    ask(d, params, "old")
    assert d.load_ended() == set(OURS)
    hand_over(p, d, "new")


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_an_old_ticket_fails_before_the_first_step_after_the_sleep_too(start: Start, transport: str) -> None:
    """The scheduler half does not know yet, and renews the loan. The old endpoints are closed."""
    p, d = pair(start, transport)
    hand_over(p, d, "before")
    params, _ = lend(p, "old")
    p.sleep()
    p.wake_up()
    ask(d, params, "old")
    assert d.load_ended() == set(OURS)


def test_nothing_is_lent_between_the_report_of_the_new_memory_and_its_announcement(start: Start) -> None:
    """A load of ours is in the way of the announcement, because its reads belong to the old address."""
    p, d = pair(start, "local")
    p.sleep()
    p.wake_up()
    params, theirs = lend(d, "theirs")
    waiting = FakeRequest("theirs", TOKENS, params)
    p.scheduler.on_new_request(waiting)  # The host has not scheduled it.
    p.step()
    finished = FakeRequest("r", TOKENS, {"do_remote_decode": True})
    finished.num_computed_tokens, finished.status = len(TOKENS), RequestStatus.FINISHED_LENGTH_CAPPED
    assert p.scheduler.request_finished(finished, [9, 3, 4, 5, 0, 11, 12, 7]) == (False, None)
    ask(p, params, "theirs")
    assert p.handed_over("theirs") == set()
    assert torch.equal(p.cache[:, OURS], d.cache[:, theirs])
    p.step_until(lambda _: p.half.num_open_fetches == 0)
    p.step()
    hand_over(p, d, "after")


def test_the_new_memory_is_announced_when_all_ranks_have_reported_it() -> None:
    config = engine_config("p", tp=2, connector="BatonPushConnector", extra={"transports": ["local"]})
    scheduler = connector_factory.scheduler_half(config)
    workers = [connector_factory.worker_half(config, rank) for rank in range(2)]
    for worker in workers:
        cache = torch.zeros(LAYERS, 16, HEADS // 2, BLOCK, 2 * HEAD_DIM)
        worker.register_kv_caches({f"layer.{i}": cache[i] for i in range(LAYERS)})
    cards = {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(workers)}
    scheduler.set_xfer_handshake_metadata_pp_aware(cards)  # type: ignore[arg-type]
    introductions = [scheduler.introduction()]
    for worker in workers:
        worker.unregister_kv_caches()
        worker.restore_kv_caches()
    for worker in workers:
        output = KVConnectorOutput(kv_connector_worker_meta=worker.build_connector_worker_meta())
        assert output.kv_connector_worker_meta is not None
        assert worker.build_connector_worker_meta() is None, "it is reported once"
        scheduler.update_connector_output(output)
        introductions.append(scheduler.introduction())
    assert introductions[0] == introductions[1] != introductions[2]
    for half in (scheduler, *workers):
        half.shutdown()


def test_a_load_in_the_first_step_after_a_sleep_succeeds(start: Start) -> None:
    p, d = pair(start, "tcp")
    hand_over(p, d, "before")
    d.sleep()
    d.wake_up()
    hand_over(p, d, "after")


def test_a_load_that_a_sleeping_rank_is_ordered_to_begin_fails(start: Start) -> None:
    p, d = pair(start, "local")
    params, _ = lend(p, "r")
    d.sleep()
    ask(d, params)
    assert d.load_ended() == set(OURS)
    assert (d.cache == SLEPT).all()


def test_push_engines_sleep_as_well(start: Start) -> None:
    p, d = pair(start, "local", "BatonPushConnector")
    hand_over(p, d, "before")
    p.sleep()
    p.wake_up()
    before = p.scheduler.introduction()
    p.step()
    assert p.scheduler.introduction() not in (before, None)
    hand_over(p, d, "after")


def test_the_hooks_are_idempotent(start: Start) -> None:
    p, d = pair(start, "local")
    p.wake_up()
    hand_over(p, d, "before")
    p.sleep()
    p.sleep()
    p.wake_up()
    card = p.worker.get_handshake_metadata()
    p.wake_up()
    assert p.worker.get_handshake_metadata() == card
    p.step()
    hand_over(p, d, "after")


class NeverDone(LocalTransport):
    """A transport whose reads do not end, not even when it is closed."""

    def poll(self) -> list[Completion]:
        return []


def test_the_host_cannot_sleep_while_a_read_does_not_end(start: Start) -> None:
    p, d = pair(start, "local")
    d.half_of_rank._given_transports = lambda address: {"local": NeverDone(address)}
    d.sleep()
    d.wake_up()
    d.step()
    ask(d, lend(p, "r")[0])
    d.step_until(lambda _: d.half_of_rank._links.num_moving > 0)  # type: ignore[union-attr]
    with pytest.raises(TransferError, match="cannot sleep"):
        d.sleep()
