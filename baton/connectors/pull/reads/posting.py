"""How one read moves over a link that is ready: straight into our blocks, or through the staging buffer.

    straight, everything prepared --> posted, at once
    straight, an edge of a new shape --> prepared, then posted      (background)
    staged --> chunk after chunk through the staging buffer         (background)

A read ends exactly once, whatever happens to the link, and only when nothing of it touches memory any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from baton.connectors.pull.reads.link import Link, words_of
from baton.connectors.pull.reads.operations import Operations, Read, Ready, Spans
from baton.core.errors import PeerError, TransferError
from baton.core.layout import RankLayout
from baton.protocol.block_runs import BlockRun, plan_block_runs
from baton.protocol.plan import Share
from baton.protocol.token_spans import Shape

if TYPE_CHECKING:
    from baton.connectors.pull.reads.staged import StagedReader


@dataclass(frozen=True, slots=True)
class Job:
    """Work for a background thread: connects `link`, or moves `read` over it."""

    run: Callable[[], None]
    link: Link
    read: Read | None = None

    def __call__(self) -> None:
        self.run()


class ReadPosting:
    """Without a staged reader, reads that need one fail."""

    def __init__(self, layout: RankLayout, operations: Operations, staged: StagedReader | None) -> None:
        self._layout = layout
        self._operations = operations
        self._staged = staged

    def begin(self, link: Link, ready: Ready, read: Read) -> Job | None:
        """With the lock of the operations held. Returns what is left to do in the background."""
        order, layers = read.order, link.layers_of(read.order, self._layout)
        if read.parts.error is not None or not layers:  # Cancelled before, or nothing of this part is there.
            self._operations.end(read)
            return None
        if ready.way.is_staged:
            return self._begin_staged(link, ready, read, layers)
        try:
            pieces = plan_block_runs(
                order.first_token,
                order.num_tokens,
                self._layout.block_tokens,
                link.card.layout.block_tokens,
                order.local_blocks,
                order.remote_blocks,
                rounds_up=order.is_tail,
            )
        except TransferError as error:
            self._operations.fail(read, words_of(error))
            return None
        if ready.way.moves_whole_blocks and any(
            piece.shape != Shape(0, 0, self._layout.block_tokens) for piece in pieces
        ):
            return self._begin_staged(link, ready, read, layers)
        spans = [ready.find(piece.shape, layers) for piece in pieces]
        found = [one for one in spans if one is not None]
        if len(found) == len(pieces):
            self._post(link, ready, read, pieces, found)
            return None
        return Job(partial(self._prepare_and_post, link, ready, read, layers, pieces), link, read)

    def _begin_staged(self, link: Link, ready: Ready, read: Read, layers: tuple[str, ...]) -> Job | None:
        if self._staged is None or not ready.way.can_be_staged:
            self._operations.fail(
                read, "a part of a block cannot be read from caches that are packed like this"
            )
            return None
        read.is_staged = True
        return Job(partial(self._read_staged, link, ready, read, layers), link, read)

    def _post(
        self, link: Link, ready: Ready, read: Read, pieces: Sequence[BlockRun], spans: Sequence[Spans]
    ) -> None:
        if link.is_lost:
            read.fail("the peer is gone")
        if read.stopped_by is None:
            try:
                for piece, prepared in zip(pieces, spans, strict=True):
                    self._operations.post(
                        read, ready.transport, prepared, piece.local_blocks, piece.remote_blocks
                    )
            except (TransferError, PeerError) as error:
                read.fail(words_of(error))
                self._operations.cancel(lambda other: other is read)
        if read.num_running == 0:
            self._operations.end(read)

    # --- In the background ---------------------------------------------------------------------

    def _prepare_and_post(
        self, link: Link, ready: Ready, read: Read, layers: tuple[str, ...], pieces: Sequence[BlockRun]
    ) -> None:
        spans: list[Spans] = []
        try:
            spans = [ready.prepare(piece.shape, layers) for piece in pieces]
        except Exception as error:  # The border of one read: whatever it is, its claim hears of it.
            read.fail(link.explain(error))
        with self._operations.changed:
            self._post(link, ready, read, pieces, spans)

    def _read_staged(self, link: Link, ready: Ready, read: Read, layers: tuple[str, ...]) -> None:
        # Here, since it imports torch, which only a rank with a staged reader has loaded.
        from baton.connectors.pull.reads.staged import StagedOrder, Wire

        assert self._staged is not None
        started_at = time.monotonic()
        order = read.order
        try:
            self._staged.read(
                StagedOrder(
                    link.key.producer,
                    link.card.layout,
                    Share(ready.share.heads, layers),
                    order.first_token,
                    order.num_tokens,
                    order.local_blocks,
                    order.remote_blocks,
                ),
                Wire(ready, read, self._operations),
            )
        except Exception as error:  # As above.
            read.fail(link.explain(error))
        with self._operations.changed:
            read.duration_s = time.monotonic() - started_at
            self._operations.end(read)
