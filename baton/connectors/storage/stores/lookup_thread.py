"""Lookups in stores, on a thread.

    begin --> found         nothing, if the stores cannot be asked
        `---> overdue       its owner goes on without, and no further one begins until the thread has answered

A result is one value that the thread sets, so its readers need no lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from baton.connectors.jobs import Jobs
from baton.stores.chunks.transfers import TransferSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class Lookup(Generic[T]):
    deadline_s: float
    nothing: T
    is_cancelled: bool = False  # Nothing waits for it any more: nothing need be looked up.
    found: T | None = None  # None: not known yet.

    def result(self, now: float) -> T | None:
        """None: not known yet. An overdue lookup has found nothing."""
        return self.nothing if self.found is None and self.deadline_s <= now else self.found


class LookupThread(Generic[T]):
    def __init__(
        self, nothing: T, settings: TransferSettings, on_end: Callable[[], None] = lambda: None
    ) -> None:
        """`nothing`: what a lookup finds if it fails. `on_end`: called on the thread after each lookup."""
        self._nothing = nothing
        self._settings = settings
        self._on_end = on_end
        self._jobs = Jobs("kv-lookup")
        self._last: Lookup[T] | None = None

    def begin(self, find: Callable[[], T], now: float) -> Lookup[T]:
        """While the thread hangs it finds nothing."""
        if self.is_overdue(now):
            return Lookup(now, self._nothing)
        lookup = self._last = Lookup(now + self._settings.lookup_timeout_s, self._nothing)
        self._jobs.put(partial(self._run, lookup, find))
        return lookup

    def is_overdue(self, now: float) -> bool:
        last = self._last
        return last is not None and last.found is None and last.deadline_s <= now

    def close(self) -> None:
        self._jobs.close(self._settings.shutdown_timeout_s)

    def _run(self, lookup: Lookup[T], find: Callable[[], T]) -> None:
        found = self._nothing
        try:
            found = self._nothing if lookup.is_cancelled else find()
        except OSError as error:
            logger.warning("a lookup failed: %s", error)
        except Exception:  # Only this one finds nothing; the thread serves others.
            logger.exception("a lookup failed")
        lookup.found = found
        self._on_end()
