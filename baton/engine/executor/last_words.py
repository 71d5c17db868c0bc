"""Why an executor has ended, from what its ranks said last.

    rank 1 is killed --> rank 0 fails in the collective that it shares with rank 1
                     --> the end of rank 1 is noticed

Either may be heard first, so after the first the others are listened to for a moment. A rank that is gone
without a word is the cause, and what the rest say is what came of it.
"""

from __future__ import annotations

from baton.core.errors import BatonError, ConfigError
from baton.engine.executor import ExecutorDied
from baton.engine.executor.rank_messages import RankFailed

LISTEN_S = 2.0  # For the others' last words. Ends come within milliseconds, on a busy machine a second.


class LastWords:
    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._failed: dict[int, RankFailed] = {}
        self._gone: dict[int, str] = {}

    def __bool__(self) -> bool:
        return bool(self._failed or self._gone)

    def take_failure(self, rank: int, failure: RankFailed) -> None:
        self._failed.setdefault(rank, failure)

    def take_end(self, rank: int, how: str) -> None:
        """`how`: a sentence's end. Whoever has said why it fails is expected to end."""
        if rank not in self._failed:
            self._gone.setdefault(rank, how)

    def has_ended(self, rank: int) -> bool:
        return rank in self._failed or rank in self._gone

    @property
    def say_why(self) -> bool:
        """Nobody else could say it better."""
        users = any(failure.is_users for failure in self._failed.values())
        return users or bool(self._gone) or len(self._failed) == self._num_ranks

    def error(self) -> BatonError:
        """ConfigError if the failure is the user's to mend; else ExecutorDied, which names all that ended."""
        for failure in self._failed.values():
            if failure.is_users:
                return ConfigError(failure.message)
        gone = [f"rank {rank} is gone: {how}" for rank, how in self._gone.items()]
        failed = [f"rank {rank} failed: {failure.message}" for rank, failure in self._failed.items()]
        return ExecutorDied("; ".join([*gone, *failed]))
