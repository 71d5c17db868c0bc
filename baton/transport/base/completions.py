"""Queue of completed operations: each opened operation is finished exactly once, from any thread."""

import itertools
import logging
import threading
import time
from collections.abc import Callable

from baton.core.ids import Address
from baton.core.layout import Region
from baton.transport.base.interface import Completion, OpId, Transport

logger = logging.getLogger(__name__)


class CompletionQueue:
    """Thread-safe. `on_completion` is called after each end, outside the lock, on the ending thread."""

    def __init__(self, on_completion: Callable[[], None] | None = None) -> None:
        self._on_completion = on_completion
        self._numbers = itertools.count(1)
        self._posted_at: dict[OpId, float] = {}
        self._ended: list[Completion] = []
        self._changed = threading.Condition()

    def open(self) -> OpId:
        with self._changed:
            op = OpId(next(self._numbers))
            self._posted_at[op] = time.monotonic()
            return op

    def withdraw(self, op: OpId) -> None:
        """Forgets an operation whose posting failed: its caller gets an exception, not a completion."""
        with self._changed:
            del self._posted_at[op]

    def finish(self, op: OpId, *, nbytes: int, error: str | None = None, way: str = "") -> None:
        with self._changed:
            assert op in self._posted_at, f"operation {op} ended twice"
            duration_s = time.monotonic() - self._posted_at.pop(op)
            self._ended.append(Completion(op, error is None, nbytes, duration_s, error, way))
            self._changed.notify_all()
        if self._on_completion is not None:
            try:
                self._on_completion()
            except Exception:  # Foreign code; it must not end the thread that serves a peer.
                logger.exception("the hook on_completion failed")

    def poll(self) -> list[Completion]:
        if not self._ended:  # An idle engine step takes no lock.
            return []
        with self._changed:
            ended, self._ended = self._ended, []
            return ended

    def wait(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._ended), timeout_s)


class QueuedTransport(Transport):
    """Transport whose operations end in a `CompletionQueue`."""

    def __init__(self, address: Address, on_completion: Callable[[], None] | None) -> None:
        self.completions = CompletionQueue(on_completion)
        self._address = address
        self._regions: tuple[Region, ...] = ()

    def poll(self) -> list[Completion]:
        return self.completions.poll()

    def wait_completion(self, timeout_s: float) -> bool:
        return self.completions.wait(timeout_s)
