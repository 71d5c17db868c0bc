"""Who runs the ranks of one engine: in the engine core's own process, or in one process per rank.

    Executor.execute(SchedulerOutput) --> every rank --> one ModelRunnerOutput

Both kinds build the same `Worker` for each rank and combine the ranks' reports by the contract's one
aggregator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from baton.core.errors import BatonError

if TYPE_CHECKING:
    from baton.contract import KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorWorkerHalf
    from baton.core.config import EngineConfig
    from baton.engine.step import ModelRunnerOutput, SchedulerOutput


class ExecutorDied(BatonError):
    """A rank is gone, and the engine with it. Says which rank and how it ended."""


class Executor(ABC):
    """Ready for steps once constructed."""

    @abstractmethod
    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """One step on all ranks. Raises ExecutorDied, or what the model raised; neither can be survived."""

    @abstractmethod
    def handshake_metadata(self) -> dict[int, KVConnectorHandshakeMetadata]:
        """What each tensor-parallel rank's worker half wants its peers to know."""

    @property
    def awaits_capture(self) -> bool:
        """The connector's layer hooks are to be captured, under metadata that its scheduler half makes."""
        return False

    def capture(self, metadata: KVConnectorMetadata) -> None:
        """If it `awaits_capture`: on all ranks, once, before the first step. `metadata`: of an empty step."""
        raise AssertionError("nobody waits for a capture")

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """See `KVConnectorWorkerHalf.bind_wake`. False: somebody has to look for what ranks have to say."""
        return False

    def only_half(self) -> KVConnectorWorkerHalf | None:
        """The worker half of the only rank, if that lives in this process."""
        return None

    @abstractmethod
    def expect_reports(self, expected_count: int | None) -> None:
        """How many ranks report a finished id before it counts; None: all. Before the first step."""

    def death_filenos(self) -> Sequence[int]:
        """Readable between steps when a rank has died: for an idle engine to wait on."""
        return ()

    @abstractmethod
    def check_alive(self) -> None:
        """Raises ExecutorDied."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends every rank, connector halves included. Idempotent, bounded."""


def start_executor(config: EngineConfig, connector_factory: str | None) -> Executor:
    if config.parallel_config.executor == "multiprocess":
        from baton.engine.executor.multiprocess import MultiprocessExecutor

        return MultiprocessExecutor(config, connector_factory)
    from baton.engine.executor.inprocess import InProcessExecutor

    return InProcessExecutor(config, connector_factory)
