"""Scheduler, executor and connector in one process: consequences of a broken connector."""

from typing import Any

import pytest
from engine_core_fakes import FACTORY, FakeSchedulerHalf, FakeWorkerHalf, factory

from baton.connectors.pull.stats import PullStats
from baton.contract import ConnectorDead, KVConnectorTransferResults
from baton.contract.guard import STEP_ERRORS_MAX
from baton.core.config import KVTransferConfig
from baton.engine.api import EngineOutput, EngineRequest, SamplingParams
from baton.engine.core.engine_core import EngineCore
from baton.engine.llm import LLM
from lab.bench import step_overhead

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def transfer(**told: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector="Fake", kv_role="kv_both", kv_connector_extra_config=told)


def request(request_id: str, prompt: list[int], **params: Any) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=GREEDY,
        arrival_time_s=0.0,
        kv_transfer_params=params or None,
    )


class World:
    def __init__(self, config: Any) -> None:
        self.core = EngineCore(config, FACTORY)
        assert factory.scheduler is not None
        assert factory.worker is not None
        self.scheduler: FakeSchedulerHalf = factory.scheduler
        self.worker: FakeWorkerHalf = factory.worker
        self.outputs: dict[str, list[EngineOutput]] = {}

    def add(self, *requests: EngineRequest) -> None:
        for asked in requests:
            assert self.core.add_request(asked) is None

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            for output in self.core.step().outputs:
                self.outputs.setdefault(output.request_id, []).append(output)

    def has_ended(self, request_id: str) -> bool:
        return bool(self.outputs.get(request_id, [])[-1:] and self.outputs[request_id][-1].finish_reason)

    def end_of(self, request_id: str) -> EngineOutput:
        assert self.has_ended(request_id)
        return self.outputs[request_id][-1]

    def tokens_of(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.new_token_ids]

    def free_blocks(self) -> int:
        return self.core.scheduler.kv_cache.block_pool.num_free_blocks


@pytest.fixture
def world(make_config):
    world = World(make_config(kv_transfer_config=transfer()))
    yield world
    world.core.shutdown()


@pytest.fixture(scope="module")
def reference(make_config) -> dict[str, list[int]]:
    with LLM(make_config()) as llm:
        long, short = llm.generate([LONG, SHORT], GREEDY)
    return {"long": long.token_ids, "short": short.token_ids}


LONG, SHORT = list(range(20, 40)), [3, 4, 5]


def test_the_scheduler_half_gets_every_ranks_handshake(world: World) -> None:
    assert {key: metadata.num_layers for key, metadata in world.scheduler.handshake.items()} == {(0, 0): 2}


def test_both_halves_are_shut_down(world: World) -> None:
    world.core.shutdown()
    assert world.scheduler.is_shut_down
    assert world.worker.transcript[-1] == "shutdown"


@pytest.mark.parametrize("method", ["start_load_kv", "handle_preemptions", "bind_connector_metadata"])
def test_a_load_that_could_not_begin_ends_its_request_with_an_error(
    world: World, reference: dict[str, list[int]], method: str
) -> None:
    world.add(request("earlier", LONG, matched=16, is_async=True))
    world.step()
    world.worker.raises = {method}
    world.add(request("hurt", [*LONG, 9], matched=16, is_async=True), request("bystander", SHORT))
    world.step()
    world.worker.raises = set()
    world.step(8)
    hurt = world.end_of("hurt")
    assert hurt.finish_reason == "error"
    assert hurt.error is not None
    assert not hurt.error.is_users
    assert f"{method} is broken" in hurt.error.message
    assert world.tokens_of("bystander") == reference["short"]
    assert not world.has_ended("earlier"), "its load had begun before"
    assert world.free_blocks() < 128, "the blocks of the failed load may still be written"
    world.worker.results = [KVConnectorTransferResults(set(), {"earlier", "hurt"}, {"earlier"})]
    world.step(12)
    assert world.tokens_of("earlier") == reference["long"]
    while world.core.has_requests:
        world.step()
    assert world.free_blocks() == 128


def test_a_half_that_keeps_failing_keeps_no_request_waiting(
    world: World, reference: dict[str, list[int]]
) -> None:
    world.add(request("waits", LONG, matched=16, is_async=True))
    world.step()
    world.worker.raises = {"get_transfer_results"}
    world.step(STEP_ERRORS_MAX - 1)
    assert not world.has_ended("waits")
    world.step()
    end = world.end_of("waits")
    assert end.finish_reason == "error"
    world.add(request("next", LONG, matched=16, is_async=True))
    world.step(10)
    assert world.tokens_of("next") == reference["long"], "computed locally, because the connector is retired"


@pytest.mark.parametrize("method", ["start_load_kv", "wait_for_layer_load", "get_block_ids_with_load_errors"])
def test_a_synchronous_load_that_failed_is_computed_here(
    world: World, reference: dict[str, list[int]], method: str
) -> None:
    world.worker.raises = {method}
    world.add(request("a", LONG, matched=16), request("b", SHORT))
    world.step()
    world.worker.raises = set()
    world.step(10)
    assert world.tokens_of("a") == reference["long"]
    assert world.tokens_of("b") == reference["short"]


def test_using_the_failed_load_would_change_the_tokens(world: World, reference: dict[str, list[int]]) -> None:
    """The fake loads nothing, so the two tests above would fail without the check."""
    world.add(request("a", LONG, matched=16))
    world.step(10)
    assert world.tokens_of("a") != reference["long"]


def test_lent_blocks_come_back_when_the_send_is_reported(world: World) -> None:
    world.add(request("lender", LONG, lend=True))
    world.step(8)
    end = world.end_of("lender")
    assert end.kv_transfer_params == {"blocks": 7}
    assert world.core.has_requests
    assert not world.core.has_unfinished_requests
    world.step()
    assert not world.core.has_progressed
    world.worker.results = [KVConnectorTransferResults({"lender"})]
    world.step()
    assert world.core.has_progressed
    assert not world.core.has_requests
    assert world.free_blocks() == 128


def test_the_overhead_benchmark_runs() -> None:
    rows = step_overhead.run(num_steps=2)
    expected = [(num, name) for num in step_overhead.BUDGET_MS for name in step_overhead.CONNECTORS]
    assert [(row.num_running, row.connector) for row in rows] == expected
    assert all(row.total_ms > 0 for row in rows)


# --- The scheduler half ---------------------------------------------------------------------------------


def test_without_its_scheduler_half_the_engine_continues_and_calls_no_worker_half(
    world: World, reference: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(scheduler_output: Any) -> Any:
        raise ConnectorDead("its thread has ended")

    monkeypatch.setattr(world.scheduler, "build_connector_meta", dies)
    world.add(request("long", LONG), request("short", SHORT, matched=2, is_async=True))
    before = list(world.worker.transcript)
    while world.core.has_requests:
        world.step()
    assert world.worker.transcript == before
    assert world.tokens_of("long") == reference["long"]
    end = world.end_of("short")
    assert end.error is not None
    assert "connector" in end.error.message
    world.add(request("again", SHORT, matched=2, is_async=True))
    while world.core.has_requests:
        world.step()
    assert world.tokens_of("again") == reference["short"]


def test_it_is_woken_only_if_both_halves_support_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def wake() -> None:
        return

    asked: list[object] = []

    def promise(of_half: object) -> bool:
        asked.append(of_half)
        return True

    world.core.bind_wake(wake)
    assert not world.core.is_woken, "neither says anything"
    monkeypatch.setattr(world.scheduler, "bind_wake", promise)
    world.core.bind_wake(wake)
    assert not world.core.is_woken, "no half would signal the end of a read"
    monkeypatch.setattr(world.worker, "bind_wake", promise)
    world.core.bind_wake(wake)
    assert world.core.is_woken
    assert asked == [wake] * 3


def test_a_step_that_only_resumes_a_request_is_progress(world: World) -> None:
    """The step computes nothing and returns nothing, but the next step has work."""
    world.add(request("long", LONG, matched=16, is_async=True))
    world.step()
    assert not world.core.has_progressed, "it waits for its load"
    world.worker.results = [KVConnectorTransferResults(finished_recving={"long"})]
    world.step()
    assert world.core.has_progressed
    assert not world.core.num_scheduled_tokens
    assert "long" not in world.outputs
    world.step()
    assert world.core.num_scheduled_tokens


# --- Reports of ranks ----------------------------------------------------------------------------------


@pytest.fixture
def world_of_two_reports(make_config):
    """A world in which an id counts after two reports."""
    world = World(make_config(kv_transfer_config=transfer(finished_count=2)))
    yield world
    world.core.shutdown()


def lend(world: World) -> None:
    world.outputs.clear()
    world.add(request("lender", SHORT, lend=True))
    while not world.has_ended("lender"):
        world.step()


def report_sent(world: World) -> None:
    world.worker.results = [KVConnectorTransferResults(finished_sending={"lender"})]
    world.step()


def test_the_scheduler_half_sets_the_number_of_reports_per_id(world_of_two_reports: World) -> None:
    world = world_of_two_reports
    lend(world)
    report_sent(world)
    assert world.free_blocks() < 128
    report_sent(world)
    assert world.free_blocks() == 128


def test_reports_of_an_ended_request_do_not_count_for_a_new_one_with_its_id(
    world_of_two_reports: World,
) -> None:
    world = world_of_two_reports
    lend(world)
    report_sent(world)
    world.scheduler.ends = {"lender"}  # The scheduler half adds it: its loans end by time.
    world.step()
    assert world.free_blocks() == 128
    lend(world)
    report_sent(world)
    assert world.free_blocks() < 128, "the second report is missing"
    report_sent(world)
    assert world.free_blocks() == 128


def loans(count: int) -> PullStats:
    stats = PullStats()
    stats.add(num_loans=count)
    return stats


def test_numbers_of_ranks_and_of_the_scheduler_half_are_added(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def numbers() -> Any:
        stats = world.core.step().stats
        assert stats is not None
        return stats.kv_connector_stats

    assert numbers() is None
    monkeypatch.setattr(world.worker, "get_kv_connector_stats", lambda: loans(2))
    assert numbers() == loans(2).data
    monkeypatch.setattr(world.scheduler, "get_kv_connector_stats", lambda: loans(3))
    assert numbers() == loans(5).data
    monkeypatch.setattr(world.worker, "get_kv_connector_stats", lambda: None)
    assert numbers() == loans(3).data


def test_unserialisable_stats_are_dropped_alone(
    world: World, reference: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.worker, "get_kv_connector_stats", lambda: PullStats({"transfers": object()}))
    world.add(request("short", SHORT))
    stats = world.core.step().stats
    assert stats is not None
    assert stats.kv_connector_stats is None
    assert stats.num_kv_connector_errors == 1
