"""Recorders of a forward pass over static memory, which replay it without running its Python code.

    CudaRecorder     torch.cuda.CUDAGraph: one, or one for each piece between two calls outside of graphs
    PlainRecorder    repeats the call: the same buckets, padding and static memory on devices without
                     graphs

A recording ends where the model calls `outside` and begins again after it:

    | graph: embedding ... qkv of layer 0 | call: attention, hooks | graph: output of layer 0 ... | call ...
"""

import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

from baton.engine.forward_context import OutsideGraph

Forward: TypeAlias = Callable[[OutsideGraph | None], torch.Tensor]
"""A forward pass over static memory. Calls through its argument stay outside of the graphs."""
Replay: TypeAlias = Callable[[], torch.Tensor]
"""Runs the pass again; the result is at the same address."""


class Recorder(ABC):
    """Records a forward pass on one kind of device."""

    @abstractmethod
    def record(self, forward: Forward, *, in_pieces: bool) -> Replay:
        """Record `forward`, which may be called more than once. If it raises, nothing is recorded."""


class PlainRecorder(Recorder):
    """Recorder for devices without graphs: a replay calls the pass again."""

    def record(self, forward: Forward, *, in_pieces: bool) -> Replay:
        outside = _directly if in_pieces else None
        forward(outside)
        return lambda: forward(outside)


class Graph(Protocol):
    """Records operations between `begin` and `end`; `replay` launches them again."""

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def replay(self) -> None: ...


class Pieces:
    """One recording: graphs, and the calls between them."""

    def __init__(self, make_graph: Callable[[], Graph]) -> None:
        self._make_graph = make_graph
        self._graph: Graph | None = None
        self._in_order: list[Callable[[], object]] = []

    def record(self, forward: Forward, *, in_pieces: bool) -> Replay:
        self._begin()
        try:
            result = forward(self._outside if in_pieces else None)
            self._end()
        except BaseException:
            if self._graph is not None:
                with contextlib.suppress(RuntimeError):  # The error has broken the capture.
                    self._graph.end()
            raise

        def replay() -> torch.Tensor:
            for piece in self._in_order:
                piece()
            return result

        return replay

    def _begin(self) -> None:
        self._graph = self._make_graph()
        self._graph.begin()

    def _end(self) -> None:
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.end()
        self._in_order.append(graph.replay)

    def _outside(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Call `call` between two pieces. The next piece reads the address of this result in every replay."""
        self._end()
        place = call()
        self._in_order.append(lambda: place.copy_(call()))
        self._begin()
        return place


class CudaRecorder(Recorder):
    """All graphs share one memory pool, because only one is replayed at a time and none keeps data."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        gc.collect()  # Freeing memory during a capture would end the capture.
        torch.cuda.empty_cache()

    def record(self, forward: Forward, *, in_pieces: bool) -> Replay:
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            # A first pass outside of any graph compiles kernels and allocates workspaces.
            forward(_directly if in_pieces else None)
            torch.cuda.synchronize(self._device)
            replay = Pieces(lambda: _CudaGraph(self._pool)).record(forward, in_pieces=in_pieces)
        torch.cuda.synchronize(self._device)
        return replay


class _CudaGraph:
    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def begin(self) -> None:
        # Threads of collectives and connectors may use the device meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


def recorder_for(device: torch.device) -> Recorder:
    return CudaRecorder(device) if device.type == "cuda" else PlainRecorder()


def _directly(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    return call()
