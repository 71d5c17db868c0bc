"""Reports of computed layers (`stream: layer`) without a socket and a thread: they come late or never."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.connectors.pull.layer_reports import LayerReporter, LayerReportOrder, LayerReportReceiver

if TYPE_CHECKING:
    from lab.sim.host.engine import Engine

REPORT_MEAN_S = 0.001
LOSS = 0.1  # A full socket; in healed worlds too.


class LayerReports(LayerReportReceiver):
    """The simulated ranks call `on_report`."""

    def __init__(self, on_report: Callable[[int, int, int], None]) -> None:
        self.on_report = on_report

    def order(self, step: int) -> LayerReportOrder:
        return LayerReportOrder("", b"", step)

    def raise_if_dead(self) -> None:
        return

    def close(self, timeout_s: float) -> None:
        return


class Reporter(LayerReporter):
    def __init__(self, engine: Engine, tp_rank: int) -> None:
        super().__init__(tp_rank)
        self._engine = engine

    def _send(self, order: LayerReportOrder, num_layers: int) -> None:
        engine, rank, world = self._engine, self._tp_rank, self._engine.world
        if world.chance(LOSS):
            return

        def arrive() -> None:
            assert engine.layer_reports is not None
            engine.layer_reports.on_report(rank, order.step, num_layers)

        world.count("layers reported")
        world.after(world.spread(REPORT_MEAN_S), lambda: engine.when_awake(arrive))

    @property
    def is_asked(self) -> bool:
        """The scheduler half wants a report of each layer of the step that is bound."""
        return self._order is not None
