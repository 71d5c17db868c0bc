"""`baton route` without timelines and the metrics that are made of them, to measure what these cost."""

from typing import Any

from baton.cli import main
from baton.router.request.timeline import Recorder, RequestTimeline
from baton.router.shell import in_flight
from baton.router.shell.metrics import RouterMetrics

NOTHING = Recorder("", "", "", received_at_s=0, arrived_at_s=0, span=None).timeline(200, 0)


class NoRecorder:
    span = None

    def __init__(self, *given: object, **named: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return _ignore

    def timeline(self, status: int | None, now_s: float) -> RequestTimeline:
        return NOTHING


def _ignore(*given: object) -> None: ...


if __name__ == "__main__":
    vars(in_flight)["Recorder"] = NoRecorder
    RouterMetrics.observe = _ignore  # type: ignore[assignment]
    main()
