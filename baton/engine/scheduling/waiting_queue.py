"""The queue of requests that wait for their turn, by `Request.order`.

A request that comes back (preempted, asked to come later) stands where it stood before: its order is its own.
"""

from __future__ import annotations

import heapq
import itertools

from baton.engine.request import Request


class WaitingQueue:
    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], int, Request]] = []  # May hold entries that were removed.
        self._entries = itertools.count()  # Settles ties between an entry and its request's removed one.
        self._members: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._members)

    def push(self, request: Request) -> None:
        assert request.request_id not in self._members, f"{request} is in the queue already"
        self._members[request.request_id] = request
        heapq.heappush(self._heap, (request.order, next(self._entries), request))

    def peek(self) -> Request | None:
        while self._heap:
            request = self._heap[0][2]
            if self._members.get(request.request_id) is request:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> bool:
        """False if it was not here. Its heap entry is dropped when it comes to the top."""
        return self._members.pop(request.request_id, None) is not None

    def members(self) -> list[Request]:
        """In no order."""
        return list(self._members.values())

    def youngest(self, *, other_than: Request) -> Request | None:
        others = [r for r in self._members.values() if r is not other_than]
        return max(others, key=lambda r: r.order, default=None)
