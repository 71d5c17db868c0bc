"""Tasks of one owner: a failure is reported, and none outlives its owner."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

logger = logging.getLogger(__name__)


class Tasks:
    """Used in one event loop; `close` cancels what is left."""

    def __init__(self, on_fault: Callable[[str], None] = lambda why: None) -> None:
        """`on_fault`: a task has ended with a defect; the text says which, and why."""
        self._on_fault = on_fault
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, None], fault: str) -> asyncio.Task[None]:
        """`fault`: what a defect of this task means, for the log and `on_fault`."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(partial(self._hear_end, fault))
        return task

    def _hear_end(self, fault: str, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("%s", fault, exc_info=error)
            self._on_fault(f"{fault}: {error!r}")

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()

    async def close(self) -> None:
        self.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
