"""The processes of a simulated router: workers, which serve clients, and a coordinator, which probes engines.

A router of one process does both. Notes between processes take time; those of one process arrive in order.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import DRAIN_GRACE_S, Fleet
from baton.router.fleet.links import HEARTBEAT_S, Links
from baton.router.fleet.notes import Note
from baton.router.fleet.pairs import Pairs
from baton.router.fleet.replica import Replica
from baton.router.fleet.turns import TurnTable
from baton.router.fleet.view import FleetView
from baton.router.values.settings import RouterSettings
from lab.sim.host.peer_link import PeerLink
from lab.sim.kernel.world import World

NOTE_S = 0.02
LOAD_S = 0.05


class Process:
    """What one process of a router knows."""

    calm_heartbeat_s = 10.0  # A heartbeat repairs nothing in a healed world: no load is lost.

    def __init__(
        self,
        settings: Mapping[str, RouterSettings],
        new_view: type[FleetView],
        new_replica: type[Replica],
        take_back: Callable[[Engine, Mapping[str, Any]], None],
        world: World,
    ) -> None:
        self._world = world
        self.settings, self._new_view = settings, new_view
        self.fleet = Fleet(settings["pull"], unix_clock=lambda: 0.0)
        self.fleet.on_drain = self._watch_drain
        self.pairs = Pairs()
        self.fleet.on_removed.append(self.pairs.forget)
        self.turns = TurnTable(take_back, lambda note: self.links.tell(note))
        self.fleet.models.on_updated.append(self.turns.forget)
        self.views = {mode: self.view(mode) for mode in settings}
        self.admission = self.views["pull"].admission  # One for requests of both modes.
        for view in self.views.values():
            view.admission = self.admission
        self.is_pump_due = False
        self.links = Links(new_replica(self.views["pull"]), self)
        self.links.num_own = lambda: self.num_requests
        self.fleet.tell, self.fleet.on_load = self.links.tell, self.links.load_has_changed
        self.num_requests = 0
        self.is_alive = True

    # --- Clock

    def time(self) -> float:
        return self._world.now

    def call_later(self, delay: float, callback: Callable[[], None], /) -> None:
        if delay == HEARTBEAT_S and self._world.is_healed:
            delay = self.calm_heartbeat_s
        self._world.after(delay, lambda: callback() if self.is_alive else None)

    def view(self, mode: str) -> FleetView:
        return self._new_view(self.settings[mode], self.fleet, self.pairs, self.turns)

    def _watch_drain(self, engine: Engine) -> None:
        until_s = engine.drain_until_s
        assert until_s is not None
        self._world.after(DRAIN_GRACE_S, lambda: self.fleet.hand_over(engine, until_s))
        self._world.at(until_s, lambda: self.fleet.end_drain(engine, until_s))


class Way:
    """Notes from one process of a router to another. Implements `Link`."""

    load_every_s = LOAD_S

    def __init__(self, world: World, hear: Callable[[Note], None]) -> None:
        self._world, self._hear = world, hear
        self.last_at = world.now  # When the last note arrives.

    def send(self, note: Note) -> None:
        self.last_at = max(self.last_at, self._world.now + self._world.rng_of_notes.expovariate(1 / NOTE_S))
        self._world.at(self.last_at, lambda: self._hear(note))


class Processes:
    def __init__(
        self, world: World, new_process: Callable[[], Process], num_workers: int, on_hub: Callable[[], None]
    ) -> None:
        """`num_workers`: 0: one process is all. `on_hub`: a note has changed what the coordinator knows."""
        self._world, self._new_process, self._on_hub = world, new_process, on_hub
        self.hub = new_process()
        self.is_alone = not num_workers
        self.link: PeerLink | None = None  # The link to other routers.
        self._ways: dict[Process, tuple[Way, Way]] = {}  # Ways of each worker: to the coordinator, and back.
        self.workers = [self.hub] if self.is_alone else [self._start() for _ in range(num_workers)]

    def of(self, engine: Engine) -> Process:
        """The process that knows the engine by this object."""
        return next((one for one in self.workers if one.fleet.find(engine.key) is engine), self.hub)

    def connect(self, new_link: Callable[[Links], PeerLink]) -> PeerLink:
        self.link = link = new_link(self.hub.links)
        self.hub.calm_heartbeat_s = 0.8  # Peers take a router for gone after a second without a message.
        return link

    def end(self, worker: Process) -> None:
        """Kill the worker's process. The coordinator replaces it when it has read its last notes."""
        worker.is_alive = False
        self.workers.remove(worker)
        self._world.at(self._ways[worker][0].last_at, partial(self._replace, worker))

    def stop(self) -> None:
        for process in (self.hub, *self.workers):
            process.is_alive = False
        if self.link is not None:
            self.link.is_alive = False

    def _replace(self, worker: Process) -> None:
        if self.hub.is_alive:
            self.hub.links.leave(self._ways[worker][1])
            self.workers.append(self._start())

    def _start(self) -> Process:
        world, hub, worker = self._world, self.hub.links, self._new_process()
        for note in hub.replica.history(world.now):
            worker.links.replica.apply(note, world.now)

        def hear_worker(note: Note) -> None:
            if self.hub.is_alive:
                world.count(f"note: {type(note).__name__}")
                hub.hear(note, down)
                self._on_hub()

        up = Way(world, hear_worker)
        down = Way(world, lambda note: worker.links.hear(note, up) if worker.is_alive else None)
        self._ways[worker] = up, down
        worker.links.join(up)
        hub.join(down)
        return worker
