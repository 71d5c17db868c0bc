"""One rank's ways to the memory of its peers' ranks, and the reads that go over them.

    read --no link--> CONNECTING (background thread)
    CONNECTING --connected, planned--> READY               waiting reads are posted
    CONNECTING --no way, or the layouts do not fit--> gone    waiting reads end with the reason

A claim's read may come in parts; they end together, exactly once, whatever happens to the link. Nothing here
blocks the engine's step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.connectors.pull.metadata import ReadBlocks, ReadEnd
from baton.core.errors import PeerError, TransferError
from baton.core.ids import Address, Pair
from baton.core.layout import RankLayout
from baton.protocol.handshake import RankCard
from baton.protocol.plan import plan_spans
from baton.transport import choose_transport
from baton.transport.base import OpId, PeerHandle, Prepared, Transport

logger = logging.getLogger(__name__)

RunInBackground = Callable[[Callable[[], None]], None]


@dataclass(slots=True, eq=False)
class _Parts:
    """What is known of one pair's read of one claim."""

    claim: int
    pair: Pair
    is_complete: bool = False  # No part will follow.
    num_open: int = 0
    error: str = ""  # Of the first part that failed.
    nbytes: int = 0
    duration_s: float = 0.0
    num_descriptors: int = 0
    transport: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """One part, from here on until it ends."""

    parts: _Parts
    local_blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Ready:
    transport: Transport
    peer: PeerHandle
    prepared: Prepared
    num_spans: int


@dataclass(slots=True, eq=False)
class _Link:
    producer: Address
    card: RankCard
    ready: _Ready | None = None
    is_lost: bool = False
    waiting: list[_Read] = field(default_factory=list)


class PeerLinks:
    """Calls may come from the engine's step and from the background thread."""

    def __init__(
        self,
        layout: RankLayout,
        transports: Mapping[str, Transport],
        order: Sequence[str],
        run_in_background: RunInBackground,
    ) -> None:
        self._layout = layout
        self._transports = transports
        self._order = order
        self._run_in_background = run_in_background
        self._lock = threading.Lock()
        self._cards: dict[Address, tuple[RankCard, ...]] = {}
        self._links: dict[tuple[Address, int], _Link] = {}  # By peer and its rank.
        self._running: dict[tuple[str, OpId], tuple[_Read, _Link]] = {}
        self._parts: dict[tuple[int, Pair], _Parts] = {}  # Whose end has not come.
        self._ended: list[ReadEnd] = []

    def meet(self, producer: Address, cards: tuple[RankCard, ...]) -> None:
        with self._lock:
            self._cards[producer] = cards

    def read(self, order: ReadBlocks) -> None:
        """Post this rank's part, now or when the peer is connected."""
        for pair in order.pairs:
            if pair.consumer_rank != self._layout.tp_rank:
                continue
            with self._lock:
                unconnected = self._read_pair(order, pair)
            if unconnected is not None:
                self._run_in_background(partial(self._connect, unconnected))

    def cancel(self, claim: int) -> None:
        with self._lock:
            for link in self._links.values():
                for read in [read for read in link.waiting if read.parts.claim == claim]:
                    link.waiting.remove(read)
                    self._end(read, "cancelled")
            for (name, op), (read, _) in self._running.items():
                if read.parts.claim == claim:
                    self._transports[name].cancel(op)
            for parts in [parts for (of, _), parts in self._parts.items() if of == claim]:
                parts.is_complete = True
                parts.error = parts.error or "cancelled"
                self._settle(parts)

    def lose(self, producer: Address) -> None:
        with self._lock:
            self._cards.pop(producer, None)
            for key in [key for key in self._links if key[0] == producer]:
                link = self._links.pop(key)
                link.is_lost = True
                self._end_waiting(link, "the peer is gone")
                if link.ready is not None:
                    link.ready.transport.disconnect(link.ready.peer)

    def take_ended(self) -> list[ReadEnd]:
        """Reads that have ended since, each once. Never blocks."""
        with self._lock:
            for name, transport in self._transports.items():
                for completion in transport.poll():
                    read, link = self._running.pop((name, completion.op))
                    assert link.ready is not None
                    parts = read.parts
                    parts.nbytes += completion.nbytes
                    parts.duration_s += completion.duration_s
                    parts.num_descriptors += link.ready.num_spans * len(read.local_blocks)
                    parts.transport = name
                    self._end(read, "" if completion.ok else completion.error or "failed")
            ended, self._ended = self._ended, []
            return ended

    @property
    def num_open(self) -> int:
        """Reads whose end has not been taken."""
        with self._lock:
            return len(self._parts) + len(self._ended)

    # --- With the lock held --------------------------------------------------------------------

    def _read_pair(self, order: ReadBlocks, pair: Pair) -> _Link | None:
        """Returns a link that has to be connected."""
        parts = self._parts.setdefault((order.claim, pair), _Parts(order.claim, pair))
        parts.is_complete |= order.is_last
        block_tokens = self._layout.block_tokens
        first, last = order.first_token, order.first_token + order.num_tokens
        if first % block_tokens or order.layers is not None:
            parts.error = "parts of blocks and of layers are not read yet"
        if parts.error or first == last:
            self._settle(parts)
            return None
        blocks = slice(first // block_tokens, -(-last // block_tokens))
        parts.num_open += 1
        return self._read(
            order.producer, _Read(parts, order.local_blocks[blocks], order.remote_blocks[blocks])
        )

    def _read(self, producer: Address, read: _Read) -> _Link | None:
        pair = read.parts.pair
        key = (producer, pair.producer_rank)
        link = self._links.get(key)
        if link is not None and link.ready is not None:
            self._post(link, link.ready, read)
            return None
        if link is not None:
            link.waiting.append(read)
            return None
        cards = self._cards.get(producer)
        if cards is None or not pair.producer_rank < len(cards):
            self._end(read, "the peer is not known")
            return None
        link = self._links[key] = _Link(producer, cards[pair.producer_rank], waiting=[read])
        return link

    def _post(self, link: _Link, ready: _Ready, read: _Read) -> None:
        try:
            op = ready.transport.post_read(ready.prepared, read.local_blocks, read.remote_blocks)
        except (TransferError, PeerError) as error:
            self._end(read, str(error))
            return
        self._running[ready.transport.name, op] = (read, link)

    def _end(self, read: _Read, error: str) -> None:
        """A part is over; without an error it is here."""
        parts = read.parts
        parts.num_open -= 1
        parts.error = parts.error or error
        self._settle(parts)

    def _settle(self, parts: _Parts) -> None:
        if parts.num_open or not parts.is_complete:
            return
        del self._parts[parts.claim, parts.pair]
        self._ended.append(
            ReadEnd(
                parts.claim,
                parts.pair,
                not parts.error,
                parts.nbytes,
                parts.duration_s,
                parts.num_descriptors,
                parts.transport,
                parts.error,
            )
        )

    def _end_waiting(self, link: _Link, error: str) -> None:
        for read in link.waiting:
            self._end(read, error)
        link.waiting.clear()

    # --- In the background ---------------------------------------------------------------------

    def _connect(self, link: _Link) -> None:
        try:
            ready = self._open(link)
        except Exception as error:
            # Whatever went wrong went wrong with this peer: its reads fail, the rank goes on.
            expected = isinstance(error, TransferError | PeerError)
            logger.warning("cannot read from %s: %s", link.producer.engine_id, error, exc_info=not expected)
            with self._lock:
                self._end_waiting(link, str(error) or type(error).__name__)
                if not link.is_lost:
                    del self._links[link.producer, link.card.tp_rank]  # The next read tries again.
            return
        with self._lock:
            if link.is_lost:
                ready.transport.disconnect(ready.peer)
                return
            link.ready = ready
            for read in link.waiting:
                self._post(link, ready, read)
            link.waiting.clear()

    def _open(self, link: _Link) -> _Ready:
        spans = plan_spans(self._layout, link.card.layout)
        address = Address(link.producer.engine_id, link.card.epoch)
        transport, peer = choose_transport(self._transports, link.card.endpoints, address, order=self._order)
        try:
            return _Ready(transport, peer, transport.prepare(peer, spans), len(spans))
        except BaseException:
            transport.disconnect(peer)
            raise
