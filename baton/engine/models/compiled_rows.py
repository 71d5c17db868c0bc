"""RMS norm and rotary embedding by compiled code (`rows.c`), in the library of `attention.compiled`.

Each is one call in the place of six to nine small operations of torch, whose dispatch takes longer than their
numbers in a decode step. None, if there is no such code for the arguments: torch computes then.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from baton.engine.attention.compiled import LEVELS, load_library

_LANES = 16  # As in `numbers.h`.
_LEVEL = len(LEVELS) - 1  # The CPU may have less.
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_DTYPES = (torch.float32, torch.bfloat16)


class _Functions(NamedTuple):
    rms_norm: Callable[..., None]
    rotate: Callable[..., None]


@functools.cache
def _functions() -> _Functions | None:
    """None without the library, or with that of another version of Baton."""
    if (library := load_library()) is None:
        return None
    library.baton_rms_norm_1.restype = library.baton_rotate_1.restype = None
    library.baton_rms_norm_1.argtypes = (*[_POINTER] * 3, *[_SIZE] * 6, ctypes.c_float, *[ctypes.c_int] * 3)
    library.baton_rotate_1.argtypes = (*[_POINTER] * 4, *[_SIZE] * 5, *[ctypes.c_int] * 2)
    return _Functions(library.baton_rms_norm_1, library.baton_rotate_1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
    """As `layers.rms_norm`."""
    size, dtype = x.shape[-1], x.dtype
    if (functions := _usable(x, size % _LANES)) is None:
        return None
    is_wide = weight.dtype != dtype
    if not weight.is_contiguous() or (is_wide and weight.dtype != torch.float32):
        return None
    if x.dim() not in (2, 3) or weight.shape not in ((size,), x.shape[1:]):
        return None
    heads, weight_stride = x.shape[1] if x.dim() == 3 else 1, size if weight.dim() == 2 else 0
    out = torch.empty(x.shape, dtype=dtype)
    functions.rms_norm(
        out.data_ptr(),
        x.data_ptr(),
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


def rotate(x_TAD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | None:
    """As `rotary.rotate` of all elements of each head."""
    num_tokens, num_heads, size = x_TAD.shape
    if (functions := _usable(x_TAD, size % (2 * _LANES))) is None:
        return None
    for table in (cos, sin):
        if not table.is_contiguous() or table.shape != (num_tokens, 1, size) or table.dtype != x_TAD.dtype:
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


def _usable(x: torch.Tensor, rest: int) -> _Functions | None:
    """The functions, which have one thread, if they can read `x`. `rest`: of its rows' size."""
    if rest or x.dtype not in _DTYPES or x.stride(-1) != 1 or x.device.type != "cpu":
        return None
    return _functions() if torch.get_num_threads() == 1 else None
