"""A graph for any device: records the tensor operations between `begin` and `end`, and launches them again.

As with a CUDA graph, a replay runs no Python, every result has the address of the recording, and an operation
that reads a number from the device cannot be recorded.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from baton.engine.attention.cuda import CudaBackend
from baton.engine.graphs.recorders import Forward, Pieces, Recorder, Replay

_ASKS_THE_DEVICE = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero"}


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._launched: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _ASKS_THE_DEVICE:
            raise RuntimeError(f"{func} cannot be recorded: it waits for the device")
        result = func(*args, **(kwargs or {}))
        self._launched.append((func, args, kwargs or {}, result))
        return result

    def begin(self) -> None:
        self.__enter__()

    def end(self) -> None:
        self.__exit__(None, None, None)

    def replay(self) -> None:
        for func, args, kwargs, result in self._launched:
            again = func(*args, **kwargs)
            for place, value in zip(tree_flatten(result)[0], tree_flatten(again)[0], strict=True):
                # Views and in-place results are there already.
                if isinstance(place, torch.Tensor) and place.data_ptr() != value.data_ptr():
                    place.copy_(value)


class TapeRecorder(Recorder):
    """CudaRecorder's recording in pieces, on tapes."""

    def record(self, forward: Forward, *, in_pieces: bool) -> Replay:
        return Pieces(Tape).record(forward, in_pieces=in_pieces)


class TorchKernelBackend(CudaBackend):
    """The GPU backend with its kernel in torch, which reads only the backend's plans and buffers."""

    def attend(
        self, q_TQD: torch.Tensor, cache_NHPC: torch.Tensor, plan: Any, sinks_Q: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert sinks_Q is None
        if len(plan.tiles) == len(q_TQD):
            rows, positions = plan.block_table, plan.tiles[:, 3]
        else:  # A prefill, which is never recorded.
            tokens = [
                (request, position + offset)
                for request, _, count, position in plan.tiles.tolist()
                for offset in range(count)
            ]
            rows = plan.block_table[[request for request, _ in tokens]]
            positions = torch.tensor([position for _, position in tokens])
        num_tokens, heads = len(q_TQD), self.shape.num_kv_heads
        kv_THLC = cache_NHPC[rows].transpose(1, 2).flatten(2, 3)
        keys = torch.arange(kv_THLC.shape[2])
        seen = keys <= positions[:, None]
        if plan.window:
            seen = seen & (keys > positions[:, None] - plan.window)
        head_dim = self.shape.head_dim
        return F.scaled_dot_product_attention(
            q_TQD.view(num_tokens, heads, -1, head_dim),
            kv_THLC[..., :head_dim],
            kv_THLC[..., head_dim:],
            attn_mask=seen[:, None, None],
            scale=self.shape.scale,
        ).reshape(num_tokens, -1)
