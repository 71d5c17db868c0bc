"""Messages between two routers of a world, as `baton.router.members.peers` sends them.

Some are lost, repeated or late. A router that is killed sends nothing.
"""

from collections.abc import Sequence

from baton.router.fleet.links import Links
from baton.router.fleet.notes import Load, Note
from baton.router.fleet.peers import PeerNote, Peers
from lab.sim.kernel.world import World

DELAY_S = 0.005
LOST = TWICE = LATE = 0.05  # Shares of the messages, while faults come.
LATE_S = 3.0
SECRET = b"the secret of all routers"


class PeerLink:
    """Implements `Link`."""

    load_every_s = 0.01

    def __init__(self, world: World, peers: type[Peers], links: Links, *, faults_end_s: float) -> None:
        self._world, self._rng, self._faults_end_s = world, world.rng_of_peers, faults_end_s
        self._links = links
        self.peers = peers(f"{self._rng.getrandbits(64):016x}", SECRET)
        self.others: Sequence[PeerLink] = ()
        self.is_alive = True
        self.hears_at_s = 0.0  # The last message that is not late.
        links.join(self)

    def send(self, note: Note) -> None:
        if self.is_alive and isinstance(note, Load) and self.peers.expire(self._world.now):
            self._world.count("a router is silent")
            self._links.hear(self.peers.load(), self)
        if isinstance(note, PeerNote):
            self._publish([note])

    def _publish(self, notes: list[PeerNote]) -> None:
        if not self.is_alive:
            return
        data = self.peers.write(notes, self._world.now)
        for other in self.others:
            for at_s in self._arrivals_s(other):
                self._world.at(at_s, lambda other=other: other.hear(data))  # type: ignore[misc]

    def _arrivals_s(self, other: "PeerLink") -> list[float]:
        """One for each time that the message arrives."""
        now_s = self._world.now
        luck = self._rng.random() if now_s < self._faults_end_s else 1.0
        if luck < LOST:
            self._world.count("a router's message: lost")
            return []
        late_s = now_s + self._rng.uniform(0, LATE_S)
        if luck < LOST + LATE:
            return [late_s]
        other.hears_at_s = max(other.hears_at_s, now_s + self._rng.expovariate(1 / DELAY_S))
        return [other.hears_at_s, late_s] if luck < LOST + LATE + TWICE else [other.hears_at_s]

    def hear(self, data: bytes) -> None:
        if not self.is_alive:
            return
        news = self.peers.read(data, self._world.now, self._world.now)
        for turn in news.turns:
            self._world.count(f"a router's message: {type(turn).__name__}")
            self._links.hear(turn, self)
        self._links.hear(self.peers.load(), self)
        if news.is_new:
            self._publish([*self._links.replica.kept_turns()])
