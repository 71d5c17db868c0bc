"""One timer of the event loop for the deadlines of all connections and legs.

Nearly every deadline is cancelled or put off before it comes. Both cost a dictionary's entry and no timer.
A deadline comes up to `TICK_S` late.
"""

from collections.abc import Callable

from baton.router.fleet.links import Clock

TICK_S = 0.05


class Deadline:
    """Calls `on_late` once `at_s` of the loop's clock has passed, unless it was cancelled."""

    __slots__ = ("_wheel", "at_s", "on_late", "slot")

    def __init__(self, wheel: "TimerWheel", on_late: Callable[[], None]) -> None:
        self._wheel = wheel
        self.on_late = on_late
        self.at_s = 0.0
        self.slot: int | None = None

    def set(self, seconds: float) -> None:
        """Set the time, counted from now. It replaces the one that was set before."""
        now_s = self._wheel.now_s()
        self.set_at(now_s + seconds, now_s)

    def set_at(self, at_s: float, now_s: float) -> None:
        """A deadline that is put off stays in its slot: it is looked at again when that slot's time comes."""
        self.at_s = at_s
        slot = int(at_s / TICK_S) + 1
        if self.slot is None or self.slot > slot:
            self._wheel.put(self, slot, now_s)

    def cancel(self) -> None:
        self.at_s = float("inf")
        self._wheel.remove(self)


class TimerWheel:
    """Deadlines by slot (Varghese and Lauck, 1987). Used from one event loop."""

    def __init__(self, loop: Clock) -> None:
        self._loop = loop
        self.now_s = loop.time
        self._slots: dict[int, dict[Deadline, None]] = {}
        self._tick: object | None = None
        self._next = 0  # The first slot whose time has not come.

    def deadline(self, on_late: Callable[[], None]) -> Deadline:
        return Deadline(self, on_late)

    def put(self, deadline: Deadline, slot: int, now_s: float) -> None:
        self.remove(deadline)
        self._insert(deadline, slot)
        if self._tick is None:
            self._next = int(now_s / TICK_S)
            self._tick = self._loop.call_later(TICK_S, self._turn)

    def remove(self, deadline: Deadline) -> None:
        if deadline.slot is not None:
            slot = self._slots[deadline.slot]
            del slot[deadline]
            if not slot:
                del self._slots[deadline.slot]
            deadline.slot = None

    def _insert(self, deadline: Deadline, slot: int) -> None:
        self._slots.setdefault(slot, {})[deadline] = None
        deadline.slot = slot

    def _turn(self) -> None:
        self._tick = None
        now_s = self._loop.time()
        first, self._next = self._next, int(now_s / TICK_S) + 1
        if self._next - first > len(self._slots):  # The clock has jumped, or the loop stood still.
            due = sorted(slot for slot in self._slots if slot < self._next)
        else:
            due = [slot for slot in range(first, self._next) if slot in self._slots]
        late = []
        for slot in due:
            for deadline in self._slots.pop(slot):
                deadline.slot = None
                if deadline.at_s <= now_s:
                    late.append(deadline)
                else:
                    self._insert(deadline, int(deadline.at_s / TICK_S) + 1)
        if self._slots:
            self._tick = self._loop.call_later(TICK_S, self._turn)
        for deadline in late:
            if deadline.slot is None and deadline.at_s <= now_s:  # Another one's end may have put it off.
                deadline.on_late()
