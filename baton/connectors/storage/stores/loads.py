"""Loads of requests on one rank, and the waits of steps for those that arrive layer by layer.

    begin --> open --> end        the parts before the first that failed are loaded
                `---> given up    all blocks count as not loaded: a step may have read them before they were
                                  filled, or the weights have changed

    a step reads an open load --its layers come in time--> complete
                               `--one is late, or the step has not waited for all--> given up

No step waits longer than `wait_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from baton.connectors.storage.stores.layered import LayeredLoad
from baton.connectors.storage.stores.metadata import ChunkPart, LoadChunks, StorageMetadata
from baton.connectors.storage.stores.rank_chunks import RankChunks
from baton.stores.chunks.transfer_states import Outcome
from baton.stores.chunks.transfers import Transfers


class RequestLoads:
    """Called on the rank's thread."""

    def __init__(
        self,
        chunks: RankChunks,
        transfers: Transfers[ChunkPart],
        *,
        wait_s: float,
        arrives: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """`arrives`: a request need not wait for the rest of its load. Called on any thread."""
        self._chunks = chunks
        self._transfers = transfers
        self._wait_s = self._left_s = wait_s  # `_left_s`: what this step may still wait.
        self._arrives = arrives
        self._clock = clock
        self._open: dict[str, LayeredLoad | None] = {}  # Loads by request; None: not by layers.
        self._given_up: dict[str, str] = {}  # Reasons by request.
        self._unreported: dict[str, LayeredLoad] = {}  # Not reported as arriving yet.
        self._awaited: dict[str, LayeredLoad] = {}  # Those that this step may read before they are complete.
        self._waited: set[int] = set()  # Places of this step's layers.

    def begin(self, order: LoadChunks) -> None:
        if order.arrives_s is None:
            self._open[order.request_id], places = None, range(len(order.parts))
            self._transfers.load(order.request_id, order.parts, self._chunks.copy_in, places=places)
            return
        load = LayeredLoad(order, self._chunks.sections_of, self._clock())
        self._open[order.request_id] = self._unreported[order.request_id] = load
        install = partial(self._install, load)
        self._transfers.load(order.request_id, load.pieces, install, places=load.places)

    def give_up(self, request_ids: Iterable[str], reason: str) -> None:
        """Ends the open loads of these requests. No thread writes to their blocks any more."""
        for request_id in self._open.keys() & set(request_ids):
            self._given_up.setdefault(request_id, reason)
            self._transfers.cancel(request_id, waits=True)

    def end(self, request_id: str, outcomes: Sequence[Outcome[ChunkPart]]) -> tuple[str, list[int]] | None:
        """Returns why the load failed, and the blocks that are not loaded. None: all are."""
        load, given_up = self._open.pop(request_id, None), self._given_up.pop(request_id, None)
        parts: Sequence[ChunkPart] = [outcome.chunk for outcome in outcomes]
        places: Sequence[int] = range(len(parts))
        if load is not None:
            parts, places = load.order.parts, load.places
        failed: dict[int, str] = {
            place: outcome.reason
            for place, outcome in zip(places, outcomes, strict=True)
            if outcome.reason is not None and outcome.reason not in ("unneeded", "cancelled")
        }
        if given_up is not None:
            failed = {0: next(iter(failed.values()), given_up)}
        if not failed:
            return None
        first = min(failed)
        return failed[first], [block for part in parts[first:] for block in part.block_ids]

    def take_arriving(self) -> set[str]:
        """Requests that need not wait any more: each once, at the end of its load at the latest."""
        loads = self._unreported.items()
        arriving = {one for one, load in loads if load.is_arriving or one not in self._open}
        for request_id in arriving:
            del self._unreported[request_id]
        return arriving

    # --- Waits of a step -------------------------------------------------------------------------

    def begin_step(self, metadata: StorageMetadata) -> None:
        """A step that may be recorded calls no hook, so all layers are waited for before it."""
        self._left_s, self._waited = self._wait_s, set()
        self._awaited = {
            request_id: load
            for request_id in metadata.usable
            if (load := self._open.get(request_id)) is not None and not load.is_complete
        }
        now = self._clock()
        for load in list(self._awaited.values()):
            load.usable_s = now if load.usable_s is None else load.usable_s
            if metadata.longest == 1:
                self._waited = set(range(len(self._chunks.layers)))
                self._wait_for(load, len(self._chunks.layers))

    def wait_for_layer(self, layer_name: str) -> None:
        if self._awaited:
            layer = self._chunks.layers[layer_name]
            self._waited.add(layer)
            for load in list(self._awaited.values()):
                self._wait_for(load, layer)

    def end_step(self, metadata: StorageMetadata) -> None:
        """Ends the step's waits. A step that has not waited for every layer may have read anything.

        Without a forward pass the load goes on, but not for long: its blocks cannot be freed before it ends.
        """
        now = self._clock()
        for load in list(self._awaited.values()):
            assert load.usable_s is not None
            if metadata.longest or now - load.usable_s > self._wait_s:
                self._refuse(load)

    def _wait_for(self, load: LayeredLoad, layer: int) -> None:
        began_s, request_id = self._clock(), load.order.request_id
        is_there = self._transfers.wait(request_id, lambda: load.has_layer(layer), max(0.0, self._left_s))
        self._left_s -= self._clock() - began_s
        if not is_there:
            self._refuse(load)
        elif load.is_complete and self._waited.issuperset(range(layer)):
            del self._awaited[request_id]

    def _refuse(self, load: LayeredLoad) -> None:
        """This step reports the load's blocks as invalid."""
        del self._awaited[load.order.request_id]
        self.give_up((load.order.request_id,), "timeout")

    # --- Threads ---------------------------------------------------------------------------------

    def _install(self, load: LayeredLoad, piece: ChunkPart, body: memoryview) -> None:
        self._chunks.copy_in(piece, body)
        if load.installed(piece, self._clock()):
            self._arrives()
