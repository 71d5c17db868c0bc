"""Links of one rank to the memory of its peers' ranks, and the reads over them.

    read --no link--> CONNECTING (background thread)
    CONNECTING --connected, planned--> READY               waiting reads are begun (`link`)
    CONNECTING --no transport, or the layouts differ--> gone    waiting reads end with the reason
    READY --the transport has lost the peer--> gone           counted; the next read connects anew

A claim's read may come in parts; they end together, exactly once, and only when nothing of them touches
memory any more. Nothing here blocks the engine's step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from baton.connectors.pull.metadata import LostLink, ReadBlocks, ReadEnd
from baton.connectors.pull.reads.link import Attempts, Job, Link, LinkKey, LinkOpener, ReadPosting
from baton.connectors.pull.reads.operations import Operations, Parts, Read, Ready
from baton.core.ids import Address, Pair
from baton.core.layout import RankLayout
from baton.protocol.handshake import RankCard
from baton.transport.base.interface import Transport

if TYPE_CHECKING:
    from baton.connectors.pull.reads.staged import StagedReader

logger = logging.getLogger(__name__)

RunInBackground = Callable[[Callable[[], None]], None]


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
        """A peer that needs a staged reader cannot be read if `staged` is None."""
        self._clock = clock
        self._rank = layout.pp_rank * layout.tp_size + layout.tp_rank
        self._run_in_background = run_in_background
        self._operations = Operations(transports)
        self._opener = LinkOpener(layout, transports, order, converts_dtype, can_stage=staged is not None)
        self._posting = ReadPosting(layout, self._operations, staged)
        self._changed = self._operations.changed  # The lock of everything here.
        self._cards: dict[Address, tuple[RankCard, ...]] = {}
        self._links: dict[LinkKey, Link] = {}
        self._attempts: dict[LinkKey, Attempts] = {}  # Attempts of links that have failed.
        self._num_lost = 0
        self.lost: list[LostLink] = []  # Links that were lost since the last `take_lost`.

    def meet(self, producer: Address, cards: tuple[RankCard, ...]) -> None:
        with self._changed:
            self._cards[producer] = cards

    def known_cards(self) -> dict[Address, tuple[RankCard, ...]]:
        with self._changed:
            return dict(self._cards)

    def read(self, order: ReadBlocks) -> None:
        """Begin this rank's part, now or when the peer is connected."""
        pairs = [pair for pair in order.pairs if pair.consumer_rank == self._rank]
        sources = tuple(pair.producer_rank for pair in pairs)
        for pair in pairs:
            with self._changed:
                job = self._read_pair(order, pair, LinkKey(order.producer, pair.producer_rank, sources))
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
        """End the pairs of an order that a fault of ours kept from being begun, once nothing of them runs."""
        with self._changed:
            for pair in order.pairs:
                if pair.consumer_rank == self._rank:
                    self._operations.parts_of(order.claim, pair)
            self._stop(lambda parts: parts.claim == order.claim, reason)

    def take_ended(self) -> list[ReadEnd]:
        """Reads that have ended since the last call. Never blocks."""
        if not (self._links or self._operations.parts or self._operations.ended):
            return []  # An engine that reads from no peer returns here in each step.
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
    def has_news(self) -> bool:
        """Whether a read is open, or a link was lost. Never blocks."""
        if not (self._links or self._operations.parts or self._operations.ended or self.lost):
            return False  # An engine that reads from no peer returns here in each step.
        with self._changed:
            self._drop_lost_links()
            return bool(self._operations.parts or self._operations.ended or self.lost)

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

    def _read_pair(self, order: ReadBlocks, pair: Pair, key: LinkKey) -> Job | None:
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
            return self._posting.begin(link, link.ready, read)
        if link is not None:
            link.waiting.append(read)
            return None
        cards = self._cards.get(key.producer)
        if cards is None or not max(key.sources) < len(cards):
            self._operations.fail(read, "the peer is not known")
            return None
        attempts = self._attempts.get(key)
        if attempts is not None and (delay_s := attempts.next_at - self._clock()) > 0:
            self._operations.fail(
                read,
                f"{attempts.num_failed} connections to {key.producer.engine_id} failed in a row; "
                f"the next attempt is in {delay_s:.2f} s",
            )
            return None
        link = self._links[key] = Link(key, cards, waiting=[read])
        return Job(partial(self._connect, link), link)

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
            self.lost.append(LostLink(link.engine_id, self._rank, self._num_lost))
            logger.log(
                logging.WARNING if attempts.is_news else logging.DEBUG,
                "lost the link to %s, rank %d, by %s (%d in a row): %s",
                link.engine_id,
                key.source,
                ready.transport.name,
                attempts.num_failed,
                ready.peer.lost,
            )
            try:
                self._run_in_background(partial(ready.transport.disconnect, ready.peer))
            except RuntimeError as error:  # No thread can be started. The transport's close ends the rest.
                logger.warning("cannot disconnect from %s: %s", link.engine_id, error)

    def _give_up(self, job: Job, reason: str) -> None:
        """The job will not be run."""
        logger.warning("cannot read from %s: %s", job.link.engine_id, reason)
        if job.read is not None:
            self._operations.fail(job.read, reason)
        else:
            self._end_waiting(job.link, reason)
            if not job.link.is_lost:
                del self._links[job.link.key]  # The next read tries again.

    def _stop(self, is_meant: Callable[[Parts], bool], reason: str) -> None:
        for link in self._links.values():
            for read in [read for read in link.waiting if is_meant(read.parts)]:
                link.waiting.remove(read)
                self._operations.fail(read, reason)
        self._operations.cancel(lambda read: is_meant(read.parts))
        for parts in [parts for parts in self._operations.parts.values() if is_meant(parts)]:
            parts.is_complete = True
            parts.fail(reason)
            self._operations.settle(parts)

    def _end_waiting(self, link: Link, error: str) -> None:
        for read in link.waiting:
            self._operations.fail(read, error)
        link.waiting.clear()

    # --- In the background ---------------------------------------------------------------------

    def _connect(self, link: Link) -> None:
        try:
            ready = self._opener.open(link)
        except Exception as error:
            # Whatever the error is, it concerns this peer: its reads fail, the rank goes on.
            with self._changed:
                attempts = self._attempts.setdefault(link.key, Attempts())
                attempts.failed(self._clock())
                self._end_waiting(link, link.explain(error, is_news=attempts.is_news))
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

    def _begin_contained(self, link: Link, ready: Ready, read: Read) -> Job | None:
        """Begins one read. A fault of ours fails only this read of those that wait. Needs the lock."""
        try:
            return self._posting.begin(link, ready, read)
        except Exception as error:
            self._operations.fail(read, link.explain(error))
            return None
