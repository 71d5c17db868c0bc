"""The host's engine with halves of a connector that stores KV."""

from collections.abc import Sequence

from baton.contract import KVConnectorSchedulerHalf, KVConnectorWorkerHalf
from baton.contract.aggregator import KVOutputAggregator
from baton.core.config import EngineConfig
from baton.engine.api import EngineRequest
from baton.testing.host.engine import Engine
from baton.testing.host.ranks import Ranks
from baton.testing.host.workers import WorkerSteps
from tests.engine_sched.world import expected_output


class StoreWorld(Engine):
    """Each request must end once, with the tokens of a single engine or with an error."""

    def __init__(
        self,
        config: EngineConfig,
        half: KVConnectorSchedulerHalf,
        ranks: Ranks,
        workers: Sequence[KVConnectorWorkerHalf],
    ) -> None:
        super().__init__(config, half, ranks.salts)
        self.ranks = ranks
        caches = [memory.kv_caches for memory in ranks.memories]
        aggregator = KVOutputAggregator(len(workers))
        block_tokens = config.cache_config.block_size
        self.worker_steps = WorkerSteps(workers, aggregator, caches=caches, block_tokens=block_tokens)

    def add(self, asked: EngineRequest) -> None:
        self.add_request(asked)

    def check(self, on_failure: str = "recompute") -> None:
        self.check_answers(on_failure)
        self.scheduler.kv_cache.assert_empty()

    def check_answers(self, on_failure: str) -> None:
        for request_id, answer in self.answers.items():
            expected = expected_output(answer.asked, self.config.model_config.windows)
            if answer.reason == "length":
                assert answer.token_ids == expected, request_id
            else:
                assert answer.reason in ("abort", "error")
                assert answer.reason == "abort" or on_failure == "fail"
                assert answer.token_ids == expected[: len(answer.token_ids)]
