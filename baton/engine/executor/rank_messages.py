"""Messages between an executor and ranks in other processes, their pickling, and failures of ranks.

Connector data that cannot be pickled is dropped, which counts as if its half had raised. The rest is sent:

    the scheduler half's metadata   the ranks get none of the step's loads, and the scheduler fails them
    a worker half's report          ended requests and bad blocks are kept; stats, events and metadata are
                                    lost

Imports no torch: a core without ranks in its process saves 200 MB and two seconds.
"""

import logging
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.contract import KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorOutput
from baton.core.config import EngineConfig
from baton.core.errors import BatonError, ConfigError, UserError
from baton.engine.executor import ExecutorDied, RankWeights
from baton.engine.step import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)


def packed(message: Any) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def packed_step(step: Any, scheduler_output: SchedulerOutput) -> tuple[bytes, str | None]:
    """Pickle `step`, which contains this output.

    Also returns why the connector's metadata was dropped, or None.
    """

    def leave_out() -> bool:
        has_any = scheduler_output.kv_connector_metadata is not None
        scheduler_output.kv_connector_metadata = None
        return has_any

    return _packed_without(step, "build_connector_meta", leave_out)


def packed_result(result: ModelRunnerOutput) -> bytes:
    def leave_out() -> bool:
        report = result.kv_connector_output
        if report is None:
            return False
        result.kv_connector_output = KVConnectorOutput(
            finished_sending=report.finished_sending,
            finished_recving=report.finished_recving,
            failed_recving=report.failed_recving,
            invalid_block_ids=report.invalid_block_ids,
            expected_finished_count=report.expected_finished_count,
        )
        result.connector_error = result.connector_error or "its report cannot be pickled"
        return True

    return _packed_without(result, "report after a step", leave_out)[0]


def _packed_without(message: Any, what: str, leave_out: Callable[[], bool]) -> tuple[bytes, str | None]:
    try:
        return packed(message), None
    except Exception as error:  # Pickling calls the connector's code, which may raise anything.
        if not leave_out():
            raise
        logger.exception("the connector's %s cannot be pickled and is dropped", what)
        return packed(message), f"{what}: {type(error).__name__}: {error}"


LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def rank_environment(config: EngineConfig) -> dict[str, str]:
    """Environment of a rank's process. The ranks' own sockets stay on this host."""
    return {
        "OMP_NUM_THREADS": str(config.device_config.num_threads),
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
    }


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """The executor's first message to a rank."""

    config: EngineConfig
    connector_factory: str | None
    rank: int
    store_path: str  # File in a private folder, by which the ranks connect to each other.


@dataclass(frozen=True, slots=True)
class RankReady:
    """The rank is ready for steps."""

    handshake_metadata: KVConnectorHandshakeMetadata | None
    awaits_capture: bool = False


@dataclass(frozen=True, slots=True)
class RankCapture:
    """Record the decode graphs with the connector's layer hooks; the answer is a RankReady."""

    metadata: KVConnectorMetadata


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A failure at start or in a step; the rank then ends.

    Text, because not every exception can be pickled.
    """

    message: str
    is_users: bool


@dataclass(frozen=True, slots=True)
class RankStep:
    """Run a step. `told_token_ids`: tokens of earlier steps, for ranks that do not sample."""

    scheduler_output: SchedulerOutput
    told_token_ids: list[list[int]]


class RankStop:
    """Shut down the worker half and end."""


def failure_of(error: Exception) -> RankFailed:
    return RankFailed(f"{type(error).__name__}: {error}", isinstance(error, UserError))


def packed_answer(answer: RankReady | RankWeights | ModelRunnerOutput | RankFailed) -> bytes:
    return packed_result(answer) if isinstance(answer, ModelRunnerOutput) else packed(answer)


REPORT_WAIT_S = 2.0  # Wait for further reports, which take milliseconds, or up to a second on a busy machine.


class RankFailures:
    """Failures and ends of an executor's ranks, which determine why the executor has ended.

        rank 1 is killed --> rank 0 fails in the collective that it shares with rank 1
                         --> the end of rank 1 is noticed

    Either may arrive first, so after the first report the executor waits shortly for others. A rank that
    ended without a failure message is the cause; the failures of other ranks are its consequences.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._failed: dict[int, RankFailed] = {}
        self._gone: dict[int, str] = {}

    def __bool__(self) -> bool:
        return bool(self._failed or self._gone)

    def take_failure(self, rank: int, failure: RankFailed) -> None:
        self._failed.setdefault(rank, failure)

    def take_end(self, rank: int, how: str) -> None:
        """Note the end of a rank, unless it has reported a failure before. `how`: the end of a sentence."""
        if rank not in self._failed:
            self._gone.setdefault(rank, how)

    def has_ended(self, rank: int) -> bool:
        return rank in self._failed or rank in self._gone

    @property
    def is_explained(self) -> bool:
        """Whether further reports would not change the cause."""
        users = any(failure.is_users for failure in self._failed.values())
        return users or bool(self._gone) or len(self._failed) == self._num_ranks

    def error(self) -> BatonError:
        """ConfigError for a failure that the user has to fix; else ExecutorDied with all failed ranks."""
        for failure in self._failed.values():
            if failure.is_users:
                return ConfigError(failure.message)
        gone = [f"rank {rank} is gone: {how}" for rank, how in self._gone.items()]
        failed = [f"rank {rank} failed: {failure.message}" for rank, failure in self._failed.items()]
        return ExecutorDied("; ".join([*gone, *failed]))
