"""Answers to lookups: which chunks a request can load. The same answer holds as long as a request needs it.

    ask    unknown --> taken with the next batch; None until the answer

A chunk whose load failed is missing for its requests from then on, so that vLLM does not load it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Asked:
    requests: set[str] = field(default_factory=set)
    can_load: bool | None = None


class Lookups:
    def __init__(self) -> None:
        self._asked: dict[bytes, _Asked] = {}
        self._by_request: dict[str, set[bytes]] = {}
        self._batch: dict[bytes, None] = {}

    def ask(self, key: bytes, request_id: str) -> bool | None:
        """Whether the chunk can be loaded; None: not known yet."""
        if (asked := self._asked.get(key)) is None:
            asked = self._asked[key] = _Asked()
            self._batch[key] = None
        asked.requests.add(request_id)
        self._by_request.setdefault(request_id, set()).add(key)
        return asked.can_load

    def take_batch(self) -> list[bytes]:
        """The chunks to look up: asked since the last call, by requests that have not ended."""
        batch, self._batch = self._batch, {}
        return [key for key in batch if key in self._asked]

    def answer(self, key: bytes, can_load: bool) -> None:
        if (asked := self._asked.get(key)) is not None:
            asked.can_load = can_load

    def forget(self, request_id: str) -> None:
        for key in self._by_request.pop(request_id, ()):
            asked = self._asked[key]
            asked.requests.discard(request_id)
            if not asked.requests:
                del self._asked[key]
