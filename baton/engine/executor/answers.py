"""What an executor makes of its ranks' answers, whatever brought them: one result for each step, in order.

    submit -> StepFuture    result() drives the executor until this step's answers have come, and with it
                            those of all steps before

Rank 0 samples. The others learn a step's tokens with the next step that is submitted after its result has
come, which is before any of its requests is scheduled again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future

from baton.contract.aggregator import KVOutputAggregator
from baton.engine.step import ModelRunnerOutput


class StepFuture(Future[ModelRunnerOutput]):
    """Of the thread that submits: nobody works on it in the background, so `result` does."""

    def __init__(self, drive: Callable[[StepFuture, bool], None]) -> None:
        """`drive(self, is_waiting)` sets results as they come; with `is_waiting` until this one has."""
        super().__init__()
        self._drive = drive

    def done(self) -> bool:
        if not super().done():
            self._drive(self, False)
        return super().done()

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """The executor has its own bound for a step; `timeout` is not asked for."""
        assert timeout is None
        if not super().done():
            self._drive(self, True)
        return super().result(0)


class RankAnswers:
    def __init__(self, num_ranks: int) -> None:
        self.aggregator = KVOutputAggregator(num_ranks)
        self._num_ranks = num_ranks
        self._untold: list[list[int]] = []
        self._unsent: deque[str | None] = deque()  # Of each step in flight: why the ranks had no metadata.

    def expect(self, expected_count: int | None) -> None:
        self.aggregator = KVOutputAggregator(expected_count or self._num_ranks, self._num_ranks)

    def forget_all_but(self, request_ids: Container[str]) -> None:
        self.aggregator.forget_all_but(request_ids)

    def note_sent(self, unsent: str | None) -> None:
        """A step is on its way; `unsent`: why without the connector's metadata, if so."""
        self._unsent.append(unsent)

    def take_untold(self) -> list[list[int]]:
        """The tokens of each step that has ended since the last call, for the ranks that did not sample."""
        untold, self._untold = self._untold, []
        return untold

    def combine(self, outputs: Sequence[ModelRunnerOutput]) -> ModelRunnerOutput:
        """`outputs`: one per rank, in rank order, of one step; steps in order."""
        output = outputs[0]
        self._untold.append([token for tokens in output.sampled_token_ids for token in tokens])
        output.kv_connector_output = self.aggregator.aggregate([o.kv_connector_output for o in outputs])
        errors = (self._unsent.popleft(), *(o.connector_error for o in outputs), self.aggregator.error)
        output.connector_error = next((error for error in errors if error), None)
        output.loads_failed = any(o.loads_failed for o in outputs)
        return output
