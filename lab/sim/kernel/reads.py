"""One-sided reads: they take time, come apart, fail, hang and end late.

    posted --> a part is copied --> the rest is copied --> end       each step at a random time
       |            |                    |
       +------------+--------------------+--> error                  it may write garbage before its end

What is copied is what the source holds at that instant. A read is bound to the incarnation that it was posted
to, and fails where another process has taken its place. It goes over a link, which is lost with all of its
reads. A read is one request and one answer on this link in worlds where the wire lies about reads.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.core.ids import Pair
from lab.sim.checkers import fenced
from lab.sim.kernel.connection import Connection
from lab.sim.kernel.process import Process

if TYPE_CHECKING:
    from baton.testing.host.memory import RankMemory
    from lab.sim.host.cluster import Cluster

Copy = tuple[int, int, int]  # Local offset, remote offset, length.
SLOW = 100.0
SLOW_READ_S = 5.0
HANGS_S = (10.0, 60.0)
CANCEL_MAX_S = 2.0
TRIES = 2  # If an answer does not verify, the reader asks once more.
STALL_S = 4.0  # The connection is lost after this silence of the owner.


class Fate(enum.Enum):
    GOOD = "read: good"
    ERROR = "read: error"
    PARTIAL = "read: partial"
    CORRUPT = "read: corrupt"
    HANG = "read: hang"


@dataclass(slots=True, eq=False, kw_only=True)
class Write:
    """Something that can still write to blocks. It lives until nothing can move any more, whatever the
    processes believe."""

    number: int
    consumer: Process
    owner: object  # Key by which the write is cancelled.
    targets: tuple[int, ...]
    target_generations: list[int] = field(init=False)  # Generations when the write began.
    ok: bool = False
    is_torn: bool = False  # Copied from a source that was not held, or not all the time.
    torn_by: str = ""
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        generation = self.consumer.pool.generation
        self.target_generations = [generation[block] for block in self.targets]

    def tear(self, reason: str) -> None:
        self.is_torn, self.torn_by = True, reason


@dataclass(slots=True, eq=False, kw_only=True)
class Read(Write):
    source: Process
    ranks: Pair
    link: Connection
    origins: tuple[int, ...]
    origin_generations: list[int] = field(default_factory=list)
    copies: list[Copy]
    num_copied: int = 0
    on_end: Callable[[str | None], None]  # Takes the error.
    fate: Fate = Fate.GOOD
    is_live: bool = True


class ReadNetwork:
    def __init__(self, cluster: Cluster) -> None:
        self.world, self._cluster = cluster.world, cluster
        self.posted: dict[int, Write] = {}  # All that ever were, by number.
        self.live: list[Write] = []
        self.lost_ways: dict[tuple[str, str], None] = {}  # (source, reader) that lost a link, in order.
        self._ways: dict[Connection, tuple[str, str]] = {}

    @property
    def num_false_serves(self) -> int:
        return sum(link.num_false_serves for link in self._ways)

    def dial(self, source: Process, consumer: Process) -> Connection:
        link = Connection(self._cluster.parts.checks)
        self._ways[link] = (source.name, consumer.name)
        return link

    def begin(self, write: Write) -> None:
        self.posted[write.number] = write
        self.live.append(write)

    def post(self, read: Read) -> None:
        world, faults = self.world, self.world.faults
        self.begin(read)
        if not read.copies:
            return self.end_soon([read], "refused")
        generation = read.source.pool.generation
        read.origin_generations = [generation[block] for block in read.origins]
        self._check_source(read)
        read.fate = self._draw_fate()
        world.count(read.fate.value)
        if world.trace is not None:
            what = f"{read.fate.value}, number {read.number}"
            world.note(read.consumer.name, f"{what}, {read.source.name} {read.origins} into {read.targets}")
        took_s = world.spread(SLOW_READ_S if world.chance(faults.read_slow) else faults.read_mean_s)
        if read.consumer.is_slow:
            took_s *= SLOW
        if read.fate is Fate.HANG:
            took_s = world.rng.uniform(*HANGS_S)
        if world.lies(faults.link_loss):
            self._break_link(read.link, took_s)
        half = world.rng.randrange(len(read.copies)) if len(read.copies) > 1 else 0
        if half and not faults.read_lies:
            world.after(took_s / 2, lambda: self._progress(read, half))
        world.after(took_s, lambda: self._progress(read, len(read.copies)))

    def cancel(self, owner: object) -> None:
        reads = [read for read in self.live if isinstance(read, Read) and read.owner == owner]
        for read in reads:
            read.is_cancelled = True
        self.end_soon(reads, "cancelled")

    def disconnect(self, link: Connection, reason: str) -> None:
        self.end_soon([r for r in self.live if isinstance(r, Read) and r.link is link], reason)

    def _break_link(self, link: Connection, took_s: float) -> None:
        """Reset the link during this read or after it, or stall it until a timeout."""
        rng = self.world.rng_of_lies
        if rng.random() < 0.5:
            link.is_stalled = True
            self.world.count("links stalled")
            self.world.after(STALL_S, lambda: self._lose(link))
        else:
            self.world.count("links reset")
            self.world.after(rng.uniform(0, 2 * took_s), lambda: self._lose(link))

    def _lose(self, link: Connection) -> None:
        if not link.is_lost:
            link.is_lost, link.is_stalled = True, False
            self.lost_ways[self._ways[link]] = None
            self.disconnect(link, "the connection is lost")

    def rank_died(self, host: Process, rank: int) -> None:
        """Reads of this rank and reads from its memory fail. Nothing else stops."""
        reads = [read for read in self.live if isinstance(read, Read)]
        of_reader = [read for read in reads if read.consumer is host and read.ranks.consumer_rank == rank]
        of_source = [read for read in reads if read.source is host and read.ranks.producer_rank == rank]
        self.end_soon([read for read in reads if read in of_reader or read in of_source], "a rank died")

    def _draw_fate(self) -> Fate:
        faults, chance = self.world.faults, self.world.chance
        if chance(faults.read_error):
            return Fate.ERROR
        if chance(faults.read_partial):
            return Fate.PARTIAL
        if chance(faults.read_corrupt):
            return Fate.CORRUPT
        return Fate.HANG if chance(faults.read_hang) else Fate.GOOD

    # --- Copies -----------------------------------------------------------------------------------

    def _progress(self, read: Read, up_to: int) -> None:
        """Copy the first `up_to`; all of them end the read."""
        if not read.is_live or read.link.is_stalled:
            return
        if read.consumer.is_alive and read.consumer.is_paused:  # The consumer's own process copies.
            again = read.consumer.wakes_in_s
            return self.world.after(again, lambda: self._progress(read, up_to))
        ends = up_to == len(read.copies)
        source = self._source_of(read)
        if source is None or not read.consumer.is_alive:
            if ends:
                self._end(read, f"{read.source.name} is gone")
            return
        is_whole = read.fate in (Fate.GOOD, Fate.HANG)
        if ends and self.world.faults.read_lies and is_whole:
            return self._end(read, self._exchange(read, source))
        if read.fate is not Fate.ERROR and not (read.fate is Fate.PARTIAL and ends):
            self._copy(read, source, up_to)
        if not ends:
            return
        if read.fate is Fate.CORRUPT:
            self._end(read, "checksum" if self._cluster.parts.verified_reads else None)
        else:
            self._end(read, None if is_whole else "the wire broke")

    def _source_of(self, read: Read) -> RankMemory | None:
        owner = read.source
        if not owner.is_alive:
            owner = self._cluster.hosts[owner.name]
            if self._cluster.parts.bound_reads or not owner.is_alive:
                return None
            read.tear("read from a successor")
        return owner.memories[read.ranks.producer_rank]

    def _copy(self, read: Read, source: RankMemory, up_to: int) -> None:
        fenced.check_landing(read)
        target = read.consumer.memories[read.ranks.consumer_rank]
        for local, remote, length in read.copies[read.num_copied : up_to]:
            part = source.fetch(remote, length)
            if read.fate is Fate.CORRUPT and not read.num_copied:
                part = source.flipped(self.world.rng, part)
            target.land(local, part, read.number)
            read.num_copied += 1

    def _exchange(self, read: Read, source: RankMemory) -> str | None:
        """Request and answer on a wire that lies. Returns the error; then the link is lost."""
        world, rng, link, lies = self.world, self.world.rng_of_lies, read.link, self.world.faults.read_lies
        target = read.consumer.memories[read.ranks.consumer_rank]
        wanted = tuple([(remote, length) for _, remote, length in read.copies])

        def flip_offset(run: tuple[int, int]) -> tuple[int, int]:
            return run[0] ^ 1 << rng.randrange(*source.offset_bits), run[1]

        def flip_payload(payload: tuple[bytes, ...]) -> tuple[bytes, ...]:
            at = rng.randrange(len(payload))
            return (*payload[:at], source.flipped(rng, payload[at]), *payload[at + 1 :])

        for _ in range(TRIES):
            request = arrived = link.ask(wanted)
            if world.lies(lies):
                what, arrived = link.bend_request(rng, request, flip_offset)
                world.count(what)
            if not link.serves(arrived) or not all(source.has(*run) for run in arrived.wanted):
                break  # The owner ends the connection.
            answer = link.answer(arrived, tuple([source.fetch(*run) for run in arrived.wanted]))
            if answer.payload and world.lies(0.5 if link.can_replay(request, answer) else lies):
                what, answer = link.bend_answer(rng, request, answer, flip_payload)
                world.count(what)
            fenced.check_landing(read)  # The answer lands in its blocks, and is verified there.
            for (local, _, length), part in zip(read.copies, answer.payload, strict=False):
                target.land(local, part[:length], read.number)
            fits = [len(part) for part in answer.payload] == [length for _, length in wanted]
            if fits and link.accepts(request, answer):
                return None
        self._lose(link)
        return "a request or an answer did not verify"

    def _check_source(self, read: Read) -> None:
        """Check the source when the read is posted, and when it has ended well."""
        generation = read.source.pool.generation
        if read.origin_generations != [generation[block] for block in read.origins]:
            read.tear("the source was freed while it was read")
        elif not all(read.source.pool.is_held(block) for block in read.origins):
            read.tear("the source was not held")

    # --- Ends -------------------------------------------------------------------------------------

    def end_soon(self, reads: Iterable[Read], error: str) -> None:
        """End reads locally, without the peer. A read may still copy until it has ended."""
        for read in reads:
            delay_s = min(self.world.spread(self.world.faults.cancel_mean_s), CANCEL_MAX_S)
            self._end_in(delay_s, read, error)

    def _end_in(self, delay_s: float, read: Read, error: str) -> None:
        def end() -> None:
            if read.consumer.is_alive and read.consumer.is_paused:
                self._end_in(read.consumer.wakes_in_s, read, error)
            else:
                self._end(read, error)

        self.world.after(delay_s, end)

    def _end(self, read: Read, error: str | None) -> None:
        if not read.is_live:
            return
        read.is_live = False
        self.live.remove(read)
        if not read.consumer.is_alive:
            return
        if error is None:
            read.ok = True
            self._check_source(read)
        if read.is_torn if read.ok else self.world.chance(0.5):
            fenced.check_landing(read)
            memory = read.consumer.memories[read.ranks.consumer_rank]
            for local, _, length in read.copies:
                memory.scribble(local, length, read.number)
        self.world.note(read.consumer.name, f"read {read.number} ended: {error or 'ok'}")
        read.on_end(error)
