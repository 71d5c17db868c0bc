"""How a rank copies blocks to its rows and back. What is behind it depends on the device.

    store, load --> under way --> take_ended: each job once, whole or failed
                         `------> wait: until then

Called by the rank's own thread. Nothing here raises about one job: it ends as failed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CopyEnd:
    job: int
    nbytes: int = 0
    duration_s: float = 0.0
    error: str = ""  # Empty: all of it was copied.


class Copies(ABC):
    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """True: `wake` is called, from any thread, when a job has ended between steps."""
        return False

    @abstractmethod
    def store(self, job: int, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Behind all that the device was told to compute so far."""

    @abstractmethod
    def load(self, job: int, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Beside whatever is computed."""

    @abstractmethod
    def take_ended(self) -> list[CopyEnd]:
        """Since the last call."""

    @abstractmethod
    def wait(self, jobs: Collection[int], timeout_s: float) -> bool:
        """Until none of them is under way; False if the time was too short."""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """End what is under way, and all threads."""
