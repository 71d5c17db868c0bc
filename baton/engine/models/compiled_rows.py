"""Operations on rows of numbers by compiled code (`rows.c`), in the library of `attention.compiled`.

Each is one call in the place of four to fifteen small operations of torch, whose dispatch takes longer than
their numbers in a decode step. None, if there is no such code for the arguments: torch computes then.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from baton.engine.attention.compiled import MOST_LEVEL, load_library

_LANES = 16  # The constant of `numbers.h`.
_LEVEL = MOST_LEVEL
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_DTYPES = (torch.float32, torch.bfloat16)


class _Heads(ctypes.Structure):
    """`struct heads` of `rows.c`."""

    _fields_ = (
        *((name, _POINTER) for name in ("queries", "cache", "packed", "weight", "cosines", "sines", "slots")),
        *((name, _SIZE) for name in ("rows", "num_heads", "num_kv_heads", "size", "rotated", "row_stride")),
        *((name, _SIZE) for name in ("is_bfloat16", "has_wide_weight", "level")),
        ("eps", ctypes.c_double),
    )


class _Functions(NamedTuple):
    rms_norm: Callable[..., None]
    rotate: Callable[..., None]
    place_heads: Callable[..., None]
    gate: Callable[..., None]


@functools.cache
def _functions() -> _Functions | None:
    """None without the library, or with that of another version of Baton."""
    if (library := load_library()) is None:
        return None
    norm, rotate = library.baton_rms_norm_2, library.baton_rotate_1
    place_heads, gate = library.baton_place_heads_1, library.baton_gate_1
    norm.restype = rotate.restype = place_heads.restype = gate.restype = None
    norm.argtypes = (*[_POINTER] * 4, *[_SIZE] * 6, ctypes.c_float, *[ctypes.c_int] * 3)
    rotate.argtypes = (*[_POINTER] * 4, *[_SIZE] * 5, *[ctypes.c_int] * 2)
    place_heads.argtypes = (ctypes.POINTER(_Heads),)
    gate.argtypes = (*[_POINTER] * 2, *[_SIZE] * 3, *[ctypes.c_int] * 2)
    return _Functions(norm, rotate, place_heads, gate)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, added: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Compiled `layers.rms_norm`. `added` is added to `x` first, in place."""
    size, dtype = x.shape[-1], x.dtype
    if (functions := _usable(x, size % _LANES)) is None:
        return None
    is_wide = weight.dtype != dtype
    if not weight.is_contiguous() or (is_wide and weight.dtype != torch.float32):
        return None
    if x.dim() not in (2, 3) or weight.shape not in ((size,), x.shape[1:]):
        return None
    if added is not None and not (
        added.shape == x.shape and added.dtype == dtype and added.is_contiguous() and x.is_contiguous()
    ):
        return None
    heads, weight_stride = x.shape[1] if x.dim() == 3 else 1, size if weight.dim() == 2 else 0
    out = torch.empty(x.shape, dtype=dtype)
    functions.rms_norm(
        out.data_ptr(),
        x.data_ptr(),
        None if added is None else added.data_ptr(),
        weight.data_ptr(),
        len(x),
        heads,
        size,
        x.stride(0),
        x.stride(1),
        weight_stride,
        eps,
        dtype == torch.bfloat16,
        is_wide,
        _LEVEL,
    )
    return out


def place_heads(
    packed_TAD: torch.Tensor,
    norm: tuple[torch.Tensor, float] | None,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    cache_NHPC: torch.Tensor,
    rows: torch.Tensor,
    num_heads: int,
) -> torch.Tensor | None:
    """Norm and rotate queries and keys; write keys and values to the cache. Returns the queries `[T, Q, D]`.

    `packed_TAD`: heads of queries, keys and values; there may be more. `norm`: weight `[Q + H, D]` and
    epsilon. `rotation`: cos and sin as `rotary.rotate` takes them. `rows`: `backend.write_rows` of the cache.
    """
    num_tokens, num_packed, size = packed_TAD.shape
    num_kv_heads, dtype = cache_NHPC.shape[1], packed_TAD.dtype
    if (functions := _usable(packed_TAD, size % _LANES)) is None:
        return None
    if cache_NHPC.dtype != dtype or cache_NHPC.shape[3] != 2 * size or packed_TAD.stride(1) != size:
        return None
    assert rows.dtype == torch.int64
    assert len(rows) == num_tokens * num_kv_heads
    assert num_packed >= num_heads + 2 * num_kv_heads
    queries = torch.empty((num_tokens, num_heads, size), dtype=dtype)
    heads = _Heads(
        queries=queries.data_ptr(),
        cache=cache_NHPC.data_ptr(),
        packed=packed_TAD.data_ptr(),
        slots=rows.data_ptr(),
        rows=num_tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        size=size,
        row_stride=packed_TAD.stride(0),
        is_bfloat16=dtype == torch.bfloat16,
        level=_LEVEL,
    )
    if norm is not None:
        weight, heads.eps = norm
        if not weight.is_contiguous() or weight.dtype not in (dtype, torch.float32):
            return None
        assert weight.shape == (num_heads + num_kv_heads, size)
        heads.weight, heads.has_wide_weight = weight.data_ptr(), weight.dtype != dtype
    if rotation is not None:
        cos, sin = rotation
        if not are_tables(rotation, num_tokens, dtype):
            return None
        assert cos.shape[2] <= size
        heads.cosines, heads.sines, heads.rotated = cos.data_ptr(), sin.data_ptr(), cos.shape[2]
    functions.place_heads(heads)
    return queries


def gate(packed: torch.Tensor) -> torch.Tensor | None:
    """`silu(a) * b` of rows `a | b`, contiguous."""
    size = packed.shape[-1] // 2
    if packed.dim() != 2 or (functions := _usable(packed, size % _LANES)) is None:
        return None
    out = torch.empty((len(packed), size), dtype=packed.dtype)
    functions.gate(
        out.data_ptr(),
        packed.data_ptr(),
        len(packed),
        size,
        packed.stride(0),
        packed.dtype == torch.bfloat16,
        _LEVEL,
    )
    return out


def rotate(x_TAD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | None:
    """Compiled `rotary.rotate`, for all elements of each head."""
    num_tokens, num_heads, size = x_TAD.shape
    if (functions := _usable(x_TAD, size % _LANES)) is None:
        return None
    if cos.shape[-1] != size or not are_tables((cos, sin), num_tokens, x_TAD.dtype):
        return None
    out = torch.empty(x_TAD.shape, dtype=x_TAD.dtype)
    functions.rotate(
        out.data_ptr(),
        x_TAD.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        num_tokens,
        num_heads,
        size,
        x_TAD.stride(0),
        x_TAD.stride(1),
        x_TAD.dtype == torch.bfloat16,
        _LEVEL,
    )
    return out


def are_tables(rotation: tuple[torch.Tensor, torch.Tensor], num_tokens: int, dtype: torch.dtype) -> bool:
    """Whether the code can read them: contiguous `[T, 1, rotated]`, both of one shape."""
    if rotation[0].shape[-1] % (2 * _LANES):
        return False
    wanted = (num_tokens, 1, rotation[0].shape[-1])
    return all(table.is_contiguous() and table.shape == wanted and table.dtype == dtype for table in rotation)


def _usable(x: torch.Tensor, rest: int) -> _Functions | None:
    """The functions, which have one thread, if they can read `x`. `rest`: its row size modulo _LANES."""
    if rest or x.dtype not in _DTYPES or x.stride(-1) != 1 or x.device.type != "cpu":
        return None
    return _functions() if torch.get_num_threads() == 1 else None
