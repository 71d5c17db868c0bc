"""`stream: layer` without sockets and threads: ranks report computed layers, late or never."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.connectors.push.layer_reports import LayerReporter, LayerReportOrder, LayerReportReceiver
from baton.connectors.push.scheduler import PushSchedulerHalf
from baton.connectors.push.worker import PushWorkerHalf

if TYPE_CHECKING:
    from baton.sim.hosts.full.engine import Engine

REPORT_MEAN_S = 0.001
LOSS = 0.1  # A full socket; in healed worlds too.


class _Receiver(LayerReportReceiver):
    def __init__(self) -> None:
        return  # No socket, no thread.

    def order(self, step: int) -> LayerReportOrder:
        return LayerReportOrder("", b"", step)

    def raise_if_dead(self) -> None:
        return

    def close(self, timeout_s: float) -> None:
        return


class _Reporter(LayerReporter):
    def __init__(self, engine: Engine, half: PushSchedulerHalf, tp_rank: int) -> None:
        super().__init__(tp_rank)
        self._engine = engine
        self._half = half

    def _send(self, order: LayerReportOrder, num_layers: int) -> None:
        engine, half, rank = self._engine, self._half, self._tp_rank
        world = engine.world
        if world.chance(LOSS):
            return

        def arrive() -> None:
            half._layers_done(rank, order.step, num_layers)

        world.count("layers reported")
        world.after(world.spread(REPORT_MEAN_S), lambda: engine.when_awake(arrive))

    @property
    def is_asked(self) -> bool:
        return self._order is not None


def stream_layers(engine: Engine, half: PushSchedulerHalf, workers: list[PushWorkerHalf]) -> None:
    """As if the settings had said `"stream": "layer"`, which would start a thread."""
    half._stream = "layer"
    half._layer_reports = _Receiver()
    for rank, worker in enumerate(workers):
        worker._reporter = _Reporter(engine, half, rank)


def reports_layers(worker: object) -> bool:
    """Somebody wants to hear of each layer of the step that is bound."""
    reporter = getattr(worker, "_reporter", None)
    return isinstance(reporter, _Reporter) and reporter.is_asked
