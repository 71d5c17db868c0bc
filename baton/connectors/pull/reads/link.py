"""A link of one rank to the memory of a rank of a peer: opening, new attempts, and reads over it.

The first loss or failure is answered with a new attempt at once. After several in a row, reads fail without
an attempt until a delay has passed, which doubles up to RETRY_MAX_S (`Attempts`).

A read over a link that is ready goes straight into our blocks, or through the staging buffer:

    straight, everything prepared --> posted, at once
    straight, an edge of a new shape --> prepared, then posted      (background)
    staged --> chunk after chunk through the staging buffer         (background)

A read ends exactly once, whatever happens to the link, and only when nothing of it touches memory any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from baton.connectors.pull.metadata import ReadBlocks
from baton.connectors.pull.reads.operations import WHOLE_STATE, Operations, Read, Ready, Spans
from baton.core.errors import PeerError, TransferError
from baton.core.ids import Address, EngineId
from baton.core.layout import RankLayout
from baton.protocol.block_runs import BlockRun, Shape, period_shapes, plan_block_runs
from baton.protocol.conversion import plan_conversion
from baton.protocol.handshake import RankCard
from baton.protocol.plan import PlanError, plan_shares, plan_state_spans
from baton.transport import choose_transport
from baton.transport.base.interface import Transport

if TYPE_CHECKING:
    from baton.connectors.pull.reads.staged import StagedReader

logger = logging.getLogger(__name__)

RETRY_FIRST_S = 0.25
RETRY_MAX_S = 5.0  # An engine that is back on the network is read from within this time.
STEADY_S = 10.0  # A link that lived longer is no sign of a peer that is dead or a network that fails.


class LinkKey(NamedTuple):
    producer: Address
    source: int  # The producer's rank.
    sources: tuple[int, ...]  # All ranks that we read from for a claim: the shares depend on them.


@dataclass(slots=True)
class Attempts:
    """Failures in a row of one link: to connect, or soon after. Time is an argument."""

    num_failed: int = 0
    next_at: float = 0.0

    def lost(self, connected_at: float, now: float) -> None:
        if now - connected_at >= STEADY_S:
            self.num_failed = 0
        self.failed(now)

    def failed(self, now: float) -> None:
        self.num_failed += 1
        doublings = self.num_failed - 2
        delay_s = 0.0 if doublings < 0 else min(RETRY_FIRST_S * 2.0 ** min(doublings, 16), RETRY_MAX_S)
        self.next_at = now + delay_s

    @property
    def is_news(self) -> bool:
        """The first, second, fourth, ... failure: the others must not fill the log."""
        return self.num_failed & (self.num_failed - 1) == 0


@dataclass(slots=True, eq=False)
class Link:
    key: LinkKey
    cards: tuple[RankCard, ...]  # Cards of all the producer's ranks.
    ready: Ready | None = None
    connected_at: float = 0.0
    is_lost: bool = False
    waiting: list[Read] = field(default_factory=list)

    @property
    def card(self) -> RankCard:
        return self.cards[self.key.source]

    @property
    def engine_id(self) -> EngineId:
        return self.key.producer.engine_id

    def states_of(self, order: ReadBlocks, local: RankLayout) -> tuple[str, ...]:
        """Layers with a recurrent state that the part names; empty if it is a part of tokens."""
        if order.groups is None:
            return ()
        theirs = {state.name for state in self.card.layout.states if state.group == order.groups.remote}
        return tuple(
            state.name for state in local.states if state.group == order.groups.local and state.name in theirs
        )

    def layers_of(self, order: ReadBlocks, local: RankLayout) -> tuple[str, ...]:
        """Layers of the share that the part names: positions in P's order become names."""
        assert self.ready is not None
        layers = tuple(self.ready.share)
        if order.groups is not None:
            ours = _names_of_group(local, order.groups.local)
            theirs = _names_of_group(self.card.layout, order.groups.remote)
            layers = tuple(name for name in layers if name in ours & theirs)
        if order.layers is None:
            return layers
        tp_size = self.card.layout.tp_size
        in_order = [layer.name for card in self.cards[::tp_size] for layer in card.layout.layers]
        named = set(in_order[slice(*order.layers)])
        return tuple(name for name in layers if name in named)

    def explain(self, error: Exception, *, is_news: bool = True) -> str:
        """Logs why this link cannot be read from, and returns it in words."""
        expected = isinstance(error, TransferError | PeerError)
        level = logging.WARNING if is_news or not expected else logging.DEBUG
        logger.log(level, "cannot read from %s: %s", self.engine_id, error, exc_info=not expected)
        return words_of(error)


@dataclass(frozen=True, slots=True)
class LinkOpener:
    """Connects a link, and plans what is read over it. Takes round trips: never on a step."""

    layout: RankLayout  # Our rank's layout.
    transports: Mapping[str, Transport]
    order: Sequence[str]  # Names of transports, in the order of preference.
    converts_dtype: bool
    can_stage: bool

    def open(self, link: Link) -> Ready:
        """Raises TransferError or PeerError."""
        remote = link.card.layout
        sources = {source: link.cards[source].layout for source in link.key.sources}
        share = plan_shares(self.layout, sources).get(link.key.source, {})
        way = plan_conversion(self.layout, remote, share, converts_dtype=self.converts_dtype)
        if way.is_staged and not self.can_stage:
            raise PlanError("the layouts differ in a way that needs a staging buffer")
        if way.is_staged:
            logger.log(
                logging.WARNING if way.loss else logging.INFO,
                "KV of %s is converted on receive: %s",
                link.engine_id,
                way.loss or "without loss",
            )
        address = Address(link.engine_id, link.card.epoch)
        transport, peer = choose_transport(self.transports, link.card.endpoints, address, order=self.order)
        try:
            states = plan_state_spans(self.layout, sources, link.key.source)
            ready = Ready(transport, peer, self.layout, remote, share, way, states)
            if share and not way.is_staged:
                for shape in period_shapes(self.layout.block_tokens, remote.block_tokens):
                    ready.prepare_whole(shape)
            return ready
        except BaseException:
            transport.disconnect(peer)
            raise


@dataclass(frozen=True, slots=True)
class Job:
    """Work for a background thread: connects `link`, or moves `read` over it."""

    run: Callable[[], None]
    link: Link
    read: Read | None = None

    def __call__(self) -> None:
        self.run()


class ReadPosting:
    """Begins reads over a link. A read that needs a staged reader fails if there is none."""

    def __init__(self, layout: RankLayout, operations: Operations, staged: StagedReader | None) -> None:
        self._layout = layout
        self._operations = operations
        self._staged = staged

    def begin(self, link: Link, ready: Ready, read: Read) -> Job | None:
        """Begins one read. Returns what is left to do in the background. Needs the operations' lock."""
        order = read.order
        if states := link.states_of(order, self._layout):
            return self._begin_states(link, ready, read, states)
        layers = link.layers_of(order, self._layout)
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

    def _begin_states(self, link: Link, ready: Ready, read: Read, names: tuple[str, ...]) -> Job | None:
        """One state of each layer moves: the last blocks of both tables."""
        names = tuple(name for name in names if name in ready.states)
        if read.parts.error is not None or not names:
            self._operations.end(read)
            return None
        piece = BlockRun(WHOLE_STATE, read.order.local_blocks[-1:], read.order.remote_blocks[-1:])
        if (spans := ready.find(WHOLE_STATE, names)) is not None:
            self._post(link, ready, read, [piece], [spans])
            return None
        return Job(partial(self._prepare_and_post, link, ready, read, names, [piece]), link, read)

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
        except Exception as error:  # Whatever the error is, only this read fails.
            read.fail(link.explain(error))
        with self._operations.changed:
            self._post(link, ready, read, pieces, spans)

    def _read_staged(self, link: Link, ready: Ready, read: Read, layers: tuple[str, ...]) -> None:
        # Imported here, since it imports torch, which only a rank with a staged reader has loaded.
        from baton.connectors.pull.reads.staged import StagedOrder, Wire

        assert self._staged is not None
        started_at = time.monotonic()
        order = read.order
        try:
            self._staged.read(
                StagedOrder(
                    link.key.producer,
                    link.card.layout,
                    {name: ready.share[name] for name in layers},
                    order.first_token,
                    order.num_tokens,
                    order.local_blocks,
                    order.remote_blocks,
                ),
                Wire(ready, read, self._operations),
            )
        except Exception as error:  # Whatever the error is, only this read fails.
            read.fail(link.explain(error))
        with self._operations.changed:
            read.duration_s = time.monotonic() - started_at
            self._operations.end(read)


def _names_of_group(layout: RankLayout, group: int) -> frozenset[str]:
    return frozenset(layer.name for layer in layout.layers if layer.group == group)


def words_of(error: Exception) -> str:
    return str(error) or type(error).__name__
