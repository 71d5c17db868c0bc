"""Recurrent state of a layer (Mamba 2, gated delta rule), as data that plans and connectors can use.

A state belongs to one prefix, to its hash and exactly its length. It has no tokens: the engine replaces it as
it computes. A layer's state is a few *parts*, each a tensor of *units* that tensor parallelism divides as it
divides KV heads:

    conv_x  | head 0 | head 1 | ...      the last inputs of the convolution, [head_dim, kernel - 1] each
    conv_b  | group 0 | ...              [state_size, kernel - 1]
    conv_c  | group 0 | ...
    ssm     | head 0 | head 1 | ...      [head_dim, state_size]

The parts of one rank follow each other in a block, each from a multiple of `ALIGNMENT` bytes on. Source: the
slices of `ssm_conv_transfer_utils.py` and `MambaSpec` of `vllm/v1/kv_cache_interface.py`.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from baton.core.layout import FORMATS, kv_heads_of

ALIGNMENT = 16


class StatePart(msgspec.Struct, frozen=True):
    """One tensor of a layer's state."""

    name: str
    num_units: int  # Units of the whole model. `kv_heads_of` defines which of them a rank holds.
    unit_shape: tuple[int, ...]
    dtype: str  # A name in FORMATS.

    @property
    def unit_bytes(self) -> int:
        return math.prod(self.unit_shape) * FORMATS[self.dtype].itemsize


class PlacedPart(NamedTuple):
    """A part in a block of one rank: `num_units` units from byte `offset` on."""

    part: StatePart
    offset: int
    num_units: int

    @property
    def nbytes(self) -> int:
        return self.num_units * self.part.unit_bytes


def place_parts(
    parts: Sequence[StatePart], *, tp_rank: int, tp_size: int, alignment: int = ALIGNMENT
) -> Iterator[PlacedPart]:
    """The parts as rank `tp_rank` holds them, in order."""
    offset = 0
    for part in parts:
        units = kv_heads_of(tp_rank, tp_size=tp_size, num_kv_heads=part.num_units)
        placed = PlacedPart(part, offset, len(units))
        yield placed
        offset += -(-placed.nbytes // alignment) * alignment


def state_bytes(parts: Sequence[StatePart], *, tp_rank: int, tp_size: int) -> int:
    """Bytes of one layer's state on one rank, a multiple of ALIGNMENT; 0 without parts."""
    placed = [*place_parts(parts, tp_rank=tp_rank, tp_size=tp_size)]
    return -(-(placed[-1].offset + placed[-1].nbytes) // ALIGNMENT) * ALIGNMENT if placed else 0
