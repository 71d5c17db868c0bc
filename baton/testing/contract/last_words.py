"""What ranks in processes of their own find when they end, and no report can carry: a file of each."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.testing.contract.envelopes import RankNotes


def write_last_words(folder: str, notes: RankNotes) -> None:
    Path(folder, str(notes.rank)).write_bytes(pickle.dumps(notes))


def read_last_words(folder: str, num_ranks: int) -> list[RankNotes | None]:
    """By rank, when their processes have ended; None of one that did not come so far."""
    files = [Path(folder, str(rank)) for rank in range(num_ranks)]
    return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
