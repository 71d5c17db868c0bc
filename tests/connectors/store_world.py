"""The real scheduler with halves of a connector that stores KV, and ranks whose KV can be checked."""

from collections.abc import Sequence
from types import SimpleNamespace

from baton.contract import KVConnectorOutput, KVConnectorSchedulerHalf, KVConnectorWorkerHalf
from baton.contract.aggregator import KVOutputAggregator
from baton.core.config import EngineConfig
from baton.engine.api import EngineRequest
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.step import ModelRunnerOutput, SchedulerOutput
from tests.engine_sched.world import GARBAGE, Ended, FakeRanks, expected_output


class StoreWorld:
    """Each request must end once, with the tokens of a single engine or with an error."""

    def __init__(
        self,
        config: EngineConfig,
        half: KVConnectorSchedulerHalf,
        ranks: Sequence[FakeRanks],
        workers: Sequence[KVConnectorWorkerHalf],
    ) -> None:
        self.scheduler = Scheduler(config, half)
        self._ranks = list(zip(ranks, workers, strict=True))
        self._aggregator = KVOutputAggregator(len(ranks))
        self.asked: dict[str, EngineRequest] = {}
        self.answers: dict[str, Ended] = {}

    def add(self, asked: EngineRequest) -> None:
        self.asked[asked.request_id] = asked
        self.answers[asked.request_id] = Ended()
        for rank, _ in self._ranks:
            rank.salts[asked.request_id] = asked.cache_salt
        self.scheduler.add_request(asked)

    def step(self) -> None:
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        assert metadata is not None, "the scheduler half raised"
        results, reports = [], []
        for rank, worker in self._ranks:
            rank.take_over(output)
            worker.handle_preemptions(metadata)
            worker.bind_connector_metadata(metadata)
            self.call_hooks(worker, output)
            results.append(rank.execute(output))
            has_tokens = output.total_num_scheduled_tokens > 0
            worker.start_load_kv(SimpleNamespace(attn_metadata=() if has_tokens else None))
            worker.wait_for_save()
            transfers = worker.get_transfer_results(output.finished_req_ids)
            reports.append(
                KVConnectorOutput(
                    finished_recving=transfers.finished_recving,
                    failed_recving=transfers.failed_recving,
                    invalid_block_ids=worker.get_block_ids_with_load_errors(),
                    kv_connector_worker_meta=worker.build_connector_worker_meta(),
                )
            )
            worker.clear_connector_metadata()
        result = _worst(results)
        result.kv_connector_output = self._aggregator.aggregate(reports)
        for part in self.scheduler.update_from_output(output, result).outputs:
            answer = self.answers[part.request_id]
            assert answer.last is None, "ended twice"
            answer.token_ids += part.new_token_ids
            if part.finish_reason is not None:
                answer.last = part

    def call_hooks(self, worker: KVConnectorWorkerHalf, output: SchedulerOutput) -> None:
        """Calls the worker's hooks that come before the layers of a step."""

    def run(self) -> None:
        for _ in range(3000):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError("still not at rest")

    def check(self, on_failure: str = "recompute") -> None:
        self.check_answers(on_failure)
        self.scheduler.kv_cache.assert_empty()

    def check_answers(self, on_failure: str) -> None:
        for request_id, answer in self.answers.items():
            expected = expected_output(self.asked[request_id])
            if answer.reason == "length":
                assert answer.token_ids == expected, request_id
            else:
                assert answer.reason in ("abort", "error")
                assert answer.reason == "abort" or on_failure == "fail"
                assert answer.token_ids == expected[: len(answer.token_ids)]


def _worst(results: list[ModelRunnerOutput]) -> ModelRunnerOutput:
    """Combined results of the ranks; if any rank computed with bad KV, the result is wrong."""
    return next((r for r in results if [GARBAGE] in r.sampled_token_ids), results[0])
