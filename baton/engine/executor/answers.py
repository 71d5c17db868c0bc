"""Combination of the ranks' answers into one result per step, in order, for executors with several processes.

    submit -> StepFuture    result() drives the executor until the answers of this step and of all steps
                            before it have arrived

Rank 0 samples. The other ranks get a step's tokens with the first step that is submitted after its result has
arrived, which is before any of its requests is scheduled again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from baton.contract import KVConnectorHandshakeMetadata, KVConnectorMetadata
from baton.contract.aggregator import KVOutputAggregator
from baton.core.config import EngineConfig
from baton.core.errors import BatonError
from baton.engine.executor import Executor, RankStage, RankTake, RankWeights
from baton.engine.executor.rank_messages import (
    RankCapture,
    RankFailures,
    RankReady,
    RankStep,
    packed,
    packed_step,
)
from baton.engine.step import ModelRunnerOutput, SchedulerOutput

START_TIMEOUT_S = 600.0  # Time to read the weights of a large model from a slow disk.
STOP_TIMEOUT_S = 10.0  # Time for the shutdown of worker halves.


class StepFuture(Future[ModelRunnerOutput]):
    """Result of a step. No background thread completes it: `done` and `result` drive the executor."""

    def __init__(self, drive: Callable[[StepFuture, bool], None]) -> None:
        """`drive(self, is_waiting)` sets arrived results, and waits for this one if `is_waiting`."""
        super().__init__()
        self._drive = drive

    def done(self) -> bool:
        if not super().done():
            self._drive(self, False)
        return super().done()

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """`timeout` must be None: the executor has its own bound for a step."""
        assert timeout is None
        if not super().done():
            self._drive(self, True)
        return super().result(0)


class RankAnswers:
    """Aggregates the answers of the ranks of one executor."""

    def __init__(self) -> None:
        self._sampled: list[list[int]] = []
        self._unsent: deque[str | None] = deque()  # Per step in flight: why the ranks got no metadata.

    def note_sent(self, unsent: str | None) -> None:
        """Note a sent step. `unsent`: why it was sent without the connector's metadata, if it was."""
        self._unsent.append(unsent)

    def take_sampled(self) -> list[list[int]]:
        """The tokens of each step that has ended since the last call, for the ranks that do not sample."""
        sampled, self._sampled = self._sampled, []
        return sampled

    def combine(
        self, outputs: Sequence[ModelRunnerOutput], aggregator: KVOutputAggregator
    ) -> ModelRunnerOutput:
        """Combine the outputs of one step, one per rank in rank order. Call it for the steps in order."""
        output = outputs[0]
        self._sampled.append([token for tokens in output.sampled_token_ids for token in tokens])
        output.kv_connector_output = aggregator.aggregate([o.kv_connector_output for o in outputs])
        errors = (self._unsent.popleft(), *(o.connector_error for o in outputs), aggregator.error)
        output.connector_error = next((error for error in errors if error), None)
        output.loads_failed = any(o.loads_failed for o in outputs)
        return output


class RemoteExecutor(Executor):
    """Executor whose ranks are other processes. If a rank fails, every step in flight fails."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.parallel_config.tensor_parallel_size)
        self._step_timeout_s = config.step_timeout_s
        self._is_broken = False
        self._answers = RankAnswers()
        self._failures = RankFailures(self._num_ranks)
        self._in_flight: deque[tuple[StepFuture, Any]] = deque()  # Futures, each with the result of `_send`.

    @abstractmethod
    def _send(self, payload: bytes) -> Any:
        """Send a message to all ranks. Returns the key of its answers."""

    @abstractmethod
    def _has_answers(self, sent: Any) -> bool:
        """Whether every rank has answered the oldest message, whose key is `sent`."""

    @abstractmethod
    def _gather(self, sent: Any, timeout_s: float) -> list[Any]:
        """Wait for the answers to the oldest message. Returns them in rank order."""

    def _set_ready(self, ready: Sequence[RankReady]) -> None:
        """Keep the answers of the ranks' start, in rank order."""
        self._any_awaits_capture = any(answer.awaits_capture for answer in ready)
        self._handshake = {
            rank: answer.handshake_metadata
            for rank, answer in enumerate(ready)
            if answer.handshake_metadata is not None
        }

    def submit(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        step = RankStep(scheduler_output, self._answers.take_sampled())
        payload, unsent = packed_step(step, scheduler_output)
        self._answers.note_sent(unsent)
        future = StepFuture(self._drive)
        self._in_flight.append((future, self._send(payload)))
        return future

    def _drive(self, future: StepFuture, is_waiting: bool) -> None:
        while self._in_flight and self._in_flight[0][0] is not future:
            self._finish_oldest()
        if is_waiting or self._has_answers(self._in_flight[0][1]):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        future, sent = self._in_flight.popleft()
        try:
            outputs = self._gather(sent, self._step_timeout_s)
            future.set_result(self._answers.combine(outputs, self._aggregator))
        except BatonError as error:
            future.set_exception(error)
            raise

    def handshake_metadata(self) -> dict[int, KVConnectorHandshakeMetadata]:
        return self._handshake

    @property
    def awaits_capture(self) -> bool:
        return self._any_awaits_capture

    def _change_weights(self, message: RankStage | RankTake) -> list[RankWeights]:
        assert not self._in_flight, "answers come in the order of messages"
        return self._gather(self._send(packed(message)), START_TIMEOUT_S)

    def capture(self, metadata: KVConnectorMetadata) -> None:
        self._gather(self._send(packed(RankCapture(metadata))), START_TIMEOUT_S)
