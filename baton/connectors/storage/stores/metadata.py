"""Messages between the two halves of the shared storage, pickled between processes of one engine.

StorageHandshake  rank -> scheduler, once      layout of a chunk
StorageMetadata   scheduler -> ranks, per step loads; copies; steps whose copies may be written or are
                                               dropped; chunks to read ahead
StorageReport     rank -> scheduler, per step  steps copied; loads that failed; measurements;
                                               for KV events: writes, lost chunks
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from baton.connectors.storage.reports import JobReport
from baton.connectors.storage.stores.speeds import Read
from baton.contract import AllRanks, AnyRank, KVConnectorHandshakeMetadata, KVConnectorMetadata
from baton.contract.reports import FailedOf, NotCombined


@dataclass(frozen=True, slots=True)
class StorageHandshake(KVConnectorHandshakeMetadata):
    rank: int
    layout: str


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """One file, or a section of it, and the blocks that belong there.

    To save: all blocks that the file holds; the step computes all of their tokens. To load: the last of them.
    Earlier ones are in the prefix cache already, or outside every window.
    """

    key: bytes
    block_ids: tuple[int, ...]  # Blocks of each group of the kind in turn, equally many.
    kind: int = 0  # Index in the identity's `layer_kinds`.
    tail: int = 0  # Blocks of the tail that this is; 0: it is a chunk.
    section: int | None = None  # Only this one of the file.


SaveId: TypeAlias = tuple[int, bytes, int]
"""Step, key and kind of a part to save."""


@dataclass(frozen=True, slots=True)
class LoadChunks:
    """Parts in the order of the prompt. After one that fails, the others are of no use."""

    request_id: str
    parts: tuple[ChunkPart, ...]
    is_failed: bool = False  # Nothing is loaded; every rank reports a failure.
    # The request need not wait for the rest of the load when that is expected within so many seconds and the
    # first layers are there. None: it waits for the whole load.
    arrives_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReadChunks:
    """Parts, without blocks, to read into host memory before they are loaded."""

    owner: str  # A request or a hint.
    parts: tuple[ChunkPart, ...]


@dataclass(frozen=True, slots=True)
class StorageMetadata(KVConnectorMetadata):
    step: int = 0
    # The first one is written to; after a change of the secret the others are read as well. Empty: the
    # ranks' layouts are not known yet.
    namespaces: tuple[str, ...] = ()
    loads: tuple[LoadChunks, ...] = ()
    saves: tuple[ChunkPart, ...] = ()
    write: tuple[int, ...] = ()  # Steps proved valid: their copies may be written.
    drop: tuple[int, ...] = ()  # Steps that computed with bad blocks.
    read_ahead: tuple[ReadChunks, ...] = ()
    cancel: tuple[str, ...] = ()  # Requests whose loads, if any are under way, end as failed.
    forget: tuple[str, ...] = ()  # Owners whose chunks are no longer needed in host memory.
    # Requests whose load may go on while this step reads their blocks: it waits for each layer.
    usable: tuple[str, ...] = ()
    longest: int = 0  # Most tokens of one request in this step. 1: it may be a recorded step, without hooks.
    is_timed: bool = False  # The ranks are to report this step in `timed`.


@dataclass(kw_only=True)
class StorageReport(JobReport):
    layout: NotCombined[str | None] = None  # Reported until the scheduler half knows it.
    copied: AllRanks[set[int] | None] = None  # Steps.
    failed_loads: AnyRank[set[str] | None] = None
    # Loads by layers whose requests need not wait any more. Each once, at its end at the latest.
    arriving: AllRanks[set[str] | None] = None
    timed: AllRanks[set[int] | None] = None  # Steps.
    reads: NotCombined[tuple[Read, ...] | None] = None  # Measured, of the threads of this rank.
    # Only in an engine that publishes KV events.
    written: AllRanks[set[SaveId] | None] = None  # Each save once, whether or not it was written.
    unwritten: Annotated[set[SaveId] | None, FailedOf("written")] = None
    lost: AnyRank[set[tuple[bytes, int]] | None] = None  # Keys and kinds that could not be loaded.
