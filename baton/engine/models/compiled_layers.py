"""The decoder layers of a decode step by compiled code (`layers.c`), in one call; with a connector in more.

A layer makes some twelve calls in Python. Each takes ten times as long as alone, because a layer's weights
have emptied the CPU's caches of Python's code and objects. The compiled layers call torch's products by the C
interface that torch has for compiled models, and the same compiled code as `compiled_rows` and `attention`
between them. So their results are those of `Decoder`'s layers, bit by bit.
"""

import ctypes
import functools
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from baton.core.kv_groups import layer_name
from baton.engine.attention import AttentionBackend
from baton.engine.attention.compiled import MOST_LEVEL, load_library
from baton.engine.forward_context import ForwardContext
from baton.engine.models.compiled_rows import are_tables
from baton.engine.models.kinds import Kind, StepOfKind
from baton.engine.models.matmul import Product

_TORCH_RELEASE = "2.13."  # Tests run with it. The layers are computed in Python with another release.
_LANES = 16  # The constant of `numbers.h`.
_LEVEL = MOST_LEVEL
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_TORCH_FUNCTIONS = (
    "aoti_torch_create_tensor_from_blob",
    "aoti_torch_delete_tensor_object",
    "aoti_torch_get_data_ptr",
    "aoti_torch_cpu__linear_pointwise",
)


class LayerParts(NamedTuple):
    """A layer with attention and a gated MLP (SiLU), without other operations."""

    products: tuple[Product, Product, Product, Product]  # Heads, output, gate and up, down.
    input_norm: torch.Tensor  # Weights.
    post_norm: torch.Tensor
    heads_norm: torch.Tensor | None
    cache: torch.Tensor
    kind: Kind


class _Product(ctypes.Structure):
    """`struct product` of `layers.c`. The next classes are other structs of that file."""

    _fields_ = (
        *((name, _POINTER) for name in ("weight", "bias")),
        *((name, _SIZE) for name in ("inputs", "outputs")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Product) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _POINTER) for name in ("input_norm", "post_norm", "heads_norm", "cache")),
        ("kind", _SIZE),
    )


class _Kind(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("cosines", "sines", "slots", "attention")),
        ("rotated", _SIZE),
    )


class _Layers(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("create", "delete", "address", "multiply")),
        *((name, _POINTER) for name in ("layers", "kinds", "last_norm")),
        *((name, _SIZE) for name in ("num_layers", "size", "inner", "num_heads", "num_kv_heads", "head_dim")),
        *((name, _SIZE) for name in ("is_bfloat16", "has_wide_norms", "level", "dtype", "cpu")),
        ("eps", ctypes.c_double),
        *(
            (name, _POINTER)
            for name in ("hidden", "normed", "packed", "queries", "attended", "gated", "added")
        ),
        ("rows", _SIZE),
    )


@functools.cache
def _torch_library(version: str) -> ctypes.CDLL | None:
    """None for another release of torch: only AOT Inductor relies on the parameters of these functions."""
    if not version.startswith(_TORCH_RELEASE):
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:  # This system is not Linux.
        return None
    has_all = all(hasattr(library, name) for name in _TORCH_FUNCTIONS)  # A torch without oneDNN lacks some.
    return library if has_all else None


class CompiledLayers:
    """The layers of one model with one cache. Computes with one thread."""

    def __init__(
        self,
        layers: Sequence[LayerParts],
        last_norm: torch.Tensor,
        backend: AttentionBackend,
        eps: float,
        library: ctypes.CDLL,
        of_torch: ctypes.CDLL,
    ) -> None:
        self._run = library.baton_layers_1
        self._run.argtypes = (ctypes.POINTER(_Layers), _SIZE, _SIZE)
        self._caches = [layer.cache for layer in layers]
        self._kinds = list(dict.fromkeys(layer.kind for layer in layers))
        self._kind_of = [layer.kind for layer in layers]
        self._tensors: list[torch.Tensor] = [last_norm]  # Tensors whose addresses the structs have.
        self._handles: list[int] = []
        weakref.finalize(self, _delete, of_torch, self._handles).atexit = False
        self._structs = (_Layer * len(layers))(*(self._struct_of(layer) for layer in layers))
        self._kind_structs = (_Kind * len(self._kinds))()
        self._backend, shape = backend, backend.shape
        qkv, output, gate_up, down = layers[0].products
        self._step = _Layers(
            *(ctypes.cast(getattr(of_torch, name), _POINTER) for name in _TORCH_FUNCTIONS),
            layers=ctypes.addressof(self._structs),
            kinds=ctypes.addressof(self._kind_structs),
            last_norm=last_norm.data_ptr(),
            num_layers=len(layers),
            size=qkv.inputs,
            inner=down.inputs,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            is_bfloat16=shape.dtype == torch.bfloat16,
            has_wide_norms=last_norm.dtype != shape.dtype,
            level=_LEVEL,
            dtype=getattr(of_torch, f"aoti_torch_dtype_{str(shape.dtype).removeprefix('torch.')}")(),
            cpu=of_torch.aoti_torch_device_type_cpu(),
            eps=eps,
        )
        self._widths = {
            "packed": max(qkv.outputs, gate_up.outputs),
            "queries": output.inputs,
            "attended": output.inputs,
            "gated": down.inputs,
            "added": qkv.inputs,
        }
        self._rows_max = 0
        self._scratch = torch.empty(0)

    def _struct_of(self, layer: LayerParts) -> _Layer:
        return _Layer(
            *(self._product_of(product) for product in layer.products),
            input_norm=self._address_of(layer.input_norm),
            post_norm=self._address_of(layer.post_norm),
            heads_norm=self._address_of(layer.heads_norm),
            cache=layer.cache.data_ptr(),
            kind=self._kinds.index(layer.kind),
        )

    def _product_of(self, product: Product) -> _Product:
        return _Product(
            weight=self._handle_of(product.weight),
            bias=self._handle_of(product.bias),
            inputs=product.inputs,
            outputs=product.outputs,
        )

    def _address_of(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def _handle_of(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype, get_pointer.argtypes = _POINTER, (ctypes.py_object, ctypes.c_char_p)
        handle: int = get_pointer(torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(tensor), None)
        self._handles.append(handle)
        return handle

    def run(
        self, hidden_TM: torch.Tensor, context: ForwardContext, steps: Mapping[Kind, StepOfKind]
    ) -> torch.Tensor | None:
        """Hidden states after the last norm `[T, M]`; None if the code does not compute such a step.

        Uses the memory of `hidden_TM`.
        """
        for struct, kind in zip(self._kind_structs, self._kinds, strict=True):
            rotation, plan = steps[kind]
            if plan is None or (attention := self._backend.compiled_step(plan)) is None:
                return None
            if rotation is not None:
                cosines, sines = rotation
                if not are_tables(rotation, len(hidden_TM), self._backend.shape.dtype):
                    return None
                struct.cosines, struct.sines = cosines.data_ptr(), sines.data_ptr()
                struct.rotated = cosines.shape[2]
            struct.slots, struct.attention = attention
        num_rows, step, num_layers = len(hidden_TM), self._step, len(self._caches)
        if num_rows > self._rows_max:
            self._grow(num_rows, hidden_TM.dtype)
        normed = torch.empty_like(hidden_TM)
        step.hidden, step.normed, step.rows = hidden_TM.data_ptr(), normed.data_ptr(), num_rows
        watcher, done = context.watcher, 0
        if watcher is not None:
            for index, (cache, kind) in enumerate(zip(self._caches, self._kind_of, strict=True)):
                self._compute(done, 3 * index + 1)
                watcher.wait_for_layer_load(layer_name(index))
                done = 3 * index + 2
                self._compute(done - 1, done)
                watcher.save_kv_layer(layer_name(index), cache, context.metadata_of(kind.group))
        self._compute(done, 3 * num_layers + 1)
        return normed

    def _compute(self, first: int, end: int) -> None:
        if (error := self._run(self._step, first, end)) != 0:
            raise RuntimeError(f"a product of torch failed with code {error} in compiled layers")

    def _grow(self, num_rows: int, dtype: torch.dtype) -> None:
        """Make room for the numbers of a step."""
        self._rows_max = -(-num_rows // _LANES) * _LANES
        self._scratch = torch.empty(self._rows_max * sum(self._widths.values()), dtype=dtype)
        address = self._scratch.data_ptr()
        for name, width in self._widths.items():
            setattr(self._step, name, address)
            address += self._rows_max * width * dtype.itemsize


def _delete(of_torch: ctypes.CDLL, handles: list[int]) -> None:
    for handle in handles:
        of_torch.aoti_torch_delete_tensor_object(ctypes.c_void_p(handle))


def compiled_layers(
    layers: Sequence[LayerParts | None], last_norm: torch.Tensor, backend: AttentionBackend, eps: float
) -> CompiledLayers | None:
    """None without the library, or for layers that it does not compute."""
    parts = [layer for layer in layers if layer is not None]
    library, of_torch = load_library(), _torch_library(torch.__version__)
    if len(parts) < len(layers) or library is None or of_torch is None:
        return None
    shape = backend.shape
    products = [product for layer in parts for product in layer.products]
    if any(size % _LANES for product in products for size in (product.inputs, product.outputs)):
        return None
    if any(layer.cache.dtype != shape.dtype or layer.cache.shape[3] != 2 * shape.head_dim for layer in parts):
        return None
    return CompiledLayers(parts, last_norm, backend, eps, library, of_torch)
