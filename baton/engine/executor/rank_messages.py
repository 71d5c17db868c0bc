"""Messages between an executor and ranks in other processes.

Imports no torch: a core without ranks in its process saves 200 MB and two seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.core.errors import UserError
from baton.engine.executor.packing import packed, packed_result
from baton.engine.step import ModelRunnerOutput

if TYPE_CHECKING:
    from baton.contract import KVConnectorHandshakeMetadata, KVConnectorMetadata
    from baton.core.config import EngineConfig
    from baton.engine.step import SchedulerOutput


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


def packed_answer(answer: RankReady | ModelRunnerOutput | RankFailed) -> bytes:
    return packed_result(answer) if isinstance(answer, ModelRunnerOutput) else packed(answer)
