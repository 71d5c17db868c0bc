"""The wires between memories: one-sided reads that take time, come apart, fail, hang, and end late.

    posted --> a part is copied --> the rest is copied --> completion       each step at a random time
       |            |                    |
       +------------+--------------------+--> error | lost completion (only cancelling ends it)

What is copied is what the source holds at that very instant. A read is bound to the incarnation that it was
posted to: where another process has taken its place, it fails.

Reads go over a connection (baton.sim.kernel.connection). In worlds where the wire lies about reads, a read is
one request and one answer. A connection that was reset, stalled, or refused a request is lost with all of
its reads.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from baton.core.errors import PeerError, TransferError
from baton.core.ids import Address
from baton.core.layout import CopySpan, Region
from baton.sim.checkers import fenced
from baton.sim.hosts.full.model import WORD_BYTES
from baton.sim.kernel import lies
from baton.sim.kernel.connection import ALL_CHECKS, Checks, Connection
from baton.sim.kernel.links import Links
from baton.sim.kernel.world import World
from baton.transport.base import Completion, OpId, PeerHandle, Prepared, Transport
from baton.transport.spans import SpanTable

if TYPE_CHECKING:
    from baton.sim.hosts.full.engine import Engine
    from baton.sim.hosts.full.memory import RankMemory
    from baton.sim.hosts.full.offload import HostCopy

SLOW = 100.0
CANCEL_MEAN_S = 0.05
CANCEL_MAX_S = 2.0
Copy = tuple[int, int, int]  # Local address, remote address, bytes.


class _Fate(enum.Enum):
    GOOD = enum.auto()
    ERROR = enum.auto()
    PARTIAL = enum.auto()
    CORRUPT = enum.auto()
    HANG = enum.auto()


@dataclass(slots=True, eq=False)
class Read:
    """A copy under way: it lives until nothing can move any more, whatever the processes believe."""

    number: int
    op: OpId
    reader: Port
    source: Port
    link: Connection
    targets: tuple[int, ...]
    target_generations: list[int]
    origins: tuple[int, ...]
    origin_generations: list[int]
    copies: list[Copy]
    posted_at: float
    fate: _Fate = _Fate.GOOD
    ok: bool = False
    is_live: bool = True
    is_torn: bool = False  # Copied from a source that was not held, or not all the time.
    torn_by: str = ""

    @property
    def consumer(self) -> Engine:
        return self.reader.engine


class ReadNetwork(Links):
    def __init__(
        self,
        world: World,
        *,
        bound_reads: bool = True,
        verified_reads: bool = True,
        replaces_links: bool = True,
        checks: Checks = ALL_CHECKS,
    ) -> None:
        super().__init__(world, checks)
        self.reads: dict[int, Read | HostCopy] = {}  # All that were ever posted, by number: provenance.
        self.running: list[Read] = []
        self.loads: list[HostCopy] = []  # From host memory.
        self.ports: dict[bytes, Port] = {}  # By endpoint.
        self.bound_reads = bound_reads
        self.verified_reads = verified_reads
        self.replaces_links = replaces_links

    @property
    def live(self) -> list[Read | HostCopy]:
        """All that can still write to a cache."""
        return [*self.running, *self.loads]

    def enter(self, port: Port) -> bytes:
        endpoint = b"%d" % (len(self.ports) + 1)
        self.ports[endpoint] = port
        return endpoint

    # --- The life of a read -----------------------------------------------------------------------

    def post(self, reader: Port, peer: _Peer, op: OpId, copies: list[Copy]) -> None:
        world, source = self.world, peer.port
        if len(copies) == 1:
            copies = _halved(copies[0])
        targets = reader.memory.blocks_of((local, nbytes) for local, _, nbytes in copies)
        origins = source.memory.blocks_of((remote, nbytes) for _, remote, nbytes in copies)
        read = Read(
            len(self.reads) + 1,
            op,
            reader,
            source,
            peer.link,
            targets,
            [reader.engine.pool.generation[block] for block in targets],
            origins,
            [source.engine.pool.generation[block] for block in origins],
            copies,
            world.now,
            self._draw_fate(),
        )
        self.reads[read.number] = read
        self.running.append(read)
        world.count(f"read: {read.fate.name.lower()}")
        if world.trace is not None:
            world.note(
                reader.engine.name,
                f"read {read.number} of {len(copies)} copies from {source.engine.name}: "
                f"{list(origins)} into {list(targets)} ({read.fate.name.lower()})",
            )
        took_s = world.spread(world.faults.read_mean_s) * (SLOW if reader.engine.is_slow else 1.0)
        half = world.rng.randrange(len(copies)) if copies else 0
        if world.lies(world.faults.link_loss):
            self.break_link(peer.link, took_s)
        if half and not world.faults.read_lies:
            world.after(took_s / 2, lambda: self._progress(read, half, ends=False))
        world.after(took_s, lambda: self._progress(read, len(read.copies), ends=True))

    def _draw_fate(self) -> _Fate:
        faults, chance = self.world.faults, self.world.chance
        for fate, probability in (
            (_Fate.ERROR, faults.read_error),
            (_Fate.PARTIAL, faults.read_partial),
            (_Fate.CORRUPT, faults.read_corrupt),
            (_Fate.HANG, faults.read_hang),
        ):
            if chance(probability):
                return fate
        return _Fate.GOOD

    def _progress(self, read: Read, up_to: int, *, ends: bool) -> None:
        """Copy the first `up_to` of what is left."""
        if not read.is_live or not read.reader.engine.is_alive or read.link.is_stalled:
            return
        if read.reader.engine.is_paused:  # Its own process does the copying.
            wait_s = read.reader.engine.wakes_in_s
            self.world.after(wait_s, lambda: self._progress(read, up_to, ends=ends))
            return
        source = self._source_of(read)
        if source is None:
            if ends:
                self.finish(read, error=f"{read.source.engine.name} is gone")
            return
        if ends and self.world.faults.read_lies and read.fate is _Fate.GOOD and read.copies:
            return self.finish(read, self._exchange_lies(read, source))
        if read.fate is not _Fate.ERROR and not (read.fate is _Fate.PARTIAL and ends):
            self._copy(read, source, up_to)
        if not ends:
            return
        match read.fate:
            case _Fate.GOOD:
                self.finish(read, error=None)
            case _Fate.ERROR | _Fate.PARTIAL:
                self.finish(read, error="the wire broke")
            case _Fate.CORRUPT:
                self.finish(read, error="checksum" if self.verified_reads else None)
            case _Fate.HANG:
                return

    def _source_of(self, read: Read) -> Port | None:
        if read.source.engine.is_alive:
            return read.source
        if self.bound_reads:
            return None
        read.is_torn, read.torn_by = True, "read from a successor"
        return read.source.engine.successor_port(read.source)

    def _copy(self, read: Read, source: Port, up_to: int) -> None:
        if not up_to or not read.copies:
            return
        fenced.check_landing(read)
        self._check_source(read, source)
        for index, (local, remote, nbytes) in enumerate(read.copies[:up_to]):
            words = source.memory.fetch(remote - read.source.base + source.base, nbytes)
            if read.fate is _Fate.CORRUPT and not index:
                words = words.copy()
                words[self.world.rng.randrange(len(words))] ^= 1 << self.world.rng.randrange(32)
            read.reader.memory.land(local, words, read.number)
        del read.copies[:up_to]

    def _exchange_lies(self, read: Read, source: Port) -> str | None:
        """Request and answer on a wire that lies. Returns the error."""
        rng, shift = self.world.rng_of_lies, source.base - read.source.base

        def serve(wanted: tuple[tuple[int, int], ...]) -> tuple[bytes, ...] | None:
            runs = [(remote + shift, nbytes) for remote, nbytes in wanted]
            if not all(source.memory.has(*run) for run in runs):
                return None
            self._check_source(read, source)
            return tuple([source.memory.fetch(*run).tobytes() for run in runs])

        def fits(payload: tuple[bytes, ...]) -> bool:
            self._land(read, payload)
            return _lengths(payload) == _lengths(read.copies)

        payload = self.exchange(
            read.link,
            read.link.ask(tuple([(remote, nbytes) for _, remote, nbytes in read.copies])),
            serve,
            lambda run: (lies.flip_address(rng, run[0]), run[1]),
            lambda payload: _flipped(rng, payload),
            fits,
        )
        return None if payload is not None else "a request or an answer did not verify"

    def _land(self, read: Read, payload: tuple[bytes, ...]) -> None:
        """Bytes are received into their blocks, and verified there."""
        fenced.check_landing(read)
        for (local, _, nbytes), part in zip(read.copies, payload, strict=False):
            words = np.frombuffer(part[:nbytes], np.uint32)
            read.reader.memory.land(local, words, read.number)

    # --- Links ------------------------------------------------------------------------------------

    def dial(self, address: Address, port: Port) -> _Peer:
        return _Peer(address, port, self.new_link())

    def fail_reads(self, link: Connection) -> None:
        broken = [read for read in self.running if read.link is link]
        for read in broken:
            self.lost_ways[read.source.engine.name, read.reader.engine.name] = None
        self.end_soon(broken, "the connection is lost")

    def _check_source(self, read: Read, source: Port) -> None:
        pool = source.engine.pool
        for block, generation in zip(read.origins, read.origin_generations, strict=True):
            if pool.generation[block] != generation:
                read.is_torn, read.torn_by = True, "the source was freed while it was read"
            elif not pool.is_held(block):
                read.is_torn, read.torn_by = True, "the source was not held"

    def finish(self, read: Read, error: str | None) -> None:
        if not read.is_live:
            return
        read.is_live = False
        read.ok = error is None
        self.running.remove(read)
        if error is None:
            self._check_source(read, read.source)
        if not read.reader.engine.is_alive:
            return
        self.world.note(read.reader.engine.name, f"read {read.number} ended: {error or 'ok'}")
        read.reader.complete(Completion(read.op, error is None, 0, self.world.now - read.posted_at, error))

    def end_soon(self, which: Sequence[Read], error: str) -> None:
        """Locally, without the peer. Until it has ended, it may still copy."""
        for read in which:
            delay_s = 0.0
            if self.world.chance(0.5):
                delay_s = min(self.world.spread(CANCEL_MEAN_S), CANCEL_MAX_S)
            self.world.after(delay_s, lambda read=read: self._ended_locally(read, error))  # type: ignore[misc]

    def _ended_locally(self, read: Read, error: str) -> None:
        engine = read.reader.engine
        if engine.is_alive and engine.is_paused:
            self.world.after(engine.wakes_in_s, lambda: self._ended_locally(read, error))
        else:
            self.finish(read, error)


@dataclass(eq=False)
class _Peer(PeerHandle):
    address: Address
    port: Port
    link: Connection

    @property
    def lost(self) -> str | None:  # type: ignore[override]
        is_seen = self.port.network.replaces_links
        return "the connection was reset" if self.link.is_lost and is_seen else None


@dataclass(eq=False)
class _Prepared(Prepared):
    peer: _Peer
    table: SpanTable


@dataclass(eq=False)
class Port(Transport):
    """One rank's transport."""

    name = "memory"

    engine: Engine
    network: ReadNetwork
    memory: RankMemory
    address: Address
    base: int = 0
    _regions: tuple[Region, ...] = ()
    _num_ops: int = 0
    _ended: list[Completion] = field(default_factory=list)

    def register(self, regions: Sequence[Region]) -> bytes:
        """The staging buffer follows the cache in memory. Nothing uses it here."""
        assert regions[0].address == self.memory.address
        self.base = regions[0].address
        self._regions = tuple(regions)
        return self.network.enter(self)

    def connect(self, address: Address, endpoint: bytes) -> PeerHandle:
        port = self.network.ports.get(endpoint)
        if port is None or port.address != address:
            raise PeerError(f"the endpoint of {address.engine_id} is of another engine")
        world = self.network.world
        if not port.engine.is_alive or world.chance(world.faults.connect_error):
            raise TransferError(f"{address.engine_id} cannot be reached")
        return self.network.dial(address, port)

    def prepare(self, peer: PeerHandle, spans: Sequence[CopySpan]) -> Prepared:
        assert isinstance(peer, _Peer)
        return _Prepared(peer, SpanTable(spans, self._regions, peer.port._regions))

    def post_read(
        self, prepared: Prepared, local_blocks: Sequence[int], remote_blocks: Sequence[int]
    ) -> OpId:
        assert isinstance(prepared, _Prepared)
        if prepared.peer.link.is_lost:
            raise TransferError("the connection is lost")
        copies = prepared.table.expand(local_blocks, remote_blocks)
        self._num_ops += 1
        op = OpId(self._num_ops)
        as_list = list(
            zip(copies.local.tolist(), copies.remote.tolist(), copies.nbytes.tolist(), strict=True)
        )
        self.network.post(self, prepared.peer, op, as_list)
        return op

    def complete(self, completion: Completion) -> None:
        self._ended.append(completion)
        self.engine.poke()

    def poll(self) -> list[Completion]:
        ended, self._ended = self._ended, []
        return ended

    def wait_completion(self, timeout_s: float) -> bool:
        return bool(self._ended)

    def cancel(self, op: OpId) -> None:
        self.network.end_soon(
            [r for r in self.network.running if r.reader is self and r.op == op], "cancelled"
        )

    def disconnect(self, peer: PeerHandle) -> None:
        assert isinstance(peer, _Peer)
        theirs = [r for r in self.network.running if r.reader is self and r.link is peer.link]
        self.network.end_soon(theirs, "disconnected")

    def close(self) -> None:
        return


def _halved(copy: Copy) -> list[Copy]:
    local, remote, nbytes = copy
    half = nbytes // 2 // WORD_BYTES * WORD_BYTES
    if not half:
        return [copy]
    return [(local, remote, half), (local + half, remote + half, nbytes - half)]


def _lengths(runs: Sequence[Copy] | Sequence[bytes]) -> list[int]:
    return [len(run) if isinstance(run, bytes) else run[2] for run in runs]


def _flipped(rng: random.Random, payload: tuple[bytes, ...]) -> tuple[bytes, ...]:
    at = rng.randrange(len(payload))
    part = bytearray(payload[at])
    part[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
    return (*payload[:at], bytes(part), *payload[at + 1 :])
