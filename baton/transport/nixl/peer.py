"""The reader's side of NIXL: one peer with one agent, and one thread that does all its reads.

    queue of readings --a batch of each in turn--> post --> poll until done --> identity page right? --> end

The thread sleeps while there is no read, and otherwise polls with growing pauses, because NIXL does not
notify when a read is done. A read ends ok only if the owner's identity page, read *after* its last byte, is
right. On any error the agent is destroyed first; `nixl_agent.py` explains why nothing less is enough.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from baton.core.errors import PeerError, TransferError
from baton.core.ids import Address
from baton.core.layout import Region
from baton.transport.base.completions import CompletionQueue
from baton.transport.base.identity_page import IDENTITY_BYTES
from baton.transport.base.interface import OpId
from baton.transport.base.iovec import Scratch
from baton.transport.base.peers import ActivePeer, Reading
from baton.transport.base.spans import Int64s, SpanTable
from baton.transport.base.threads import join_all, start_owned_thread
from baton.transport.nixl.agent import (
    DescriptorList,
    Int32s,
    NixlAgent,
    Request,
    Strided,
    memory_kind,
)

BATCH_BYTES_MAX = 8 << 20  # Bounds the delay of a cancel, because NIXL's own cancel is unreliable.
BATCH_PIECES_MAX = 4096  # About 10 ms with 2 KiB each.
REQUESTS_MAX = 2  # One in transfer, one waiting.
STALL_S = 10.0  # A batch that takes longer never ends.
CANCEL_S = 1.0  # The same for a cancelled batch.
PROVE_TIMEOUT_S = 5.0
POLL_MIN_S, POLL_MAX_S = 20e-6, 500e-6
CLOSE_TIMEOUT_S = 10.0
PIECES_MAX = 2**31 - 1  # NIXL numbers them with 32 bits.


@dataclass(frozen=True)
class PreparedGroup:
    """Spans between one kind of memory here and one kind there, as NIXL's numbered blocks ("pieces").

    pieces:  | span 0: block 0, block 1, ... | span 1: block 0, ...     on both sides, by each side's count
    """

    local: DescriptorList
    remote: DescriptorList
    local_count: int
    remote_count: int
    span_bytes: Int64s

    def batches(self, local_blocks: Int64s, remote_blocks: Int64s) -> Iterator["Batch"]:
        span = np.arange(len(self.span_bytes), dtype=np.int64)[:, None]
        local = (span * self.local_count + local_blocks).ravel().astype(np.int32)
        remote = (span * self.remote_count + remote_blocks).ravel().astype(np.int32)
        ends = np.cumsum(np.repeat(self.span_bytes, len(local_blocks)))
        start, done = 0, 0
        while start < len(local):
            stop = int(np.searchsorted(ends, done + BATCH_BYTES_MAX, side="right"))
            stop = min(max(stop, start + 1), start + BATCH_PIECES_MAX)  # A piece cannot be divided.
            nbytes = int(ends[stop - 1]) - done
            yield Batch(self.local, local[start:stop], self.remote, remote[start:stop], nbytes)
            start, done = stop, done + nbytes


@dataclass(frozen=True, slots=True)
class Batch:
    """The blocks of one request."""

    local: DescriptorList
    local_pieces: Int32s
    remote: DescriptorList
    remote_pieces: Int32s
    nbytes: int


@dataclass(frozen=True, eq=False)
class _Running:
    request: Request
    reading: Reading[Batch]
    nbytes: int
    posted_at: float

    def is_hopeless(self, now: float) -> bool:
        cancelled_at = self.reading.cancelled_at
        return now > self.posted_at + STALL_S or (cancelled_at is not None and now > cancelled_at + CANCEL_S)


@dataclass(slots=True)
class NixlCounters:
    """Metrics read these from any thread."""

    read_bytes: int = 0
    requests: int = 0
    pieces: int = 0  # NIXL's number of descriptors, after merging adjacent ones.
    transfer_s: float = 0.0  # Transfer time by NIXL's own telemetry.


@dataclass(frozen=True)
class IdentityReader:
    """Reads the owner's identity page through NIXL, into memory registered with the agent."""

    agent: NixlAgent
    scratch: Scratch
    local: DescriptorList
    remote: DescriptorList

    @classmethod
    def of(cls, agent: NixlAgent, remote_agent: str, address: int) -> "IdentityReader":
        scratch = Scratch.of(IDENTITY_BYTES)
        agent.register([Region(scratch.address, IDENTITY_BYTES)])
        ours = Strided(scratch.address, IDENTITY_BYTES, IDENTITY_BYTES, 1, 0)
        theirs = Strided(address, IDENTITY_BYTES, IDENTITY_BYTES, 1, 0)
        return cls(
            agent, scratch, agent.prepare(None, "cpu", [ours]), agent.prepare(remote_agent, "cpu", [theirs])
        )

    def read(self, timeout_s: float) -> bytes:
        self.scratch.clear()
        first = np.zeros(1, dtype=np.int32)
        request = self.agent.post_read(self.local, first, self.remote, first)
        deadline = time.monotonic() + timeout_s
        pause_s = POLL_MIN_S
        while not self.agent.is_done(request):
            if time.monotonic() > deadline:
                raise TransferError(f"the owner's identity page did not arrive within {timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, POLL_MAX_S)
        self.agent.release(request)
        return self.scratch.read()


class NixlPeer(ActivePeer):
    def __init__(
        self,
        address: Address,
        regions: Sequence[Region],
        agent: NixlAgent,
        remote_agent: str,
        identity: IdentityReader,
        expected_identity: bytes,
        completions: CompletionQueue,
        counters: NixlCounters,
    ) -> None:
        """Takes over the agent. Destroys it and raises PeerError if the owner is not the expected one."""
        self.address = address
        self.regions = tuple(regions)
        self.lost: str | None = None
        self._agent = agent
        self._remote_agent = remote_agent
        self._identity = identity
        self._expected_identity = expected_identity
        self._completions = completions
        self._counters = counters
        self._agent_lock = threading.Lock()  # Never held together with the condition.
        self._changed = threading.Condition()
        self._queue: deque[Reading[Batch]] = deque()
        self._by_op: dict[OpId, Reading[Batch]] = {}
        self._running: list[_Running] = []  # Used by the thread only.
        self._pause_s = POLL_MIN_S
        try:
            if identity.read(PROVE_TIMEOUT_S) != expected_identity:
                raise PeerError(f"the process that answers is not {address.engine_id}: its nonce is wrong")
        except BaseException:
            agent.destroy()
            raise
        self._thread = start_owned_thread("baton-nixl-read", self._run, on_death=self._die)

    def prepare(self, table: SpanTable, local_regions: Sequence[Region]) -> list[PreparedGroup]:
        groups: dict[tuple[str, str], list[int]] = {}
        for index, span in enumerate(table.merged):
            kinds = (
                memory_kind(local_regions[span.local_region])[0],
                memory_kind(self.regions[span.remote_region])[0],
            )
            groups.setdefault(kinds, []).append(index)
        with self._agent_lock:
            if self._agent.is_destroyed:
                raise TransferError(f"cannot read from {self.address.engine_id}: {self.lost}")
            return [
                self._prepare_group(table, local_regions, kinds, indices) for kinds, indices in groups.items()
            ]

    def _prepare_group(
        self, table: SpanTable, local_regions: Sequence[Region], kinds: tuple[str, str], indices: list[int]
    ) -> PreparedGroup:
        spans = [table.merged[index] for index in indices]
        counts = (table.local_block_count, table.remote_block_count)
        if len(spans) * max(counts) > PIECES_MAX:
            raise TransferError(
                f"{len(spans)} spans of {max(counts)} blocks are more than NIXL can number ({PIECES_MAX})"
            )
        ours = [local_regions[span.local_region] for span in spans]
        theirs = [self.regions[span.remote_region] for span in spans]
        local = [
            _strided(region, span.local_offset, span.nbytes, span.local_stride, counts[0])
            for span, region in zip(spans, ours, strict=True)
        ]
        remote = [
            _strided(region, span.remote_offset, span.nbytes, span.remote_stride, counts[1])
            for span, region in zip(spans, theirs, strict=True)
        ]
        return PreparedGroup(
            self._agent.prepare(None, kinds[0], local),
            self._agent.prepare(self._remote_agent, kinds[1], remote),
            *counts,
            np.array([span.nbytes for span in spans], dtype=np.int64),
        )

    def post(self, groups: Sequence[PreparedGroup], local_blocks: Int64s, remote_blocks: Int64s) -> OpId:
        """Raises TransferError, with nothing posted, if the peer is lost."""
        with self._changed:
            if self.lost is not None:
                raise TransferError(f"cannot read from {self.address.engine_id}: {self.lost}")
            op = self._completions.open()
            if groups and len(local_blocks):
                batches = (batch for group in groups for batch in group.batches(local_blocks, remote_blocks))
                reading = Reading(op, batches)
                self._by_op[op] = reading
                self._queue.append(reading)
                self._changed.notify()
                return op
        self._completions.finish(op, nbytes=0)
        return op

    def cancel(self, op: OpId) -> None:
        with self._changed:
            if (reading := self._by_op.get(op)) is not None:
                reading.error = reading.error or "cancelled"
                reading.cancelled_at = reading.cancelled_at or time.monotonic()
                self._changed.notify()

    def lose(self, reason: str) -> None:
        """Makes the thread end all reads soon."""
        with self._changed:
            self.lost = self.lost or reason
            self._changed.notify()

    def close(self, reason: str) -> None:
        self.lose(reason)
        join_all([self._thread], CLOSE_TIMEOUT_S)

    # The thread.

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._post_more()
                self._poll()
                self._finish(self._arrived())
        except TransferError as error:
            self.lose(f"{self.address.engine_id} was cut off: {error}")
        self._end()

    def _wait_for_work(self) -> bool:
        with self._changed:
            if not self._running:
                self._changed.wait_for(lambda: self.lost is not None or bool(self._by_op))
            return self.lost is None

    def _post_more(self) -> None:
        while len(self._running) < REQUESTS_MAX and (taken := self._take_nowait()):
            reading, batch = taken
            with self._agent_lock:
                request = self._agent.post_read(
                    batch.local, batch.local_pieces, batch.remote, batch.remote_pieces
                )
            self._running.append(_Running(request, reading, batch.nbytes, time.monotonic()))

    def _take_nowait(self) -> tuple[Reading[Batch], Batch] | None:
        """The next batch to post; operations take turns."""
        with self._changed:
            while self._queue:
                reading = self._queue.popleft()
                batch = next(reading.batches, None) if reading.error is None else None
                if batch is not None:
                    reading.under_way += 1
                    self._queue.append(reading)
                    return reading, batch
                reading.all_taken = True
        return None

    def _poll(self) -> None:
        still: list[_Running] = []
        now = time.monotonic()
        for running in self._running:
            with self._agent_lock:
                is_done = self._agent.is_done(running.request)
                telemetry = self._agent.release(running.request) if is_done else None
            if telemetry is not None:
                self._count(running, *telemetry)
            elif running.is_hopeless(now):
                raise TransferError("a read does not end, even after it was cancelled")
            else:
                still.append(running)
        progressed = len(still) < len(self._running)
        self._running = still
        self._pause_s = POLL_MIN_S if progressed else min(self._pause_s * 1.5, POLL_MAX_S)
        if still and not progressed:
            time.sleep(self._pause_s)

    def _count(self, running: _Running, pieces: int, transfer_s: float) -> None:
        with self._changed:
            running.reading.under_way -= 1
            running.reading.copied_bytes += running.nbytes
        self._counters.requests += 1
        self._counters.pieces += pieces
        self._counters.transfer_s += transfer_s
        self._counters.read_bytes += running.nbytes

    def _arrived(self) -> list[Reading[Batch]]:
        """Readings that are over: cancelled, or complete and proved by the identity page."""
        with self._changed:
            over = [reading for reading in self._by_op.values() if reading.is_over]
        if any(reading.error is None for reading in over):
            with self._agent_lock:
                found = self._identity.read(STALL_S)
            if found != self._expected_identity:
                raise TransferError("it withdrew its memory, or another process has replaced it")
        return over

    def _finish(self, over: Collection[Reading[Batch]]) -> None:
        """Call it without the lock: the completion hook may post the next operation at once."""
        with self._changed:
            for reading in over:
                del self._by_op[reading.op]
                with contextlib.suppress(ValueError):
                    self._queue.remove(reading)
        for reading in over:
            self._completions.finish(reading.op, nbytes=reading.copied_bytes, error=reading.error)

    def _end(self) -> None:
        with self._agent_lock:
            self._agent.destroy()
        self._running.clear()
        with self._changed:
            over = list(self._by_op.values())
            for reading in over:
                reading.error = reading.error or self.lost
        self._finish(over)

    def _die(self, error: BaseException) -> None:
        """Ends all reads after a bug of ours, so that no caller waits for them."""
        self.lose(f"its reader thread died: {error!r}")
        self._end()


def _strided(region: Region, offset: int, nbytes: int, stride: int, count: int) -> Strided:
    # A stride of 0 describes exactly one block; NIXL does not accept 0.
    return Strided(region.address + offset, nbytes, stride or nbytes, count, memory_kind(region)[1])
