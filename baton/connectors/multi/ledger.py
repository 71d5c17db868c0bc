"""Ledger of a Multi connector: the child that loads a request, and the children that still use its blocks.

    matched   the first child with tokens, at the last query
    loading   that child, from the allocation of blocks to an asynchronous load until its end is reported
    delayed   the children that answered `delay_free`; the blocks are free after the last of them has reported

No I/O. A child is identified by its position in the configuration.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    position: int
    num_local_tokens: int
    is_async: bool


class Ledger:
    def __init__(self) -> None:
        self._matched: dict[str, Choice] = {}
        self._loading: dict[str, int] = {}
        self._delayed: dict[str, set[int]] = {}

    # --- Loads -----------------------------------------------------------------------------------

    def match(self, request_id: str, choice: Choice | None) -> None:
        """Records the last answer, which replaces earlier ones."""
        if choice is None:
            self._matched.pop(request_id, None)
        else:
            self._matched[request_id] = choice

    def chosen(self, request_id: str) -> Choice | None:
        return self._matched.get(request_id)

    def begin_load(self, request_id: str, position: int) -> None:
        self._loading[request_id] = position

    def loads_of(self, position: int) -> set[str]:
        return {request_id for request_id, loader in self._loading.items() if loader == position}

    def end_load(self, request_id: str, position: int) -> bool:
        """False: this child does not load the request, so its report is ignored."""
        if self._loading.get(request_id) != position:
            return False
        del self._loading[request_id]
        return True

    # --- Ends ------------------------------------------------------------------------------------

    def finish(self, request_id: str, delayed_by: set[int]) -> bool:
        """True: the blocks stay until each of these children has reported. A load may still be running."""
        self._matched.pop(request_id, None)
        if delayed_by:
            self._delayed[request_id] = set(delayed_by)
        return bool(delayed_by)

    def end_send(self, request_id: str, position: int) -> bool:
        """True: this was the last child to report."""
        waiting = self._delayed.get(request_id)
        if waiting is None or position not in waiting:
            return False
        waiting.discard(position)
        if waiting:
            return False
        del self._delayed[request_id]
        return True

    def awaits(self, request_id: str, position: int) -> bool:
        """Whether this child still has to report an end of the request."""
        return self._loading.get(request_id) == position or position in self._delayed.get(request_id, ())
