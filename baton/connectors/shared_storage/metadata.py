"""What the two halves of the shared storage tell each other. Pickled between processes of one engine.

StorageHandshake  rank -> scheduler, once     what a chunk looks like here
StorageMetadata   scheduler -> ranks, a step  load these; copy those; what was copied in step n may be written
StorageReport     rank -> scheduler, a step   copied; loads that failed
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.contract import AllRanks, AnyRank, KVConnectorHandshakeMetadata, KVConnectorMetadata, RankReport
from baton.contract.reports import NotCombined


@dataclass(frozen=True, slots=True)
class StorageHandshake(KVConnectorHandshakeMetadata):
    rank: int
    layout: str


@dataclass(frozen=True, slots=True)
class SaveChunk:
    """For one file: whole blocks, all of whose tokens are computed when the step is."""

    key: bytes
    block_ids: tuple[int, ...]  # Of each group of the kind in turn, equally many.
    kind: int = 0  # Which of the identity's `layer_kinds`.


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """The last blocks of one file; those before are in the prefix cache already, or nobody sees them."""

    key: bytes
    block_ids: tuple[int, ...]  # As above.
    kind: int = 0


@dataclass(frozen=True, slots=True)
class LoadChunks:
    """In the order of the prompt: behind one that fails, the others are of no use."""

    request_id: str
    parts: tuple[ChunkPart, ...]
    is_failed: bool = False  # Nothing is to be loaded; every rank reports that it could not be.


@dataclass(frozen=True, slots=True)
class StorageMetadata(KVConnectorMetadata):
    step: int = 0
    # Where files are written, and after a change of the secret, where they are read as well. Empty: the
    # ranks' layouts are not known yet.
    namespaces: tuple[str, ...] = ()
    loads: tuple[LoadChunks, ...] = ()
    saves: tuple[SaveChunk, ...] = ()
    write: tuple[int, ...] = ()  # Steps that are proved right: what was copied in them may be written.
    drop: tuple[int, ...] = ()  # Steps that computed on something bad.


@dataclass(kw_only=True)
class StorageReport(RankReport):
    layout: NotCombined[str | None] = None  # Until the orders show that it is known.
    copied: AllRanks[set[int] | None] = None  # Steps.
    failed_loads: AnyRank[set[str] | None] = None
