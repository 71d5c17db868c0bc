"""One rank's ways to the memory of its peers' ranks, and the reads that go over them.

    read --no link--> CONNECTING (background thread)
    CONNECTING --connected, planned--> READY               waiting reads are begun
    CONNECTING --no way, or the layouts do not fit--> gone    waiting reads end with the reason
    READY --the connection is lost--> CONNECTING           at the next read

    begun, straight, everything prepared --> posted, at once
    begun, straight, an edge of a new shape --> prepared, then posted      (background)
    begun, staged --> chunk after chunk through the staging buffer         (background)

A claim's read may come in parts; they end together, exactly once, whatever happens to the link, and only when
nothing of them touches memory any more. Nothing here blocks the engine's step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from baton.connectors.pull.link_wire import LinkWire, Ready, StagedOrder
from baton.connectors.pull.metadata import ReadBlocks, ReadEnd
from baton.connectors.pull.operations import Operations, Spans
from baton.connectors.pull.parts import Parts, Read
from baton.core.errors import PeerError, TransferError
from baton.core.ids import Address, Pair
from baton.core.layout import RankLayout
from baton.protocol.handshake import RankCard
from baton.protocol.pieces import Piece, period_shapes, plan_pieces
from baton.protocol.plan import PlanError, Share, plan_shares
from baton.protocol.slots import Shape
from baton.protocol.ways import plan_way
from baton.transport import choose_transport
from baton.transport.base import Transport

if TYPE_CHECKING:
    from baton.connectors.pull.staged_reads import StagedReader

logger = logging.getLogger(__name__)

RunInBackground = Callable[[Callable[[], None]], None]
Job: TypeAlias = Callable[[], None]


class _LinkKey(NamedTuple):
    producer: Address
    source: int  # The producer's rank.
    sources: tuple[int, ...]  # All that we read from for a claim: the shares depend on them.


@dataclass(slots=True, eq=False)
class _Link:
    key: _LinkKey
    cards: tuple[RankCard, ...]  # Of all the producer's ranks.
    ready: Ready | None = None
    is_lost: bool = False
    waiting: list[Read] = field(default_factory=list)

    @property
    def card(self) -> RankCard:
        return self.cards[self.key.source]


class PeerLinks:
    """Calls may come from the engine's step and from background threads."""

    def __init__(
        self,
        layout: RankLayout,
        transports: Mapping[str, Transport],
        order: Sequence[str],
        run_in_background: RunInBackground,
        *,
        staged: StagedReader | None = None,
        converts_dtype: bool = True,
    ) -> None:
        """Without a staged reader, peers that need one are peers that cannot be read."""
        self._layout = layout
        self._rank = layout.pp_rank * layout.tp_size + layout.tp_rank
        self._transports = transports
        self._order = order
        self._run_in_background = run_in_background
        self._staged = staged
        self._converts_dtype = converts_dtype
        self._operations = Operations(transports, self._end)
        self._changed = self._operations.changed  # The lock of everything here.
        self._cards: dict[Address, tuple[RankCard, ...]] = {}
        self._links: dict[_LinkKey, _Link] = {}
        self._parts: dict[tuple[int, Pair], Parts] = {}  # Whose end has not come.
        self._ended: list[ReadEnd] = []

    def meet(self, producer: Address, cards: tuple[RankCard, ...]) -> None:
        with self._changed:
            self._cards[producer] = cards

    def read(self, order: ReadBlocks) -> None:
        """Begin this rank's part, now or when the peer is connected."""
        pairs = [pair for pair in order.pairs if pair.consumer_rank == self._rank]
        sources = tuple(pair.producer_rank for pair in pairs)
        for pair in pairs:
            with self._changed:
                job = self._read_pair(order, pair, _LinkKey(order.producer, pair.producer_rank, sources))
            if job is not None:
                self._run_in_background(job)

    def cancel(self, claim: int) -> None:
        with self._changed:
            self._stop(lambda parts: parts.claim == claim, "cancelled")

    def lose(self, producer: Address) -> None:
        with self._changed:
            self._cards.pop(producer, None)
            for key in [key for key in self._links if key.producer == producer]:
                link = self._links.pop(key)
                link.is_lost = True
                self._end_waiting(link, "the peer is gone")
                if link.ready is not None:
                    link.ready.transport.disconnect(link.ready.peer)

    def fail(self, order: ReadBlocks, reason: str) -> None:
        """A fault of ours kept it from being begun: its pairs end, as soon as nothing of them runs."""
        with self._changed:
            for pair in order.pairs:
                if pair.consumer_rank == self._rank:
                    self._parts.setdefault((order.claim, pair), Parts(order.claim, pair))
            self._stop(lambda parts: parts.claim == order.claim, reason)

    def take_ended(self) -> list[ReadEnd]:
        """Reads that have ended since, each once. Never blocks."""
        with self._changed:
            self._operations.collect()
            ended, self._ended = self._ended, []
            return ended

    @property
    def num_moving(self) -> int:
        """Operations that move bytes at this moment. Never blocks."""
        with self._changed:
            self._operations.collect()
            return self._operations.num_running

    def is_open(self, claim: int) -> bool:
        """Whether ends of this claim are still to be taken."""
        with self._changed:
            return any(of_claim == claim for of_claim, _ in self._parts) or any(
                end.claim == claim for end in self._ended
            )

    @property
    def num_open(self) -> int:
        """Reads whose end has not been taken."""
        with self._changed:
            return len(self._parts) + len(self._ended)

    def close(self) -> None:
        """End everything soon, so that no background thread has anything to wait for."""
        with self._changed:
            self._stop(lambda parts: True, "the connector is shut down")

    # --- With the lock held --------------------------------------------------------------------

    def _read_pair(self, order: ReadBlocks, pair: Pair, key: _LinkKey) -> Job | None:
        """Returns what is left to do in the background."""
        parts = self._parts.setdefault((order.claim, pair), Parts(order.claim, pair))
        parts.is_complete |= order.is_last
        if parts.error or order.num_tokens == 0:
            self._settle(parts)
            return None
        parts.num_open += 1
        read = Read(parts, order)
        link = self._links.get(key)
        if link is not None and link.ready is not None:
            if link.ready.peer.lost is None:
                return self._begin(link, link.ready, read)
            return self._replace(link, link.ready, read)
        if link is not None:
            link.waiting.append(read)
            return None
        cards = self._cards.get(key.producer)
        if cards is None or not max(key.sources) < len(cards):
            read.fail("the peer is not known")
            self._end(read)
            return None
        link = self._links[key] = _Link(key, cards, waiting=[read])
        return partial(self._connect, link)

    def _replace(self, lost: _Link, ready: Ready, read: Read) -> Job:
        """Dial again: the peer may be well, and only this connection at an end."""
        logger.warning(
            "the connection to rank %d of %s is lost; connecting again: %s",
            lost.key.source,
            lost.key.producer.engine_id,
            ready.peer.lost,
        )
        lost.is_lost = True
        link = self._links[lost.key] = _Link(lost.key, lost.cards, waiting=[read])

        def connect() -> None:
            ready.transport.disconnect(ready.peer)
            self._connect(link)

        return connect

    def _begin(self, link: _Link, ready: Ready, read: Read) -> Job | None:
        """Returns what is left to do in the background."""
        order, layers = read.order, self._layers_of(link, ready.share, read.order)
        if read.parts.error or not layers:  # Cancelled before, or nothing of this part is there.
            self._end(read)
            return None
        if ready.way.is_staged:
            return self._begin_staged(link, ready, read, layers)
        try:
            pieces = plan_pieces(
                order.first_token,
                order.num_tokens,
                self._layout.block_tokens,
                link.card.layout.block_tokens,
                order.local_blocks,
                order.remote_blocks,
                rounds_up=order.is_tail,
            )
        except TransferError as error:
            read.fail(str(error))
            self._end(read)
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
        return partial(self._prepare_and_post, link, ready, read, layers, pieces)

    def _begin_staged(self, link: _Link, ready: Ready, read: Read, layers: tuple[str, ...]) -> Job | None:
        if self._staged is None or not ready.way.can_be_staged:
            read.fail("a part of a block cannot be read from caches that are packed like this")
            self._end(read)
            return None
        read.is_staged = True
        return partial(self._read_staged, link, ready, read, layers)

    def _layers_of(self, link: _Link, share: Share, order: ReadBlocks) -> tuple[str, ...]:
        """Those of the share that the part names: positions in P's order become names."""
        layers = share.layers
        if order.groups is not None:
            ours = _names_of_group(self._layout, order.groups.local)
            theirs = _names_of_group(link.card.layout, order.groups.remote)
            layers = tuple(name for name in layers if name in ours & theirs)
        if order.layers is None:
            return layers
        tp_size = link.card.layout.tp_size
        in_order = [layer.name for card in link.cards[::tp_size] for layer in card.layout.layers]
        named = set(in_order[slice(*order.layers)])
        return tuple(name for name in layers if name in named)

    def _post(
        self, link: _Link, ready: Ready, read: Read, pieces: Sequence[Piece], spans: Sequence[Spans]
    ) -> None:
        if link.is_lost:
            read.fail("the peer is gone")
        if not read.parts.error and not read.error:
            try:
                for piece, prepared in zip(pieces, spans, strict=True):
                    self._operations.post(
                        read, ready.transport, prepared, piece.local_blocks, piece.remote_blocks
                    )
            except (TransferError, PeerError) as error:
                read.fail(str(error))
                self._operations.cancel(lambda other: other is read)
        if read.num_running == 0:
            self._end(read)

    def _end(self, read: Read) -> None:
        """A part is over; without an error it is here."""
        parts = read.parts
        parts.num_open -= 1
        parts.duration_s += read.duration_s
        parts.error = parts.error or read.error
        self._settle(parts)

    def _settle(self, parts: Parts) -> None:
        if parts.has_ended:
            del self._parts[parts.claim, parts.pair]
            self._ended.append(parts.to_end())

    def _stop(self, is_meant: Callable[[Parts], bool], reason: str) -> None:
        for link in self._links.values():
            for read in [read for read in link.waiting if is_meant(read.parts)]:
                link.waiting.remove(read)
                read.fail(reason)
                self._end(read)
        self._operations.cancel(lambda read: is_meant(read.parts))
        for parts in [parts for parts in self._parts.values() if is_meant(parts)]:
            parts.is_complete = True
            parts.error = parts.error or reason
            self._settle(parts)

    def _end_waiting(self, link: _Link, error: str) -> None:
        for read in link.waiting:
            read.fail(error)
            self._end(read)
        link.waiting.clear()

    # --- In the background ---------------------------------------------------------------------

    def _connect(self, link: _Link) -> None:
        try:
            ready = self._open(link)
        except Exception as error:
            # Whatever went wrong went wrong with this peer: its reads fail, the rank goes on.
            reason = _explain(error, link)
            with self._changed:
                self._end_waiting(link, reason)
                if not link.is_lost:
                    del self._links[link.key]  # The next read tries again.
            return
        with self._changed:
            if link.is_lost:
                ready.transport.disconnect(ready.peer)
                return
            link.ready = ready
            waiting, link.waiting = link.waiting, []
            jobs = [self._begin(link, ready, read) for read in waiting]
        for job in jobs:
            if job is not None:
                job()

    def _open(self, link: _Link) -> Ready:
        remote = link.card.layout
        sources = {source: link.cards[source].layout for source in link.key.sources}
        share = plan_shares(self._layout, sources).get(link.key.source, Share(range(0), ()))
        way = plan_way(self._layout, remote, share, converts_dtype=self._converts_dtype)
        if way.is_staged and self._staged is None:
            raise PlanError("the layouts differ in a way that needs a staging buffer")
        if way.is_staged:
            logger.log(
                logging.WARNING if way.loss else logging.INFO,
                "KV of %s is converted on receive: %s",
                link.key.producer.engine_id,
                way.loss or f"{remote.dtype} -> {self._layout.dtype}, without loss",
            )
        address = Address(link.key.producer.engine_id, link.card.epoch)
        transport, peer = choose_transport(self._transports, link.card.endpoints, address, order=self._order)
        try:
            ready = Ready(transport, peer, self._layout, remote, share, way)
            if share.layers and not way.is_staged:
                for shape in period_shapes(self._layout.block_tokens, remote.block_tokens):
                    ready.prepare_whole(shape)
            return ready
        except BaseException:
            transport.disconnect(peer)
            raise

    def _prepare_and_post(
        self, link: _Link, ready: Ready, read: Read, layers: tuple[str, ...], pieces: Sequence[Piece]
    ) -> None:
        spans: list[Spans] = []
        try:
            spans = [ready.prepare(piece.shape, layers) for piece in pieces]
        except Exception as error:  # The border of one read: whatever it is, its claim hears of it.
            read.fail(_explain(error, link))
        with self._changed:
            self._post(link, ready, read, pieces, spans)

    def _read_staged(self, link: _Link, ready: Ready, read: Read, layers: tuple[str, ...]) -> None:
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
                LinkWire(ready, read, self._operations),
            )
        except Exception as error:  # As above.
            read.fail(_explain(error, link))
        with self._changed:
            read.duration_s = time.monotonic() - started_at
            self._end(read)


def _names_of_group(layout: RankLayout, group: int) -> frozenset[str]:
    return frozenset(layer.name for layer in layout.layers if layer.group == group)


def _explain(error: Exception, link: _Link) -> str:
    expected = isinstance(error, TransferError | PeerError)
    engine_id = link.key.producer.engine_id
    logger.warning("cannot read from %s: %s", engine_id, error, exc_info=not expected)
    return str(error) or type(error).__name__
