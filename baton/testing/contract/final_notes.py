"""Final notes of ranks in processes of their own: one file per rank, for what no report can carry."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.testing.contract.envelopes import RankNotes


def write_final_notes(folder: str, notes: RankNotes) -> None:
    Path(folder, str(notes.rank)).write_bytes(pickle.dumps(notes))


def read_final_notes(folder: str, num_ranks: int) -> list[RankNotes | None]:
    """Read the final notes by rank after the processes have ended; None for a rank that wrote none."""
    files = [Path(folder, str(rank)) for rank in range(num_ranks)]
    return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
