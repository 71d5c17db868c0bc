"""Steps in flight: steps that the ranks have and whose results have not come.

    begin(step 1) -> begin(step 2) -> end(step 1) -> begin(step 3) -> end(step 2) -> ...

Ranks run steps in order, so results come in order. A request with a step in flight is *busy*:

    it is not scheduled again      its next token depends on the result
    it is not preempted            the step still writes into its blocks
    it does not end                an abort is kept until the result has come

That is the fence on freed blocks: a step in flight writes only into blocks of requests that keep their
tables, and so their holders, until the step is done. No free block is ever about to be written; loads rely on
that (`baton.contract.base`).

A load that is agreed on in a step is ordered in that step, so it cannot end before the step does.

Imports no torch and reads no clock.
"""

from collections import deque
from dataclasses import dataclass, field

from baton.engine.api import RequestError
from baton.engine.request import Request, RequestStatus
from baton.engine.scheduling.remote_kv import StepLoads
from baton.engine.step import SchedulerOutput


@dataclass(frozen=True, slots=True)
class KeptEnd:
    """The end of a busy request, kept until its step is done."""

    request: Request
    status: RequestStatus
    error: RequestError | None


@dataclass(slots=True)
class InFlight:
    num_done: int = 0  # Steps whose results have come; they are numbered from 1.
    _steps: deque[tuple[SchedulerOutput, StepLoads]] = field(default_factory=deque)  # Oldest first.
    _ends: dict[str, KeptEnd] = field(default_factory=dict)
    _arrivals: set[str] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._steps)

    def is_busy(self, request: Request) -> bool:
        return request.last_step > self.num_done

    # --- Steps -----------------------------------------------------------------------------------

    def begin(self, output: SchedulerOutput, scheduled: list[Request], loads: StepLoads) -> None:
        """Add a decided step; the ranks may run it at any time from now on."""
        self._steps.append((output, loads))
        number = self.num_done + len(self._steps)
        for request in (*scheduled, *loads.parked):
            request.last_step = number

    def loads_of(self, output: SchedulerOutput) -> StepLoads:
        """Loads of the oldest step, whose result has come."""
        assert self._steps, "no step is in flight"
        assert self._steps[0][0] is output, "results come in the order of steps"
        return self._steps[0][1]

    def end(self, output: SchedulerOutput) -> StepLoads:
        """Remove the oldest step, whose result has come: its requests are no longer busy with it."""
        loads = self.loads_of(output)
        self._steps.popleft()
        self.num_done += 1
        return loads

    def is_void(self, request: Request) -> bool:
        """Whether to drop what the step that has just ended computed for this request."""
        return request.void_step == self.num_done

    def make_void(self, request: Request) -> None:
        """Drop what a step in flight computes for the request, because its KV was found to be invalid."""
        if self.is_busy(request):
            request.void_step = request.last_step

    # --- Waiting for a step ---------------------------------------------------------------------

    def keep_end(self, end: KeptEnd) -> None:
        assert self.is_busy(end.request)
        self._ends[end.request.request_id] = end

    def is_ending(self, request: Request) -> bool:
        return request.request_id in self._ends

    def ending(self) -> list[Request]:
        return [end.request for end in self._ends.values()]

    def take_ends(self) -> list[KeptEnd]:
        """Kept ends of the requests that are no longer busy."""
        due = [end for end in self._ends.values() if not self.is_busy(end.request)]
        for end in due:
            del self._ends[end.request.request_id]
        return due

    def hold_back_early(self, arrived: set[str], requests: dict[str, Request]) -> set[str]:
        """Ids of ended loads, without those whose step is in flight: they are held back until it is done."""
        if not arrived and not self._arrivals:
            return arrived
        arrived = arrived | self._arrivals
        self._arrivals = {
            id_ for id_ in arrived if (request := requests.get(id_)) is not None and self.is_busy(request)
        }
        return arrived - self._arrivals
