"""Wakes requests that wait to be let in: when others end, when a deadline passes, and now and then."""

import asyncio
from collections.abc import Sequence

from baton.router.fleet.admission import Ended
from baton.router.fleet.view import FleetView
from baton.router.request.events import tell_ended

LOOK_EVERY_S = 0.1  # While requests wait: engines come and go, and other routers leave room.


class AdmissionQueue:
    """Made and used in one event loop."""

    def __init__(self, view: FleetView) -> None:
        self._admission, self._loop = view.admission, asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_due = False
        if self._admission is not None:
            self._admission.on_room = self._pump_soon

    def wait(self, displaced: Sequence[Ended]) -> None:
        """A request waits now, and these do not any more."""
        self._loop.call_soon(tell_ended, displaced)
        self._set_timer()

    def _pump_soon(self) -> None:
        """Not now: the machine that makes room is in the middle of its step."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        assert self._admission is not None
        self._is_due = False
        tell_ended(self._admission.pump(self._loop.time()))
        self._set_timer()

    def _set_timer(self) -> None:
        assert self._admission is not None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._admission.num_waiting:
            wait_s = min(LOOK_EVERY_S, self._admission.wakes_at_s - self._loop.time())
            self._timer = self._loop.call_later(max(0.0, wait_s), self._pump)
