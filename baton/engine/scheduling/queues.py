"""Queues of the requests that have not ended, and the ways back to waiting.

    waiting -----------------> running        waiting: without blocks; running, loaded: with blocks
       |                          ^
       +--> (loading) --> loaded -+           loading: in `RemoteKV`, whose blocks are never preempted, nor
                                              are those of requests that run while a load fills them

    preempted: from running or loaded back to waiting, without blocks; everything is computed again

All queues are in `Request.order`: order of arrival (policy "fcfs") or of priority. A request that returns
to a queue gets its former place, because its order does not change.
"""

import heapq
import itertools
from bisect import insort
from math import inf

from baton.engine.cache.kv_cache import KVCache
from baton.engine.request import Request, RequestStatus


class WaitingQueue:
    """Requests that wait to run, by `Request.order`."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], int, Request]] = []  # May hold entries that were removed.
        self._entries = itertools.count()  # Settles ties between an entry and its request's removed one.
        self._members: dict[str, Request] = {}
        self._lending: dict[str, Request] = {}  # The members that ask for a loan.

    def __len__(self) -> int:
        return len(self._members)

    def push(self, request: Request) -> None:
        assert request.request_id not in self._members, f"{request} is in the queue already"
        self._members[request.request_id] = request
        if request.computes_nothing:
            self._lending[request.request_id] = request
        heapq.heappush(self._heap, (request.order, next(self._entries), request))

    def peek(self) -> Request | None:
        while self._heap:
            request = self._heap[0][2]
            if self._members.get(request.request_id) is request:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> bool:
        """Whether the request was here. Its heap entry is dropped when it comes to the top."""
        self._lending.pop(request.request_id, None)
        return self._members.pop(request.request_id, None) is not None

    def lending(self) -> list[Request]:
        """Requests that compute nothing, in the order in which they came."""
        return list(self._lending.values())

    def members(self) -> list[Request]:
        """All requests, unordered."""
        return list(self._members.values())

    def youngest(self, *, other_than: Request) -> Request | None:
        """The last request that can be preempted, except `other_than`."""
        others = [r for r in self._members.values() if r is not other_than and not r.is_arriving]
        return max(others, key=_order, default=None)


class RequestQueues:
    def __init__(self, kv_cache: KVCache) -> None:
        self.running: list[Request] = []  # Running requests, in order.
        self.waiting = WaitingQueue()  # Requests without blocks.
        self.loaded = WaitingQueue()  # Requests with blocks whose load has ended.
        self._kv_cache = kv_cache
        self._num_preempted = 0

    def __bool__(self) -> bool:
        return bool(self.running or self.waiting or self.loaded)

    @property
    def num_waiting(self) -> int:
        """Requests that wait to run, with or without blocks."""
        return len(self.waiting) + len(self.loaded)

    def next_to_admit(self) -> WaitingQueue:
        """The queue whose first request is next. It may be empty, if both are."""
        loaded, waiting = self.loaded.peek(), self.waiting.peek()
        if loaded is None or (waiting is not None and waiting.rank < loaded.rank):
            return self.waiting
        return self.loaded

    def least_rank_waiting(self) -> float:
        heads = (self.waiting.peek(), self.loaded.peek())
        return min((request.rank for request in heads if request is not None), default=inf)

    def holders(self) -> list[Request]:
        """Requests with blocks that no load is filling."""
        return [*self.running, *self.loaded.members()]

    def run(self, request: Request) -> None:
        """Add a request that has left its queue to those that run."""
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=_order)

    def remove(self, request: Request) -> None:
        """Take the request out of its queue, if it is in one."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            _ = self.waiting.remove(request) or self.loaded.remove(request)

    def drop_finished(self) -> None:
        self.running = [request for request in self.running if not request.is_finished]

    @property
    def is_filling_loaded(self) -> bool:
        """Whether a loaded request cannot be preempted yet."""
        return any(request.is_arriving for request in self.loaded.members())

    # --- Back to waiting -------------------------------------------------------------------------

    def preempt(self, request: Request) -> None:
        """Send a running or loaded request back to waiting."""
        self.remove(request)
        self._num_preempted += 1
        self.send_back(request)

    def preempt_youngest_loaded(self, *, other_than: Request) -> bool:
        """Preempt the last loaded request except `other_than`. Whether there was one."""
        request = self.loaded.youngest(other_than=other_than)
        if request is None:
            return False
        self.preempt(request)
        return True

    def preempt_loaded_after(self, request: Request) -> bool:
        """Preempt the last loaded request that comes after `request`. Whether there was one."""
        last = self.loaded.youngest(other_than=request)
        if last is None or last.order < request.order:
            return False
        self.preempt(last)
        return True

    def send_back(self, request: Request) -> None:
        """Free the blocks of a request that is in no queue; it waits to be computed from its first token."""
        self._kv_cache.free(request)
        request.status = RequestStatus.PREEMPTED if request.is_known_to_ranks else RequestStatus.WAITING
        request.num_computed_tokens = 0
        if request.num_cached_tokens < 0:
            request.num_transferred_tokens = 0  # The load was of no use.
        self.waiting.push(request)

    def take_num_preempted(self) -> int:
        """Preemptions since the last call."""
        taken, self._num_preempted = self._num_preempted, 0
        return taken


def _order(request: Request) -> tuple[float, ...]:
    return request.order
