"""Attention of decoding requests by compiled code (`decode.c`), which reads the blocks where they lie.

The library is optional: it is built when Baton is installed on a machine with a C compiler, or by
`scripts/build-library decode`. Without it, and for what it does not compute, `sdpa` gathers the blocks.
"""

import ctypes
import functools
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from baton.core.instructions import most_level
from baton.engine.attention.backend import AttentionShape
from baton.engine.forward_context import AttentionMetadata, IntArray

logger = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("_decode.so")
HINT = "run scripts/build-library decode, or install Baton on a machine with a C compiler"
LEVELS = ("baseline", "AVX2", "AVX-512")  # Sets of instructions, as `numbers.h` numbers them.
MOST_LEVEL = most_level(LEVELS)
_FUNCTIONS = (
    "baton_decode_1",
    "baton_rms_norm_2",
    "baton_rotate_1",
    "baton_place_heads_1",
    "baton_gate_1",
    "baton_layers_1",
)
_LANES, _ROWS_MAX = 16, 4  # Constants of `decode.c`.
_POINTERS = ("out", "queries", "cache", "sinks", "tables", "requests", "tokens", "firsts", "ends", "scratch")
_NUMBERS = ("num_requests", "table_stride", "block_tokens", "block_stride", "head_stride", "token_stride")
_SIZES = ("num_heads", "group_size", "head_dim", "scores_stride", "is_bfloat16", "level")


class _Step(ctypes.Structure):
    """`struct step` of `decode.c`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in (*_NUMBERS, *_SIZES)),
        ("scale", ctypes.c_double),
    )


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Requests with one query each. The arrays belong to `step`, which has their addresses."""

    step: _Step
    arrays: tuple[npt.NDArray[np.generic], ...]


def load_library() -> ctypes.CDLL | None:
    """None if the library was not built, or for another version of Baton."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        for function in _FUNCTIONS:
            getattr(library, function)
    except (OSError, AttributeError):
        return None
    return library


class CompiledDecode:
    """The compiled attention of one model's shape. Computes with one thread."""

    def __init__(self, shape: AttentionShape, library: ctypes.CDLL, *, level: int = MOST_LEVEL) -> None:
        """`level`: index of LEVELS; the CPU may have less."""
        self._shape, self._level = shape, level
        self._run = library.baton_decode_1
        self._run.restype = None
        self._run.argtypes = (ctypes.POINTER(_Step),)

    def plan(
        self, metadata: AttentionMetadata, decoding: IntArray, window: int | None, cache_NHPC: torch.Tensor
    ) -> DecodePlan:
        """`decoding`: indices of requests with one query."""
        shape, ends = self._shape, metadata.seq_lens_np[decoding].astype(np.int64)
        firsts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
        stride = -(-int((ends - firsts).max()) // _LANES) * _LANES
        tables = np.ascontiguousarray(metadata.block_table_np, dtype=np.int64)
        tokens = metadata.query_start_loc_np[decoding].astype(np.int64)
        requests = np.ascontiguousarray(decoding, dtype=np.int64)
        scratch = np.empty(_ROWS_MAX * (shape.head_dim + stride), dtype=np.float32)
        block, head, token, _ = cache_NHPC.stride()
        return DecodePlan(
            _Step(
                tables=tables.ctypes.data,
                requests=requests.ctypes.data,
                tokens=tokens.ctypes.data,
                firsts=firsts.ctypes.data,
                ends=ends.ctypes.data,
                scratch=scratch.ctypes.data,
                num_requests=len(decoding),
                table_stride=tables.shape[1],
                block_tokens=metadata.block_size,
                block_stride=block,
                head_stride=head,
                token_stride=token,
                num_heads=shape.num_kv_heads,
                group_size=shape.group_size,
                head_dim=shape.head_dim,
                scores_stride=stride,
                is_bfloat16=shape.dtype == torch.bfloat16,
                level=self._level,
                scale=shape.scale,
            ),
            (tables, requests, tokens, firsts, ends, scratch),
        )

    def attend(
        self,
        q_TQD: torch.Tensor,
        cache_NHPC: torch.Tensor,
        plan: DecodePlan,
        out_TQV: torch.Tensor,
        sinks_Q: torch.Tensor | None,
    ) -> None:
        """Write the results of the plan's requests to `out_TQV`. All tensors but the cache are contiguous."""
        assert q_TQD.is_contiguous()
        sinks = None if sinks_Q is None else sinks_Q.float().contiguous()
        step = plan.step
        step.out, step.queries, step.cache = out_TQV.data_ptr(), q_TQD.data_ptr(), cache_NHPC.data_ptr()
        step.sinks = None if sinks is None else sinks.data_ptr()
        self._run(step)


def compiled_decode(shape: AttentionShape) -> CompiledDecode | None:
    """None without the library, or for a shape that it does not compute."""
    suits = (
        shape.device.type == "cpu"
        and shape.dtype in (torch.float32, torch.bfloat16)
        and shape.latent_dim is None
        and not shape.is_quantised
        and shape.head_dim % _LANES == 0
    )
    if not suits:
        return None
    if (library := load_library()) is None:
        _log_missing()
        return None
    return CompiledDecode(shape, library)


@functools.cache
def _log_missing() -> None:
    logger.info("the attention library is not built or of another version, so decoding is slower: %s", HINT)
