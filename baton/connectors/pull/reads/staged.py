"""Reads one part of a claim through the staging buffer: P's blocks as they are, then converted into ours.

    post chunk 0
    post chunk 1, wait for chunk 0, convert it
    post chunk 2, wait for chunk 1, convert it ...      the wire and the conversion work side by side

In a background thread, never on a step. A read ends when its last number is in place, after the conversion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from baton.connectors.pull.reads.operations import Operations, Read, Ready, Spans
from baton.connectors.pull.reads.slot_memory import SlotMemory, move_tokens
from baton.connectors.pull.reads.staging_buffer import Staging
from baton.core.errors import TransferError
from baton.core.layout import PLANES, CopySpan, RankLayout, Region
from baton.protocol.block_runs import check_tables
from baton.protocol.conversion import StagedChunk, chunk_spans, plan_chunk, plan_groups
from baton.protocol.plan import Share
from baton.transport.base.interface import OpId

IN_FLIGHT_MAX = 2


@dataclass(frozen=True, slots=True)
class StagedOrder:
    """One part of a claim, as far as one pair of ranks is concerned."""

    peer: Hashable  # The peer whose reads take turns at the staging buffer.
    remote: RankLayout
    share: Share  # Share of the layers that this part moves.
    first_token: int
    num_tokens: int
    local_table: Sequence[int]
    remote_table: Sequence[int]

    @property
    def last_token(self) -> int:
        return self.first_token + self.num_tokens


class Wire:
    """One read's way to its peer, over an open link. Used by one background thread."""

    def __init__(self, ready: Ready, read: Read, operations: Operations) -> None:
        self._ready = ready
        self._read = read
        self._operations = operations

    def prepare(self, key: Hashable, make_spans: Callable[[], Sequence[CopySpan]]) -> Spans:
        """Prepares spans as the transport does, once for each key."""
        return self._ready.prepare_other(key, make_spans)

    def post(self, spans: Spans, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> OpId:
        """Raises TransferError, also if the rest is no longer wanted."""
        with self._operations.changed:
            self._raise_if_failed()
            return self._operations.post(
                self._read, self._ready.transport, spans, local_blocks, remote_blocks
            )

    def wait(self, op: OpId) -> None:
        """Waits until the operation has ended. Raises TransferError if it has failed."""
        self._operations.wait(self._ready.transport, op)
        with self._operations.changed:
            self._raise_if_failed()

    def abandon(self, op: OpId) -> None:
        """Cancel it, and wait until it has ended."""
        with self._operations.changed:
            self._operations.cancel_one(self._ready.transport, op)
        self._operations.wait(self._ready.transport, op)

    def is_stopped(self) -> bool:
        """Whether the rest is no longer wanted."""
        return self._read.stopped_by is not None

    def _raise_if_failed(self) -> None:
        if (reason := self._read.stopped_by) is not None:
            raise TransferError(reason)


@dataclass(frozen=True, slots=True)
class _Flight:
    op: OpId
    part: int
    chunk: StagedChunk
    blocks: range  # Blocks in the remote table.


class StagedReader:
    def __init__(self, cache: SlotMemory, staging: Staging) -> None:
        self._cache = cache
        self._staging = staging
        self._region = len(cache.layout.regions)  # The buffer is registered after the regions of the cache.

    @classmethod
    def of_caches(cls, layout: RankLayout, kv_caches: dict[str, torch.Tensor]) -> StagedReader:
        cache = SlotMemory.of_caches(layout, kv_caches)
        return cls(cache, Staging(next(iter(kv_caches.values())).device))

    @property
    def region(self) -> Region:
        """Region of the staging buffer, to be registered after the regions of the cache."""
        return self._staging.region

    def read(self, order: StagedOrder, wire: Wire) -> None:
        """Raises TransferError; then the read writes no more, and the target's content is undefined."""
        block_tokens = order.remote.block_tokens
        check_tables(
            order.last_token,
            self._cache.layout.block_tokens,
            block_tokens,
            order.local_table,
            order.remote_table,
        )
        table = torch.tensor(order.local_table, dtype=torch.int64, device=self._staging.memory.device)
        first, last = order.first_token // block_tokens, -(-order.last_token // block_tokens)
        flights: deque[_Flight] = deque()
        try:
            for layers in plan_groups(order.remote, order.share, self._staging.part_bytes):
                next_block = first
                while next_block < last:
                    while len(flights) == IN_FLIGHT_MAX:
                        self._land(flights, order, table, wire)
                    part = self._staging.borrow_nowait(order.peer)
                    if part is None:
                        # A read that waits holds nothing, so two reads never wait for each other.
                        while flights:
                            self._land(flights, order, table, wire)
                        part = self._staging.wait_part(order.peer, wire.is_stopped)
                    flights.append(self._post(order, wire, part, layers, range(next_block, last)))
                    next_block = flights[-1].blocks.stop
            while flights:
                self._land(flights, order, table, wire)
        finally:
            for flight in flights:  # Some are left after a failure only.
                wire.abandon(flight.op)
                self._staging.give_back(flight.part)

    def _post(
        self, order: StagedOrder, wire: Wire, part: int, layers: tuple[str, ...], blocks: range
    ) -> _Flight:
        """Posts a read of as many of these blocks as there is room for."""
        try:
            chunk = plan_chunk(
                order.remote,
                order.share,
                layers,
                region=self._region,
                offset=self._staging.offset_of(part),
                nbytes=self._staging.part_bytes,
            )
            spans = wire.prepare(
                ("staged", layers, part), lambda: chunk_spans(chunk, order.remote, order.share)
            )
            blocks = blocks[: chunk.capacity]
            remote_blocks = order.remote_table[blocks.start : blocks.stop]
            return _Flight(wire.post(spans, range(len(blocks)), remote_blocks), part, chunk, blocks)
        except BaseException:
            self._staging.give_back(part)
            raise

    def _land(self, flights: deque[_Flight], order: StagedOrder, table: torch.Tensor, wire: Wire) -> None:
        """Wait for the oldest flight, and convert what it brought."""
        flight = flights[0]
        wire.wait(flight.op)
        # |  block  |  block  |  block  |      of the remote table, in the buffer
        #    | skip |<--- tokens --->|
        start = flight.blocks.start * order.remote.block_tokens
        first = max(order.first_token, start)
        count = min(order.last_token, flight.blocks.stop * order.remote.block_tokens) - first
        staged = SlotMemory(flight.chunk.layout, {self._region: self._staging.memory})
        for name in flight.chunk.layers:
            of_share = order.share[name]
            ours = of_share.start - self._cache.heads_of(name).start
            heads = range(ours, ours + len(of_share))
            halves = PLANES in (staged.spec_of(name).packing, self._cache.spec_of(name).packing)
            sources = staged.numbers(name, range(len(heads)), halves=halves)
            targets = self._cache.numbers(name, heads, halves=halves)
            for source, target in zip(sources, targets, strict=True):
                move_tokens(source[: len(flight.blocks)], first - start, target, table, first, count)
        if table.is_cuda:
            torch.cuda.current_stream(table.device).synchronize()
        flights.popleft()
        self._staging.give_back(flight.part)
