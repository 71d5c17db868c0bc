"""What an executor and a rank in a process of its own say to each other.

Imports no torch: a core whose ranks are other processes does without, which is 200 MB and two seconds.
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
    """The parent's first message to a rank."""

    config: EngineConfig
    connector_factory: str | None
    rank: int
    store_path: str  # A file in a private folder, where the ranks find each other.


@dataclass(frozen=True, slots=True)
class RankReady:
    handshake_metadata: KVConnectorHandshakeMetadata | None
    awaits_capture: bool = False


@dataclass(frozen=True, slots=True)
class RankCapture:
    """Record the decode graphs with the connector's layer hooks; the answer is a RankReady."""

    metadata: KVConnectorMetadata


@dataclass(frozen=True, slots=True)
class RankFailed:
    """At start or in a step; the rank ends after it. Text, since not every exception can be pickled."""

    message: str
    is_users: bool


@dataclass(frozen=True, slots=True)
class RankStep:
    scheduler_output: SchedulerOutput
    told_token_ids: list[list[int]]


class RankStop:
    """Shut down the worker half and end."""


def failure_of(error: Exception) -> RankFailed:
    return RankFailed(f"{type(error).__name__}: {error}", isinstance(error, UserError))


def packed_answer(answer: RankReady | ModelRunnerOutput | RankFailed) -> bytes:
    return packed_result(answer) if isinstance(answer, ModelRunnerOutput) else packed(answer)
