"""Executors: run the ranks of an engine in the core's process, one process per rank, or Ray actors.

    Executor.submit(SchedulerOutput) --> every rank --> Future[ModelRunnerOutput]

Every executor builds the same `Worker` for each rank and combines the ranks' reports with the contract's
aggregator. Steps may be submitted before the results of earlier steps; the ranks run them in order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from baton.checkpoints.checkpoint import FilesState
from baton.contract import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorSchedulerHalf,
    KVConnectorWorkerHalf,
)
from baton.contract.aggregator import KVOutputAggregator
from baton.core.errors import BatonError
from baton.engine.api import RequestError
from baton.engine.step import ModelRunnerOutput, SchedulerOutput


class ExecutorDied(BatonError):
    """A rank has ended, and with it the engine. The message names the rank and how it ended."""


def done(output: ModelRunnerOutput) -> Future[ModelRunnerOutput]:
    """A future with this result."""
    return _Done(output)


class _Done(Future[ModelRunnerOutput]):
    """A completed future without a lock: creating a lock takes longer than several of a step's parts."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        return self._output


@dataclass(frozen=True, slots=True)
class RankStage:
    """Read other weights from a folder, beside those in use. `files`: see `Executor.stage_weights`."""

    folder: str
    files: FilesState


@dataclass(frozen=True, slots=True)
class RankTake:
    """Compute with the staged weights from now on, or drop them."""

    is_wanted: bool


@dataclass(frozen=True, slots=True)
class RankWeights:
    """The answer to RankStage and RankTake. A rank with an error has changed nothing."""

    error: RequestError | None = None


class Executor(ABC):
    """Runs the steps of an engine's ranks. It is ready once constructed."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._aggregator = KVOutputAggregator(num_ranks)

    @abstractmethod
    def submit(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Run one step on all ranks, after the steps submitted before. Never waits for other processes.

        If the executor has failed, the future raises ExecutorDied or the model's error; `submit` may raise
        the same.
        """

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and wait for its result."""
        return self.submit(scheduler_output).result()

    @abstractmethod
    def handshake_metadata(self) -> dict[int, KVConnectorHandshakeMetadata]:
        """Handshake metadata of each tensor-parallel rank's worker half, for its peers."""

    @property
    def awaits_capture(self) -> bool:
        """Whether `capture` has to be called with metadata of the connector's scheduler half."""
        return False

    def capture(self, metadata: KVConnectorMetadata) -> None:
        """Record the connector's layer hooks on all ranks: once, before the first step, if `awaits_capture`.

        `metadata`: that of an empty step.
        """
        raise AssertionError("this executor awaits no capture")

    def stage_weights(self, folder: str, files: FilesState) -> RequestError | None:
        """Read and check other weights on all ranks, beside those in use. No step may be in flight.

        `files`: the folder's state from before its weights were digested. Nothing has changed after an error.
        """
        answers = self._change_weights(RankStage(folder, files))
        error = next((answer.error for answer in answers if answer.error is not None), None)
        if error is not None:
            self.end_staging(is_wanted=False)
        return error

    def end_staging(self, *, is_wanted: bool) -> None:
        """Compute with the staged weights on all ranks, or drop them.

        If that fails on one rank, the engine has to end: others may compute with the new weights already.
        """
        self._change_weights(RankTake(is_wanted))

    def _change_weights(self, message: RankStage | RankTake) -> Sequence[RankWeights]:
        """The answer of each rank."""
        raise AssertionError("the ranks of this executor have no weights")

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """See `KVConnectorWorkerHalf.bind_wake`. False: the caller has to poll the ranks by steps."""
        return False

    def only_half(self) -> KVConnectorWorkerHalf | None:
        """The worker half of the only rank, if it is in this process."""
        return None

    def connect(self, half: KVConnectorSchedulerHalf, *, has_steps_in_flight: bool) -> None:
        """Connect the scheduler half with the ranks' halves, before the first step."""
        self.expect_reports(half.get_finished_count())
        if handshake := self.handshake_metadata():
            half.set_xfer_handshake_metadata_pp_aware(
                {(0, tp_rank): metadata for tp_rank, metadata in handshake.items()}
            )
        if self.awaits_capture:
            self.capture(half.build_connector_meta(SchedulerOutput()))
        if (only_half := self.only_half()) is not None and not has_steps_in_flight:
            half.bind_only_rank(only_half)

    def expect_reports(self, expected_count: int | None) -> None:
        """Set the number of ranks that report a finished id; None: all. Call it before the first step."""
        self._aggregator = KVOutputAggregator(expected_count or self._num_ranks, self._num_ranks)

    def forget_all_but(self, request_ids: Container[str]) -> None:
        """Drop partial reports of all other requests."""
        self._aggregator.forget_all_but(request_ids)

    def death_filenos(self) -> Sequence[int]:
        """Descriptors that become readable when a rank dies between steps, for an idle engine to wait on."""
        return ()

    def check_alive(self) -> None:
        """Raises ExecutorDied if a rank has ended; ranks in this process cannot."""
        return

    @abstractmethod
    def shutdown(self) -> None:
        """End every rank and its connector half, in bounded time. Idempotent."""
