"""What an open link has prepared, and its use by one staged read.

Spans are prepared once for each shape of a run and each set of layers: a handful for whole blocks, more as
edges of parts and single layers come by. The latter are forgotten when there are too many.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from baton.connectors.pull.reads.operations import Operations, Spans
from baton.connectors.pull.reads.parts import Read
from baton.core.errors import TransferError
from baton.core.layout import CopySpan, RankLayout
from baton.protocol.conversion import Conversion
from baton.protocol.plan import Share, share_spans
from baton.protocol.token_spans import Shape
from baton.transport.base import OpId, PeerHandle, Transport

PREPARED_MAX = 2048


class Ready:
    """A peer's rank, connected and planned."""

    def __init__(
        self,
        transport: Transport,
        peer: PeerHandle,
        local: RankLayout,
        remote: RankLayout,
        share: Share,
        way: Conversion,
    ) -> None:
        self.transport = transport
        self.peer = peer
        self.share = share
        self.way = way
        self._local = local
        self._remote = remote
        self._lock = threading.Lock()
        self._whole: dict[Shape, Spans] = {}  # Of all layers, and of the shapes that every long prompt has.
        self._others: dict[Hashable, Spans] = {}

    def find(self, shape: Shape, layers: tuple[str, ...]) -> Spans | None:
        """None: they have to be prepared. Takes no time."""
        if layers == self.share.layers and (spans := self._whole.get(shape)) is not None:
            return spans
        return self._others.get((shape, layers))

    def prepare_whole(self, shape: Shape) -> None:
        self._whole[shape] = self._prepare(self._spans_of(shape, self.share.layers))

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
        return share_spans(self._local, self._remote, self.share, shape, layers)


@dataclass(frozen=True, slots=True)
class StagedOrder:
    """One part of a claim, as far as one pair of ranks is concerned."""

    peer: Hashable  # Whose reads take turns at the staging buffer.
    remote: RankLayout
    share: Share  # Of the layers that this part moves.
    first_token: int
    num_tokens: int
    local_table: Sequence[int]
    remote_table: Sequence[int]

    @property
    def last_token(self) -> int:
        return self.first_token + self.num_tokens


class LinkWire:
    """One staged read's way over an open link. Used by one background thread."""

    def __init__(self, ready: Ready, read: Read, operations: Operations) -> None:
        self._ready = ready
        self._read = read
        self._operations = operations

    def prepare(self, key: Hashable, make_spans: Callable[[], Sequence[CopySpan]]) -> Spans:
        return self._ready.prepare_other(key, make_spans)

    def post(self, spans: Spans, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> OpId:
        with self._operations.changed:
            self._raise_if_failed()
            return self._operations.post(
                self._read, self._ready.transport, spans, local_blocks, remote_blocks
            )

    def wait(self, op: OpId) -> None:
        self._operations.wait(self._ready.transport, op)
        with self._operations.changed:
            self._raise_if_failed()

    def abandon(self, op: OpId) -> None:
        with self._operations.changed:
            self._operations.cancel_one(self._ready.transport, op)
        self._operations.wait(self._ready.transport, op)

    def is_stopped(self) -> bool:
        return self._read.stopped_by is not None

    def _raise_if_failed(self) -> None:
        if (reason := self._read.stopped_by) is not None:
            raise TransferError(reason)
