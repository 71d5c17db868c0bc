"""Where the requests stand that have not ended, and how one gives its place up.

    waiting -----------------> running        waiting: without blocks; running, loaded: with blocks
       |                          ^
       +--> (loading) --> loaded -+           loading: at `RemoteKV`, whose blocks nobody may take

    preempted: from running, or loaded, back to waiting, without blocks; all is computed again

All are kept in `Request.order`: of arrival (policy "fcfs") or of priority.
"""

from __future__ import annotations

from bisect import insort

from baton.engine.cache.kv_cache import KVCache
from baton.engine.request import Request, RequestStatus
from baton.engine.scheduling.stats import StepCounts
from baton.engine.scheduling.waiting_queue import WaitingQueue


class RequestQueues:
    def __init__(self, kv_cache: KVCache, counts: StepCounts) -> None:
        self.running: list[Request] = []  # By order.
        self.waiting = WaitingQueue()  # Without blocks.
        self.loaded = WaitingQueue()  # With blocks: their load has ended.
        self._kv_cache = kv_cache
        self._counts = counts

    def __bool__(self) -> bool:
        return bool(self.running or self.waiting or self.loaded)

    @property
    def num_waiting(self) -> int:
        """All that wait for their turn, with blocks or without."""
        return len(self.waiting) + len(self.loaded)

    def holders(self) -> list[Request]:
        """Those whose blocks nobody fills from elsewhere."""
        return [*self.running, *self.loaded.members()]

    def run(self, request: Request) -> None:
        """It has been taken out of its queue."""
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=_order)

    def remove(self, request: Request) -> None:
        """Wherever it stands, if it stands anywhere."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            _ = self.waiting.remove(request) or self.loaded.remove(request)

    def drop_finished(self) -> None:
        self.running = [request for request in self.running if not request.is_finished]

    # --- Back to waiting -------------------------------------------------------------------------

    def preempt(self, request: Request) -> None:
        """One that runs or has loaded."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.loaded.remove(request)
        self._counts.num_preempted += 1
        self.send_back(request)

    def preempt_last(self) -> Request:
        """Of the running."""
        request = self.running.pop()
        self._counts.num_preempted += 1
        self.send_back(request)
        return request

    def preempt_youngest_loaded(self, *, other_than: Request) -> bool:
        """Whether there was one."""
        request = self.loaded.youngest(other_than=other_than)
        if request is None:
            return False
        self.preempt(request)
        return True

    def send_back(self, request: Request) -> None:
        """One that stands nowhere: it gives its blocks up, and waits to be computed from its first token."""
        self._kv_cache.free(request)
        request.status = RequestStatus.PREEMPTED if request.is_known_to_ranks else RequestStatus.WAITING
        request.num_computed_tokens = 0
        if request.num_cached_tokens < 0:
            request.num_transferred_tokens = 0  # Loaded for nothing.
        self.waiting.push(request)


def _order(request: Request) -> tuple[float, ...]:
    return request.order
