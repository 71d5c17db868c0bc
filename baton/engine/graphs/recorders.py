"""How a forward pass over static memory is recorded, to be run again without its Python.

    CudaRecorder     torch.cuda.CUDAGraph: one, or one for each piece between two calls that stay outside
    PlainRecorder    remembers the call and makes it again: the same buckets, padding and static memory where
                     there are no graphs

A recording ends where the model calls `outside` and begins again behind it:

    | graph: embedding ... qkv of layer 0 | call: attention, hooks | graph: output of layer 0 ... | call ...
"""

from __future__ import annotations

import contextlib
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

from baton.engine.forward_context import OutsideGraph

Forward: TypeAlias = Callable[[OutsideGraph | None], torch.Tensor]
"""A forward pass over static memory; what it calls through its argument stays outside the graphs."""
Replay: TypeAlias = Callable[[], torch.Tensor]
"""Runs it again; the result lies where the last one lay."""


class Recorder(ABC):
    @abstractmethod
    def record(self, forward: Forward, *, in_pieces: bool) -> Replay:
        """Calls `forward`, perhaps more than once. What it raises comes out, and nothing is recorded."""


class PlainRecorder(Recorder):
    def record(self, forward: Forward, *, in_pieces: bool) -> Replay:
        outside = _directly if in_pieces else None
        forward(outside)
        return lambda: forward(outside)


class Graph(Protocol):
    """What is launched between `begin` and `end` is recorded, and launched again by `replay`."""

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def replay(self) -> None: ...


class Pieces:
    """One recording: replays of graphs, and the calls that stay outside between them."""

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
                with contextlib.suppress(RuntimeError):  # Broken by what was raised.
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
        """What `call` returns now is where the next piece looks for it in every replay."""
        self._end()
        place = call()
        self._in_order.append(lambda: place.copy_(call()))
        self._begin()
        return place


class CudaRecorder(Recorder):
    """All graphs share one memory pool: they are replayed one at a time, and keep nothing for the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        gc.collect()  # What it frees while a stream is captured would end the capture.
        torch.cuda.empty_cache()

    def record(self, forward: Forward, *, in_pieces: bool) -> Replay:
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            # Kernels are compiled, and workspaces made, by a first pass outside of any graph.
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
        # Other threads, of collectives and connectors, may go on using the device meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


def recorder_for(device: torch.device) -> Recorder:
    return CudaRecorder(device) if device.type == "cuda" else PlainRecorder()


def _directly(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    return call()
