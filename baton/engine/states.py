"""Recurrent states in the paged pool: where a step reads and writes them, and their tensors.

A request's state lies in the block of its last computed token. A step that stays in that block replaces the
state; a step that enters a later block reads the old block and writes the new one, so a state at the end of
a block stays as it was and can be found again by the prefix cache:

    block size 4      computed 0 -> 4      4 -> 6        6 -> 7        7 -> 9
    reads, writes     -, block 0           0, 1          1, 1          1, 2

(vLLM's mode "align", `v1/worker/mamba_utils.py`.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton.core.states import StatePart, place_parts
from baton.engine.forward_context import AttentionMetadata, IntArray


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """State blocks of one step and one group of layers, for requests 0 to R - 1."""

    query_start_loc_np: IntArray  # [R + 1]; request r has the tokens between r and r + 1.
    has_state_np: npt.NDArray[np.bool_]  # [R]; false: the request begins, from a state of zeros.
    read_blocks_np: IntArray  # [R]; block of the state before the step. Any block if there is no state.
    write_blocks_np: IntArray  # [R]; block of the state after the step; may be the same.


def state_metadata(metadata: AttentionMetadata) -> StateMetadata:
    """Where the step of `metadata`, which is that of the layers' group, reads and writes states."""
    seq_lens, size = metadata.seq_lens_np, metadata.block_size
    computed = seq_lens - np.diff(metadata.query_start_loc_np)
    rows = np.arange(metadata.num_reqs)
    return StateMetadata(
        query_start_loc_np=metadata.query_start_loc_np,
        has_state_np=computed > 0,
        read_blocks_np=metadata.block_table_np[rows, np.maximum(computed - 1, 0) // size],
        write_blocks_np=metadata.block_table_np[rows, (seq_lens - 1) // size],
    )


def state_views(
    cache: torch.Tensor, parts: Sequence[StatePart], *, tp_rank: int, tp_size: int
) -> tuple[torch.Tensor, ...]:
    """The parts of all blocks, each `[num_blocks, units of the rank, *unit_shape]`.

    `cache`: one layer's blocks, uint8 `[num_blocks, bytes]`.
    """
    return tuple(
        cache[:, placed.offset : placed.offset + placed.nbytes]
        .view(getattr(torch, placed.part.dtype))
        .view(len(cache), placed.num_units, *placed.part.unit_shape)
        for placed in place_parts(parts, tp_rank=tp_rank, tp_size=tp_size)
    )
