"""Messages between the two halves of the offload connector.

    OffloadMetadata  scheduler -> ranks, each step   stores to wait for, loads, stores after the forward pass
    OffloadReport    rank -> scheduler, each step    jobs that have ended, and failures

Every rank copies its part of the same blocks to the same rows of its own memory. The messages are pickled
between processes of one engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.connectors.storage.reports import JobReport
from baton.contract import AllRanks, FailedOf, KVConnectorMetadata


@dataclass(frozen=True, slots=True)
class StoreBlocks:
    """Copy each block to its row after the step has computed the blocks."""

    job: int
    block_ids: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """Copy each row to its block, then report the request as received. Without rows: report it as failed."""

    job: int
    request_id: str
    block_ids: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OffloadMetadata(KVConnectorMetadata):
    fence: tuple[int, ...] = ()  # Stores whose blocks may be overwritten from this step on.
    loads: tuple[LoadBlocks, ...] = ()
    stores: tuple[StoreBlocks, ...] = ()
    failed_loads: tuple[int, ...] = ()  # Loads under way, which end as failed.


@dataclass(kw_only=True)
class OffloadReport(JobReport):
    """Numbers of jobs that have ended or failed."""

    stored: AllRanks[set[int] | None] = None
    failed_stores: Annotated[set[int] | None, FailedOf("stored")] = None
    loaded: AllRanks[set[int] | None] = None
    failed_loads: Annotated[set[int] | None, FailedOf("loaded")] = None
