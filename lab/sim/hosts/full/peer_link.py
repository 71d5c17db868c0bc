"""Messages between two routers of a full world, as `baton.router.members.peers` sends them.

Some are lost, repeated or late. A router that is killed sends nothing.
"""

from collections.abc import Callable, Sequence

from baton.router.fleet.notes import Load, Note, TurnKept, TurnTaken
from baton.router.fleet.peers import PeerNote, Peers
from lab.sim.kernel.world import World

LOAD_S = 0.01
HEARTBEAT_S = 0.3
DELAY_S = 0.005
LOST = TWICE = LATE = 0.05  # Shares of the messages, while faults come.
LATE_S = 3.0
SECRET = b"the secret of all routers"


class PeerLink:
    def __init__(
        self,
        world: World,
        peers: type[Peers],
        *,
        load: Callable[[], Load],
        kept: Callable[[], Sequence[TurnKept]],
        on_note: Callable[[Note], None],
        on_load: Callable[[], None],
        faults_end_s: float,
    ) -> None:
        """The arguments are those of `baton.router.members.peers.PeerLink`."""
        self._world, self._rng, self._faults_end_s = world, world.rng_of_peers, faults_end_s
        self._load, self._kept, self._on_note, self._on_load = load, kept, on_note, on_load
        self.peers = peers(f"{self._rng.getrandbits(64):016x}", SECRET)
        self.others: Sequence[PeerLink] = ()
        self.is_alive = True
        self.hears_at_s = 0.0  # The last message that is not late.
        self._is_load_due = False
        self._tick()

    def load_has_changed(self) -> None:
        if not self._is_load_due:
            self._is_load_due = True
            self._world.after(LOAD_S, self._send_load)

    def tell(self, note: Note) -> None:
        if isinstance(note, TurnKept | TurnTaken):
            self._publish([note])

    def _send_load(self) -> None:
        self._is_load_due = False
        self._publish([self._load()])

    def _tick(self) -> None:
        if self.is_alive:
            self._send_load()
            if self.peers.expire(self._world.now):
                self._world.count("a router is silent")
                self._on_load()
            self._world.after(HEARTBEAT_S, self._tick)

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
            self._on_note(turn)
        if news.has_new_load:
            self._on_load()
        if news.is_new:
            self._publish(list(self._kept()))
