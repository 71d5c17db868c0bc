"""Who runs the ranks of one engine: the engine core's own process, one process per rank, or Ray's actors.

    Executor.submit(SchedulerOutput) --> every rank --> Future[ModelRunnerOutput]

All kinds build the same `Worker` for each rank and combine the ranks' reports by the contract's one
aggregator. Steps may be submitted before the results of earlier ones have come; ranks run them in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from baton.core.errors import BatonError

if TYPE_CHECKING:
    from baton.contract import KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorWorkerHalf
    from baton.engine.step import ModelRunnerOutput, SchedulerOutput


class ExecutorDied(BatonError):
    """A rank is gone, and the engine with it. Says which rank and how it ended."""


def done(output: ModelRunnerOutput) -> Future[ModelRunnerOutput]:
    """Of a step that has run."""
    future: Future[ModelRunnerOutput] = Future()
    future.set_result(output)
    return future


class Executor(ABC):
    """Ready for steps once constructed."""

    @abstractmethod
    def submit(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """One step on all ranks, behind those submitted before. Never waits for ranks in other processes.

        The result is ExecutorDied, or what the model raised, if this executor can do nothing more; submit
        may raise the same.
        """

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """A step, and its result."""
        return self.submit(scheduler_output).result()

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

    @abstractmethod
    def forget_all_but(self, request_ids: Container[str]) -> None:
        """Requests that are gone wait for no rank's report any more."""

    def death_filenos(self) -> Sequence[int]:
        """Readable between steps when a rank has died: for an idle engine to wait on."""
        return ()

    @abstractmethod
    def check_alive(self) -> None:
        """Raises ExecutorDied."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends every rank, connector halves included. Idempotent, bounded."""
