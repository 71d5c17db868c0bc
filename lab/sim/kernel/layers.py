"""Reports of computed layers (`stream: layer`) without a socket and a thread."""

from __future__ import annotations

from collections.abc import Callable

from baton.connectors.pull.layer_reports import LayerReportOrder, LayerReportReceiver


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
