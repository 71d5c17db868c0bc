"""Interface for copies of a rank's blocks to its rows of host memory and back; one class per device type.

    store, load --> running --> take_ended: each job once, whole or failed
                       `------> wait: until then

Called by the rank's own thread. A failure of one job is not raised: the job ends as failed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.connectors.extra_config import FIELD
from baton.core.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class CopyEnd:
    job: int
    nbytes: int = 0
    duration_s: float = 0.0
    error: str = ""  # Empty: all of it was copied.


class Copies(ABC):
    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """True: `wake` is called, from any thread, when a job ends between steps."""
        return False

    @abstractmethod
    def store(self, job: int, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Runs after everything that the device was told to compute so far."""

    @abstractmethod
    def load(self, job: int, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Runs concurrently with computation."""

    @abstractmethod
    def take_ended(self) -> list[CopyEnd]:
        """Jobs that have ended since the last call."""

    @abstractmethod
    def wait(self, jobs: Collection[int], timeout_s: float) -> bool:
        """Waits until none of the jobs is running. False: timed out."""

    def rows_as_caches(self) -> dict[str, torch.Tensor]:
        """The rows of each layer in the shape of its cache, for readers of other engines.

        Raises ConfigError if they cannot read them.
        """
        raise ConfigError("works in engines that compute on a CPU, so far", field=f"{FIELD}.lend")

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Ends running jobs and all threads."""
