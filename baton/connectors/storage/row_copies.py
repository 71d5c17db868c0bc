"""Copies of rows of memory on a CPU: by the copy library, or without it run by run.

Both have the arguments of `baton.stores.host.rows.copy_rows`. The library takes half the time for scattered
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from baton.stores.host.rows import Bytes, CopyRows, check_ids, copy_rows
from baton.transport.base.gather import Gather, copy_library
from baton.transport.base.spans import Copies, Int64s


def row_copier() -> CopyRows:
    library = copy_library()
    return copy_rows if library is None else partial(_copy_by, library)


def _copy_by(
    library: Gather,
    sources: Sequence[Bytes],
    from_ids: Sequence[int],
    targets: Sequence[Bytes],
    to_ids: Sequence[int],
) -> None:
    check_ids(from_ids, len(sources[0]))
    check_ids(to_ids, len(targets[0]))
    assert len(from_ids) == len(to_ids)
    assert [rows.shape[1] for rows in sources] == [rows.shape[1] for rows in targets]
    nbytes = np.repeat(np.array([rows.shape[1] for rows in targets], np.int64), len(to_ids))
    library(Copies(_addresses(targets, to_ids), _addresses(sources, from_ids), nbytes))


def _addresses(layers: Sequence[Bytes], ids: Sequence[int]) -> Int64s:
    """Addresses of these rows of all layers, layer by layer."""
    starts = np.array([rows.ctypes.data for rows in layers], np.int64)
    strides = np.array([rows.strides[0] for rows in layers], np.int64)
    return (starts[:, None] + strides[:, None] * np.asarray(ids, np.int64)).ravel()
