"""Lookups on a thread: which chunks a request can load. The scheduler's thread asks and never waits.

    ask        unknown --> asked in the next batch; None until the answer, then the same answer for as long as
               a request needs it
    deadline   no answer within `timeout_s`: the chunk is missing. While the thread hangs, all chunks are

A chunk whose load failed is missing for its requests from then on, so that vLLM does not load it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.connectors.jobs import Jobs

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Asked:
    key: bytes
    since_s: float
    requests: set[str] = field(default_factory=set)
    answer: bool | None = None  # Written by the lookup's thread only,
    is_missing: bool = False  # and this by the scheduler's only.


class Lookups:
    """`find` may block; it returns for each key whether it can be loaded, and may raise OSError."""

    def __init__(
        self, find: Callable[[Sequence[bytes]], list[bool]], timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self._find = find
        self._timeout_s = timeout_s
        self._clock = clock
        self._asked: dict[bytes, _Asked] = {}
        self._by_request: dict[str, list[_Asked]] = {}
        self._batch: list[_Asked] = []
        self._finding_since_s: float | None = None
        self._thread = Jobs("kv-lookup")

    def ask(self, key: bytes, request_id: str) -> bool | None:
        """Whether the chunk can be loaded; None: not known yet."""
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = _Asked(key, self._clock(), is_missing=self._is_stuck)
            if not asked.is_missing:
                self._batch.append(asked)
        if request_id not in asked.requests:
            asked.requests.add(request_id)
            self._by_request.setdefault(request_id, []).append(asked)
        if asked.answer is None and self._clock() - asked.since_s >= self._timeout_s:
            asked.is_missing = True
        return False if asked.is_missing else asked.answer

    def flush(self) -> None:
        """Looks up what was asked since the last call."""
        batch, self._batch = [asked for asked in self._batch if asked.requests], []
        if batch:
            self._thread.put(partial(self._answer, batch))

    def mark_missing(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if (asked := self._asked.get(key)) is not None:
                asked.is_missing = True

    def forget(self, request_id: str) -> None:
        for asked in self._by_request.pop(request_id, ()):
            asked.requests.discard(request_id)
            if not asked.requests:
                del self._asked[asked.key]

    def close(self, timeout_s: float) -> None:
        self._thread.close(timeout_s)

    @property
    def _is_stuck(self) -> bool:
        since_s = self._finding_since_s
        return self._thread.is_dead or (since_s is not None and self._clock() - since_s >= self._timeout_s)

    def _answer(self, batch: list[_Asked]) -> None:
        """Runs on the thread."""
        self._finding_since_s = self._clock()
        try:
            found = self._find([asked.key for asked in batch])
        except OSError as error:
            logger.warning("could not look up %d chunks: %s", len(batch), error)
            found = [False] * len(batch)
        finally:
            self._finding_since_s = None
        for asked, is_found in zip(batch, found, strict=True):
            asked.answer = is_found
