"""Links of one rank to the memory of its peers' ranks, and the reads over them.

    read --no link--> CONNECTING (background thread)
    CONNECTING --connected, planned--> READY               waiting reads are begun
    CONNECTING --no transport, or the layouts differ--> gone    waiting reads end with the reason
    READY --the transport has lost the peer--> gone           counted; the next read connects anew

The first loss or failure is answered with a new attempt at once. After several in a row, reads fail without
an attempt until a delay has passed, which doubles up to RETRY_MAX_S (`Attempts`).

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
from typing import TYPE_CHECKING, NamedTuple

from baton.connectors.pull.metadata import LostLink, ReadBlocks, ReadEnd
from baton.connectors.pull.reads.operations import Operations, Parts, Read, Ready, Spans
from baton.core.errors import PeerError, TransferError
from baton.core.ids import Address, Pair
from baton.core.layout import RankLayout
from baton.protocol.block_runs import BlockRun, period_shapes, plan_block_runs
from baton.protocol.conversion import plan_conversion
from baton.protocol.handshake import RankCard
from baton.protocol.plan import PlanError, Share, plan_shares
from baton.protocol.token_spans import Shape
from baton.transport import choose_transport
from baton.transport.base import Transport

if TYPE_CHECKING:
    from baton.connectors.pull.reads.staged import StagedReader

logger = logging.getLogger(__name__)

RunInBackground = Callable[[Callable[[], None]], None]


class _LinkKey(NamedTuple):
    producer: Address
    source: int  # The producer's rank.
    sources: tuple[int, ...]  # All that we read from for a claim: the shares depend on them.


RETRY_FIRST_S = 0.25
RETRY_MAX_S = 5.0  # So an engine that is back on the network is read from within that time.
STEADY_S = 10.0  # A link that lived longer is no sign of a peer that is dead or a network that fails.


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
class _Link:
    key: _LinkKey
    cards: tuple[RankCard, ...]  # Of all the producer's ranks.
    ready: Ready | None = None
    connected_at: float = 0.0
    is_lost: bool = False
    waiting: list[Read] = field(default_factory=list)

    @property
    def card(self) -> RankCard:
        return self.cards[self.key.source]


@dataclass(frozen=True, slots=True)
class _Job:
    """Work for a background thread: connects `link`, or moves `read` over it."""

    run: Callable[[], None]
    link: _Link
    read: Read | None = None

    def __call__(self) -> None:
        self.run()


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without a staged reader, peers that need one are peers that cannot be read."""
        self._clock = clock
        self._layout = layout
        self._rank = layout.pp_rank * layout.tp_size + layout.tp_rank
        self._transports = transports
        self._order = order
        self._run_in_background = run_in_background
        self._staged = staged
        self._converts_dtype = converts_dtype
        self._operations = Operations(transports)
        self._changed = self._operations.changed  # The lock of everything here.
        self._cards: dict[Address, tuple[RankCard, ...]] = {}
        self._links: dict[_LinkKey, _Link] = {}
        self._attempts: dict[_LinkKey, Attempts] = {}  # Of links that have failed.
        self._num_lost = 0
        self.lost: list[LostLink] = []  # Since the last `take_lost`.

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
            if job is None:
                continue
            try:
                self._run_in_background(job)
            except RuntimeError as error:  # No thread can be started.
                with self._changed:
                    self._give_up(job, str(error))

    def cancel(self, claim: int) -> None:
        with self._changed:
            self._stop(lambda parts: parts.claim == claim, "cancelled")

    def lose(self, producer: Address) -> None:
        with self._changed:
            self._cards.pop(producer, None)
            for key in [key for key in self._attempts if key.producer == producer]:
                del self._attempts[key]
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
                    self._operations.parts_of(order.claim, pair)
            self._stop(lambda parts: parts.claim == order.claim, reason)

    def take_ended(self) -> list[ReadEnd]:
        """Reads that have ended since the last call. Never blocks."""
        with self._changed:
            ended = self._operations.take_ended()
            self._drop_lost_links()
            return ended

    def take_lost(self) -> list[LostLink]:
        """Links that were lost since the last call. Never blocks."""
        with self._changed:
            lost, self.lost = self.lost, []
            return lost

    @property
    def num_moving(self) -> int:
        """Operations that move bytes at this moment. Never blocks."""
        with self._changed:
            self._operations.collect()
            return self._operations.num_running

    def is_open(self, claim: int) -> bool:
        """Whether ends of this claim are still to be taken."""
        with self._changed:
            return any(of_claim == claim for of_claim, _ in self._operations.parts) or any(
                end.claim == claim for end in self._operations.ended
            )

    @property
    def num_open(self) -> int:
        """Reads whose end has not been taken."""
        with self._changed:
            return len(self._operations.parts) + len(self._operations.ended)

    def close(self) -> None:
        """End everything soon, so that no background thread has anything to wait for."""
        with self._changed:
            self._stop(lambda parts: True, "the connector is shut down")

    # --- With the lock held --------------------------------------------------------------------

    def _read_pair(self, order: ReadBlocks, pair: Pair, key: _LinkKey) -> _Job | None:
        """Returns what is left to do in the background."""
        parts = self._operations.parts_of(order.claim, pair)
        parts.is_complete |= order.is_last
        if parts.error is not None or order.num_tokens == 0:
            self._operations.settle(parts)
            return None
        parts.num_open += 1
        read = Read(parts, order)
        self._drop_lost_links()
        link = self._links.get(key)
        if link is not None and link.ready is not None:
            return self._begin(link, link.ready, read)
        if link is not None:
            link.waiting.append(read)
            return None
        cards = self._cards.get(key.producer)
        if cards is None or not max(key.sources) < len(cards):
            read.fail("the peer is not known")
            self._operations.end(read)
            return None
        attempts = self._attempts.get(key)
        if attempts is not None and (delay_s := attempts.next_at - self._clock()) > 0:
            read.fail(
                f"{attempts.num_failed} connections to {key.producer.engine_id} failed in a row; "
                f"the next attempt is in {delay_s:.2f} s"
            )
            self._operations.end(read)
            return None
        link = self._links[key] = _Link(key, cards, waiting=[read])
        return _Job(partial(self._connect, link), link)

    def _drop_lost_links(self) -> None:
        """Forget links whose peer the transport has lost, so that the next read connects anew."""
        now = self._clock()
        for key, link in list(self._links.items()):
            ready = link.ready
            if ready is None or ready.peer.lost is None:
                continue
            del self._links[key]
            link.is_lost = True
            attempts = self._attempts.setdefault(key, Attempts())
            attempts.lost(link.connected_at, now)
            self._num_lost += 1
            self.lost.append(LostLink(key.producer.engine_id, self._rank, self._num_lost))
            logger.log(
                logging.WARNING if attempts.is_news else logging.DEBUG,
                "lost the link to %s, rank %d, by %s (%d in a row): %s",
                key.producer.engine_id,
                key.source,
                ready.transport.name,
                attempts.num_failed,
                ready.peer.lost,
            )
            try:
                self._run_in_background(partial(ready.transport.disconnect, ready.peer))
            except RuntimeError as error:  # No thread can be started. The transport's close ends the rest.
                logger.warning("cannot disconnect from %s: %s", key.producer.engine_id, error)

    def _give_up(self, job: _Job, reason: str) -> None:
        """The job will not be run."""
        logger.warning("cannot read from %s: %s", job.link.key.producer.engine_id, reason)
        if job.read is not None:
            job.read.fail(reason)
            self._operations.end(job.read)
        else:
            self._end_waiting(job.link, reason)
            if not job.link.is_lost:
                del self._links[job.link.key]  # The next read tries again.

    def _begin(self, link: _Link, ready: Ready, read: Read) -> _Job | None:
        """Returns what is left to do in the background."""
        order, layers = read.order, self._layers_of(link, ready.share, read.order)
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
            read.fail(_words(error))
            self._operations.end(read)
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
        return _Job(partial(self._prepare_and_post, link, ready, read, layers, pieces), link, read)

    def _begin_staged(self, link: _Link, ready: Ready, read: Read, layers: tuple[str, ...]) -> _Job | None:
        if self._staged is None or not ready.way.can_be_staged:
            read.fail("a part of a block cannot be read from caches that are packed like this")
            self._operations.end(read)
            return None
        read.is_staged = True
        return _Job(partial(self._read_staged, link, ready, read, layers), link, read)

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
        self, link: _Link, ready: Ready, read: Read, pieces: Sequence[BlockRun], spans: Sequence[Spans]
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
                read.fail(_words(error))
                self._operations.cancel(lambda other: other is read)
        if read.num_running == 0:
            self._operations.end(read)

    def _stop(self, is_meant: Callable[[Parts], bool], reason: str) -> None:
        for link in self._links.values():
            for read in [read for read in link.waiting if is_meant(read.parts)]:
                link.waiting.remove(read)
                read.fail(reason)
                self._operations.end(read)
        self._operations.cancel(lambda read: is_meant(read.parts))
        for parts in [parts for parts in self._operations.parts.values() if is_meant(parts)]:
            parts.is_complete = True
            parts.fail(reason)
            self._operations.settle(parts)

    def _end_waiting(self, link: _Link, error: str) -> None:
        for read in link.waiting:
            read.fail(error)
            self._operations.end(read)
        link.waiting.clear()

    # --- In the background ---------------------------------------------------------------------

    def _connect(self, link: _Link) -> None:
        try:
            ready = self._open(link)
        except Exception as error:
            # Whatever went wrong went wrong with this peer: its reads fail, the rank goes on.
            with self._changed:
                attempts = self._attempts.setdefault(link.key, Attempts())
                attempts.failed(self._clock())
                self._end_waiting(link, _explain(error, link, is_news=attempts.is_news))
                if link.is_lost:
                    del self._attempts[link.key]
                else:
                    del self._links[link.key]
            return
        with self._changed:
            if link.is_lost:
                ready.transport.disconnect(ready.peer)
                return
            link.ready = ready
            link.connected_at = self._clock()
            waiting, link.waiting = link.waiting, []
            jobs = [self._begin_contained(link, ready, read) for read in waiting]
        for job in jobs:
            if job is not None:
                job()

    def _begin_contained(self, link: _Link, ready: Ready, read: Read) -> _Job | None:
        """With the lock held. A fault of ours costs this read: the others of the link wait for it as well."""
        try:
            return self._begin(link, ready, read)
        except Exception as error:
            read.fail(_explain(error, link))
            self._operations.end(read)
            return None

    def _open(self, link: _Link) -> Ready:
        remote = link.card.layout
        sources = {source: link.cards[source].layout for source in link.key.sources}
        share = plan_shares(self._layout, sources).get(link.key.source, Share(range(0), ()))
        way = plan_conversion(self._layout, remote, share, converts_dtype=self._converts_dtype)
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
        self, link: _Link, ready: Ready, read: Read, layers: tuple[str, ...], pieces: Sequence[BlockRun]
    ) -> None:
        spans: list[Spans] = []
        try:
            spans = [ready.prepare(piece.shape, layers) for piece in pieces]
        except Exception as error:  # The border of one read: whatever it is, its claim hears of it.
            read.fail(_explain(error, link))
        with self._changed:
            self._post(link, ready, read, pieces, spans)

    def _read_staged(self, link: _Link, ready: Ready, read: Read, layers: tuple[str, ...]) -> None:
        # Here, since it imports torch, which only a rank with a staged reader has loaded.
        from baton.connectors.pull.reads.staged import LinkWire, StagedOrder

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
            self._operations.end(read)


def _names_of_group(layout: RankLayout, group: int) -> frozenset[str]:
    return frozenset(layer.name for layer in layout.layers if layer.group == group)


def _explain(error: Exception, link: _Link, *, is_news: bool = True) -> str:
    expected = isinstance(error, TransferError | PeerError)
    engine_id = link.key.producer.engine_id
    level = logging.WARNING if is_news or not expected else logging.DEBUG
    logger.log(level, "cannot read from %s: %s", engine_id, error, exc_info=not expected)
    return _words(error)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
