"""Ways between engines, by name: they lose, repeat, delay, alter and hold up control frames. A faulty member
sends false ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from baton.connectors.pull.identity import TICKET_KEY_PURPOSE
from baton.core.config import ClusterSecret
from baton.protocol.messages import Announced, Envelope, Finished, Renewed, Welcome
from lab.sim.kernel import lies

if TYPE_CHECKING:
    from lab.sim.kernel.cluster import Cluster

SECRET = ClusterSecret(b"the cluster's own secret, known to no other cluster")
KEY = SECRET.derive(TICKET_KEY_PURPOSE)
ABOUT_CONTENTS = (Announced, Finished, Renewed, Welcome)
Way: TypeAlias = tuple[str, str]


class Wire:
    lies_about_contents = True

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._world = cluster, cluster.world
        self._cut: dict[Way, float] = {}  # Lost until then.
        self._clogged: dict[Way, float] = {}  # Held up until then.

    def cut_off(self, way: Way, for_s: float, *, both: bool) -> None:
        self._world.note("net", f"{way} is cut{' both ways' if both else ''} for {for_s} s")
        for one in (way, way[::-1]) if both else (way,):
            self._cut[one] = self._world.now + for_s

    def clog(self, way: Way, for_s: float) -> None:
        self._world.count("clog")
        self._world.note("net", f"{way} is clogged for {for_s} s")
        self._clogged[way] = self._world.now + for_s

    def is_cut(self, way: Way) -> bool:
        return bool(self._cut) and self._cut.get(way, 0.0) > self._world.now

    def carry(
        self,
        way: Way,
        frame: bytes,
        arrive: Callable[[bytes], None],
        late_s: float = 0.0,
        *,
        alter: Callable[[random.Random, bytes], bytes] | None = lies.altered,
    ) -> None:
        world, faults = self._world, self._world.faults
        if self.is_cut(way):
            return
        if alter is not None and world.lies(faults.frame_lies):
            frame = alter(world.rng_of_lies, frame)
            world.count("frames altered by the wire")

        def arrives() -> None:
            if not self.is_cut(way):
                arrive(frame)

        free_in_s = max(0.0, self._clogged.get(way, 0.0) - world.now) if self._clogged else 0.0
        if not world.chance(faults.loss):
            world.after(free_in_s or world.spread(faults.delay_mean_s) + late_s, arrives)
        if world.chance(faults.duplicate):
            copy_late_s = world.rng.random() * faults.late_copy_s
            world.after(free_in_s or world.spread(faults.delay_mean_s) + copy_late_s, arrives)

    def as_sent(self, sender: str, envelope: Envelope) -> Envelope:
        """A faulty member sends other values than its machines gave it."""
        world, cluster = self._world, self._cluster
        if sender != cluster.liar or not world.lies(world.faults.member_lies):
            return envelope
        if not self.lies_about_contents and any(isinstance(m, ABOUT_CONTENTS) for m in envelope.messages):
            return envelope
        others = [host.address for host in cluster.hosts.values() if host.address != envelope.sender]
        sent = lies.untrue(world.rng_of_lies, envelope, KEY, others)
        world.count("lies of a member")
        cluster.lied_at = world.now
        if sent is None:
            return envelope
        cluster.has_false_ranks |= any(isinstance(message, Welcome) for message in sent.messages)
        if world.trace is not None:
            world.note(sender, f"lies: {sent.messages}"[:160])
        return sent


def garbled(rng: random.Random, frame: bytes) -> bytes:
    """Bytes that are most likely no envelope."""
    match rng.randrange(4):
        case 0:
            return frame[: rng.randrange(len(frame))]
        case 1:
            return rng.randbytes(rng.randrange(40))
        case 2:
            return b"\x94\x02" + frame[2:]  # An envelope of another version.
        case _:
            at = rng.randrange(len(frame))
            return frame[:at] + rng.randbytes(rng.randint(1, 9)) + frame[at + 1 :]
