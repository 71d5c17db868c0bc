"""Decides which prompts the ranks read ahead: requests that wait to be scheduled, and hints.

    wait, hint --its lookup has ended--> ordered --> forgotten
            `--- its lookup is overdue, or it is scheduled before: nothing is read

No I/O; time is an argument.
"""

from __future__ import annotations

from baton.connectors.storage.stores.metadata import ReadChunks
from baton.connectors.storage.stores.prompts import Prompt

HINTS_MAX = 64  # Prompts that may come, at a time.


class ReadAheadPlan:
    def __init__(self, *, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self._waiting: dict[str, Prompt] = {}  # Requests and hints whose lookup has not ended.
        self._began_s: dict[str, float] = {}  # Times since which ranks read ahead, by request or hint.
        self._hints: dict[str, float] = {}  # Times until which the next prompt may come, by hint.
        self._forget: list[str] = []

    def wait(self, prompt: Prompt, until_s: float | None = None) -> None:
        """`until_s`: of a hint, when it ends."""
        if prompt.lookup is None or not self.is_enabled:
            return
        owner = prompt.request.request_id
        self._waiting[owner] = prompt
        if until_s is not None:
            self._hints[owner] = until_s
            if len(self._hints) > HINTS_MAX:
                self.end(next(iter(self._hints)))

    def schedule(self, owner: str) -> None:
        """A request does not wait any more. What is being read ahead for it goes on."""
        self._waiting.pop(owner, None)

    def end(self, owner: str) -> None:
        prompt = self._waiting.pop(owner, None)
        if self._hints.pop(owner, None) is not None and prompt is not None and prompt.lookup is not None:
            prompt.lookup.is_cancelled = True  # Lookups of requests wait for it.
        if self._began_s.pop(owner, None) is not None:
            self._forget.append(owner)

    def end_all(self) -> None:
        for owner in [*self._waiting, *self._began_s]:
            self.end(owner)

    def lasts_s(self, owner: str, now: float) -> float:
        """Seconds since the order to read ahead; 0 without one."""
        return now - self._began_s.get(owner, now)

    @property
    def has_orders(self) -> bool:
        """Whether the ranks must be told something without a request that is scheduled."""
        return bool(self._forget or self._hints.keys() & self._waiting.keys())

    def take_orders(self, now: float) -> tuple[tuple[ReadChunks, ...], tuple[str, ...]]:
        """What the ranks read from now on, and whose chunks they need no longer keep."""
        for hint in [hint for hint, until_s in self._hints.items() if until_s <= now]:
            self.end(hint)
        orders = []
        for owner, prompt in list(self._waiting.items()):
            assert prompt.lookup is not None
            if prompt.lookup.result(now) is None:
                continue
            del self._waiting[owner]
            if parts := prompt.parts_ahead():
                self._began_s[owner] = now
                orders.append(ReadChunks(owner, parts))
        forget, self._forget = self._forget, []
        return tuple(orders), tuple(forget)
