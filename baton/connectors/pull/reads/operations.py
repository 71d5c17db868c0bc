"""Reads under way on all of a rank's transports: their parts, their operations, and their ends.

    claim, pair of ranks --> Parts --> Read (one order of the scheduler) --> operations of a transport

All reads of a pair's claim end together, once. Two callers look for the ends of operations:

    the engine's step        take_ended: polls, never blocks
    a background thread      wait: sleeps until one operation has ended

A transport hands a completion out once, to any caller. So while a background thread sleeps on a transport,
only this thread polls it and deals out what it finds; the step leaves that transport alone. All calls except
`wait` need the lock, `changed`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from baton.connectors.pull.metadata import ReadBlocks, ReadEnd
from baton.core.ids import Pair
from baton.core.layout import CopySpan, RankLayout
from baton.protocol.block_runs import Shape
from baton.protocol.conversion import Conversion
from baton.protocol.plan import Share, share_spans
from baton.transport.base.interface import Completion, OpId, PeerHandle, Prepared, Transport

LOOK_AGAIN_S = 0.2  # A waiting thread is woken earlier by what it waits for.
PREPARED_MAX = 2048
WHOLE_STATE: Final = Shape(0, 0, 0)  # Shape of the one block of a state, which has no tokens.


class Spans(NamedTuple):
    """Spans as a transport has prepared them."""

    prepared: Prepared
    num_spans: int


class Ready:
    """A peer's rank, connected and planned, with the spans that are prepared for it.

    Spans are prepared once for each shape of a run and each set of layers: a handful for whole blocks, more
    for edges of parts and single layers. The latter are forgotten when there are more than PREPARED_MAX.
    """

    def __init__(
        self,
        transport: Transport,
        peer: PeerHandle,
        local: RankLayout,
        remote: RankLayout,
        share: Share,
        way: Conversion,
        states: Mapping[str, tuple[CopySpan, ...]] | None = None,
    ) -> None:
        """`states`: copies of the states that are read from this rank, by layer."""
        self.transport = transport
        self.peer = peer
        self.share = share
        self.way = way
        self.states = states or {}
        self._local = local
        self._remote = remote
        self._lock = threading.Lock()
        # Spans of all layers, for the shapes that every long prompt has.
        self._whole: dict[Shape, Spans] = {}
        self._others: dict[Hashable, Spans] = {}

    def find(self, shape: Shape, layers: tuple[str, ...]) -> Spans | None:
        """None: they have to be prepared. Takes no time."""
        if layers == tuple(self.share) and (spans := self._whole.get(shape)) is not None:
            return spans
        return self._others.get((shape, layers))

    def prepare_whole(self, shape: Shape) -> None:
        self._whole[shape] = self._prepare(self._spans_of(shape, tuple(self.share)))

    def prepare(self, shape: Shape, layers: tuple[str, ...]) -> Spans:
        """Takes time: never on a step."""
        found = self.find(shape, layers)
        return found or self.prepare_other((shape, layers), lambda: self._spans_of(shape, layers))

    def prepare_other(self, key: Hashable, make: Callable[[], Sequence[CopySpan]]) -> Spans:
        """Takes time: never on a step. Two threads may prepare the same; either result will do."""
        found = self._others.get(key)
        if found is None:
            found = self._prepare(make())
            with self._lock:
                if len(self._others) == PREPARED_MAX:
                    self._others.clear()
                self._others[key] = found
        return found

    def _prepare(self, spans: Sequence[CopySpan]) -> Spans:
        return Spans(self.transport.prepare(self.peer, spans), len(spans))

    def _spans_of(self, shape: Shape, layers: tuple[str, ...]) -> Sequence[CopySpan]:
        if shape == WHOLE_STATE:
            return [span for layer in layers for span in self.states[layer]]
        return share_spans(self._local, self._remote, {name: self.share[name] for name in layers}, shape)


@dataclass(slots=True, eq=False)
class Parts:
    """One pair's read of one claim."""

    claim: int
    pair: Pair
    is_complete: bool = False  # No part will follow.
    num_open: int = 0
    error: str | None = None  # Error of the first part that failed. None: none has.
    nbytes: int = 0
    duration_s: float = 0.0
    num_descriptors: int = 0
    transport: str = ""

    @property
    def has_ended(self) -> bool:
        return self.is_complete and self.num_open == 0

    def fail(self, error: str) -> None:
        """The first error stays."""
        if self.error is None:
            self.error = error

    def to_end(self) -> ReadEnd:
        return ReadEnd(
            self.claim,
            self.pair,
            self.error is None,
            self.nbytes,
            self.duration_s,
            self.num_descriptors,
            self.transport,
            self.error or "",
        )


@dataclass(slots=True, eq=False)
class Read:
    """One part, from its order until it ends."""

    parts: Parts
    order: ReadBlocks
    is_staged: bool = False
    num_running: int = 0  # Operations.
    duration_s: float = 0.0
    error: str | None = None

    @property
    def stopped_by(self) -> str | None:
        """Error of the read, or of its claim. None: the read goes on."""
        return self.error if self.error is not None else self.parts.error

    def fail(self, error: str) -> None:
        """The first error stays."""
        if self.error is None:
            self.error = error


class Operations:
    """All reads of a rank that have begun and not ended. `changed` is their lock."""

    def __init__(self, transports: Mapping[str, Transport]) -> None:
        self.changed = threading.Condition()
        self.parts: dict[tuple[int, Pair], Parts] = {}  # Parts by claim and pair, until they have ended.
        self.ended: list[ReadEnd] = []  # Not taken yet.
        self._transports = transports
        # Read and number of descriptors of each operation.
        self._running: dict[tuple[str, OpId], tuple[Read, int]] = {}
        self._watched: set[str] = set()  # Transports that a background thread sleeps on.

    def post(
        self,
        read: Read,
        transport: Transport,
        spans: Spans,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
    ) -> OpId:
        """Raises TransferError or PeerError if nothing was posted."""
        op = transport.post_read(spans.prepared, local_blocks, remote_blocks)
        self._running[transport.name, op] = (read, spans.num_spans * len(local_blocks))
        read.num_running += 1
        return op

    def parts_of(self, claim: int, pair: Pair) -> Parts:
        """Parts of a claim and pair. They are made at the first call."""
        return self.parts.setdefault((claim, pair), Parts(claim, pair))

    def end(self, read: Read) -> None:
        """A part is over; without an error its tokens are here."""
        parts = read.parts
        parts.num_open -= 1
        parts.duration_s += read.duration_s
        if read.error is not None:
            parts.fail(read.error)
        self.settle(parts)

    def fail(self, read: Read, error: str) -> None:
        """A part is over, with an error."""
        read.fail(error)
        self.end(read)

    def settle(self, parts: Parts) -> None:
        """Report the end of these parts if all of them are over."""
        if parts.has_ended:
            del self.parts[parts.claim, parts.pair]
            self.ended.append(parts.to_end())

    def take_ended(self) -> list[ReadEnd]:
        """Reads that have ended since the last call. Never blocks."""
        self.collect()
        ended, self.ended = self.ended, []
        return ended

    @property
    def num_running(self) -> int:
        """Operations that have been posted, and whose end has not been seen."""
        return len(self._running)

    def collect(self) -> None:
        for name, transport in self._transports.items():
            if name not in self._watched:
                self._take(name, transport.poll())

    def cancel(self, is_meant: Callable[[Read], bool]) -> None:
        for (name, op), (read, _) in list(self._running.items()):
            if is_meant(read):
                self._transports[name].cancel(op)

    def cancel_one(self, transport: Transport, op: OpId) -> None:
        if (transport.name, op) in self._running:
            transport.cancel(op)

    def wait(self, transport: Transport, op: OpId) -> None:
        """Returns when the operation has ended, well or not. Call it without the lock."""
        name = transport.name
        while True:
            with self.changed:
                while (name, op) in self._running and name in self._watched:
                    self.changed.wait(LOOK_AGAIN_S)
                if (name, op) not in self._running:
                    return
                self._watched.add(name)
            try:
                transport.wait_completion(LOOK_AGAIN_S)
            finally:
                with self.changed:
                    self._watched.discard(name)
                    self._take(name, transport.poll())
                    self.changed.notify_all()  # Another thread may sleep on the transport now.

    def _take(self, name: str, completions: Sequence[Completion]) -> None:
        for completion in completions:
            read, num_descriptors = self._running.pop((name, completion.op))
            read.num_running -= 1
            read.duration_s = max(read.duration_s, completion.duration_s)
            if not completion.ok:
                read.fail(completion.error or "failed")
            parts = read.parts
            parts.transport = f"{name}:{completion.way}" if completion.way else name
            parts.nbytes += completion.nbytes
            parts.num_descriptors += num_descriptors
            if read.is_staged:
                self.changed.notify_all()
            elif read.num_running == 0:
                self.end(read)
