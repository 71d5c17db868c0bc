"""One incarnation of an engine: it lives, stands still, and has a clock that drifts and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.core.ids import Address
from baton.core.timers import Timers
from lab.sim.kernel.timers import SIM_TIMERS
from lab.sim.kernel.world import World

if TYPE_CHECKING:
    from baton.testing.host.memory import RankMemory
    from lab.sim.host.pool import WatchedPool

NEVER = float("inf")
SOON_S = 1e-5


class Process:
    address: Address
    pool: WatchedPool
    lends: bool
    fetches_kv: bool
    num_ranks: int
    memories: list[RankMemory]  # Memories by rank.
    is_slow = False  # True: its reads are slow.

    def __init__(
        self, world: World, name: str, rate: float, skew_s: float, timers: Timers = SIM_TIMERS
    ) -> None:
        """The clock of the process shows `rate` times the true time, plus `skew_s`."""
        self.world, self.name, self.rate, self.skew_s = world, name, rate, skew_s
        self.timers = timers
        self.is_alive = True
        self._paused_until = -NEVER
        self._never_before = -NEVER  # The clock has shown this time, and does not go back.

    def clock(self) -> float:
        now = self.world.now * self.rate + self.skew_s
        return now if now > self._never_before else self._never_before

    def step_clock(self, by_s: float) -> None:
        """A negative step stops the clock for this time, because a monotonic clock does not go back."""
        self.world.note(self.name, f"its clock steps by {by_s} s")
        self._never_before = self.clock()
        self.skew_s += by_s

    @property
    def is_paused(self) -> bool:
        return self._paused_until > self.world.now

    @property
    def wakes_in_s(self) -> float:
        return self._paused_until - self.world.now + SOON_S

    def pause(self, for_s: float) -> None:
        self.world.paused_s += for_s
        self.world.note(self.name, f"stands still for {for_s} s")
        self._paused_until = self.world.now + for_s

    def when_awake(self, action: Callable[[], None]) -> None:
        """Run it now, or when the process goes on; never if it is dead by then."""
        if not self.is_alive:
            return
        if self._paused_until > self.world.now:
            self.world.after(self.wakes_in_s, lambda: self.when_awake(action))
        else:
            action()
