"""Restarts ended processes of a running system, with a growing delay and up to a limit.
ended --delay--> started again      1, 2, 4, 8, 16 s
ended too often ------------------> left out, while another process does the same work
                ------------------> ChildDied, if no other does
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from baton.cli.processes import Child, ChildDied, Fleet

FIRST_DELAY_S = 1.0  # The port and GPU memory are free by then; also prevents a busy loop.
RESTARTS_MAX = 5  # Restarts within RESTARTS_WITHIN_S. A process that ends more often will end again.
RESTARTS_WITHIN_S = 600.0


@dataclass(slots=True)
class Restarts:
    """Restart times of one process. Reads no clock."""

    _times: deque[float] = field(default_factory=deque)

    def delay(self, now: float) -> float | None:
        """Return the seconds until the process that has just ended is started again; None: no more
        restarts.
        """
        while self._times and now - self._times[0] >= RESTARTS_WITHIN_S:
            self._times.popleft()
        if len(self._times) == RESTARTS_MAX:
            return None
        self._times.append(now)
        return FIRST_DELAY_S * 2.0 ** (len(self._times) - 1)


def supervise(
    fleet: Fleet,
    groups: Sequence[Collection[str]],
    report: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> NoReturn:
    """Restart children until a group has no process left that may be restarted; then raise ChildDied.

    `groups`: names of processes that do the same work; each process of the fleet is in one.
    """
    restarts: defaultdict[str, Restarts] = defaultdict(Restarts)
    due: dict[Child, float] = {}  # Time of the restart.
    left_out: set[str] = set()
    while True:
        ended = fleet.wait_exit(max(0.0, min(due.values()) - clock()) if due else None)
        if ended is not None:
            fleet.forget(ended)
            delay_s = restarts[ended.name].delay(clock())
            if delay_s is not None:
                due[ended] = clock() + delay_s
                report(f"{ended.name} {ended.describe_exit()}: restarting it in {delay_s:g} s")
            else:
                left_out.add(ended.name)
                if any(ended.name in group and left_out.issuperset(group) for group in groups):
                    raise ChildDied(ended)
                report(f"{ended.name} {ended.describe_exit()} too often: continuing without it")
        for child in [child for child, at in due.items() if at <= clock()]:
            del due[child]
            fleet.start_again(child)
