"""Executor of a single rank in the engine core's process, without serialisation."""

from collections.abc import Callable
from concurrent.futures import Future

from baton.contract import KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorWorkerHalf
from baton.contract.factory import load_factory
from baton.core.config import EngineConfig
from baton.engine.executor import Executor, RankStage, RankTake, RankWeights, done
from baton.engine.executor.worker import Worker
from baton.engine.models.parallel import SingleRank
from baton.engine.step import ModelRunnerOutput, SchedulerOutput


class InProcessExecutor(Executor):
    """Runs the only rank in `submit`."""

    def __init__(self, config: EngineConfig, connector_factory: str | None) -> None:
        assert config.parallel_config.tensor_parallel_size == 1, "checked by ParallelConfig"
        super().__init__(1)
        self._worker = Worker(config, load_factory(connector_factory), SingleRank())

    def submit(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """The returned future is done."""
        output = self._worker.execute(scheduler_output, [])
        output.kv_connector_output = self._aggregator.aggregate([output.kv_connector_output])
        return done(output)

    def handshake_metadata(self) -> dict[int, KVConnectorHandshakeMetadata]:
        metadata = self._worker.half.get_handshake_metadata()
        return {} if metadata is None else {0: metadata}

    @property
    def awaits_capture(self) -> bool:
        return self._worker.awaits_capture

    def capture(self, metadata: KVConnectorMetadata) -> None:
        self._worker.capture(metadata)

    def _change_weights(self, message: RankStage | RankTake) -> list[RankWeights]:
        return [self._worker.change_weights(message)]

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        return self._worker.half.bind_wake(wake)

    def only_half(self) -> KVConnectorWorkerHalf:
        return self._worker.half

    def shutdown(self) -> None:
        self._worker.half.shutdown()
