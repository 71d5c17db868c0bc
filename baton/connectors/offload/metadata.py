"""What the two halves of the offload connector tell each other.

    OffloadMetadata  scheduler -> ranks, a step   wait for these, load those, store these after the forward
    OffloadReport    rank -> scheduler, a step    which of them have ended, and how

Every rank copies its part of the same blocks into the same rows of its own memory. All of it is pickled
between processes of one engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.contract import AllRanks, FailedOf, KVConnectorMetadata, RankReport


@dataclass(frozen=True, slots=True)
class StoreBlocks:
    """When the step has computed them: copy each block to its row."""

    job: int
    block_ids: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """Copy each row to its block, then report the request as received. Without rows: it has failed."""

    job: int
    request_id: str
    block_ids: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OffloadMetadata(KVConnectorMetadata):
    fence: tuple[int, ...] = ()  # Stores to wait for: their blocks may be overwritten from this step on.
    loads: tuple[LoadBlocks, ...] = ()
    stores: tuple[StoreBlocks, ...] = ()


@dataclass(kw_only=True)
class OffloadReport(RankReport):
    """Jobs, by number."""

    stored: AllRanks[set[int] | None] = None
    failed_stores: Annotated[set[int] | None, FailedOf("stored")] = None
    loaded: AllRanks[set[int] | None] = None
    failed_loads: Annotated[set[int] | None, FailedOf("loaded")] = None
