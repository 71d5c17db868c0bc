"""Worker halves of an engine's ranks, called in each step as the model runner calls them.

begin       takes_part, handle_preemptions, bind_connector_metadata, synchronous loads
show_layers wait_for_layer_load, save_kv_layer
end         finish_forward, start_load_kv, ..., clear_connector_metadata; the ranks' reports aggregated
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from baton.contract import (
    KVConnectorOutput,
    KVConnectorSchedulerHalf,
    KVConnectorWorkerHalf,
    KVOutputAggregator,
)
from baton.engine.forward_context import ForwardContext
from baton.engine.runner.connector_step import ConnectorStep
from baton.engine.step import SchedulerOutput

_SOME_METADATA: Any = {}  # Connectors look only at whether a step has attention metadata.


T = TypeVar("T")


class _Step(ConnectorStep):
    """Raises what a half raises."""

    def contain(
        self, method: str, call: Callable[[], T], otherwise: Any = None, *, request_id: str = ""
    ) -> T:
        return call()


class WorkerSteps:
    def __init__(
        self,
        halves: Sequence[KVConnectorWorkerHalf],
        aggregator: KVOutputAggregator,
        *,
        caches: Sequence[Mapping[str, torch.Tensor]] = (),
        block_tokens: int = 1,
    ) -> None:
        """`caches`: those that each rank's half has registered, by layer name."""
        self.halves = halves
        self._aggregator = aggregator
        self._caches = caches
        self._block_tokens = block_tokens
        self._steps: list[tuple[_Step, ForwardContext]] = []  # Calls of the step under way.

    def run(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        """Run a whole step at once."""
        self.begin(output)
        self.show_layers()
        return self.end()

    def step(self, half: KVConnectorSchedulerHalf, output: SchedulerOutput) -> KVConnectorOutput | None:
        """Run a whole step of a connector without a scheduler. `half`: what orders, and gets the report."""
        output.kv_connector_metadata = half.build_connector_meta(output)
        if (report := self.run(output)) is not None:
            half.update_connector_output(report)
        return report

    def begin(self, output: SchedulerOutput) -> None:
        assert not self._steps, "the step before has not ended"
        for half in self.halves:
            context = ForwardContext(attn_metadata=_SOME_METADATA if output.num_scheduled_tokens else None)
            step = _Step(half, output, context, self._block_tokens)
            self._steps.append((step.__enter__(), context))

    def show_layers(self, first: int = 0, last: int | None = None) -> None:
        """Call the hooks of the layers [first, last), as attention layers do."""
        for (_, context), caches in zip(self._steps, self._caches, strict=False):
            if (watcher := context.watcher) is not None:
                for name, cache in list(caches.items())[first:last]:
                    watcher.wait_for_layer_load(name)
                    watcher.save_kv_layer(name, cache, None)

    def end(self) -> KVConnectorOutput | None:
        """Return the aggregated report; None if there is none."""
        steps, self._steps = self._steps, []
        for step, _ in steps:
            step.__exit__(None, None, None)
        return self._aggregator.aggregate([step.report for step, _ in steps])
