"""The processes of a simulated router: workers, which serve clients, and a coordinator, which probes engines.

A router of one process does both. Notes between processes take time; those of one process arrive in order.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import DRAIN_GRACE_S, Fleet
from baton.router.fleet.notes import Drains, Load, Note
from baton.router.fleet.pairs import Pairs
from baton.router.fleet.replica import Loads, Replica, sum_of
from baton.router.fleet.turns import TurnTable
from baton.router.fleet.view import FleetView
from baton.router.values.settings import RouterSettings
from lab.sim.hosts.full.peer_link import PeerLink
from lab.sim.kernel.world import World

NOTE_S = 0.02
LOAD_S = 0.05
ALIVE_S = 1.0


class Process:
    """What one process of a router knows."""

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
        self.tell: Callable[[Note], None] = lambda note: None
        self.fleet = Fleet(settings["pull"], unix_clock=lambda: 0.0)
        self.fleet.tell = self._tell
        self.pairs = Pairs()
        self.fleet.on_removed.append(self.pairs.forget)
        self.turns = TurnTable(take_back, self._tell)
        self.fleet.models.on_updated.append(self.turns.forget)
        self.views = {mode: self.view(mode) for mode in settings}
        self.admission = self.views["pull"].admission  # One for requests of both modes.
        for view in self.views.values():
            view.admission = self.admission
        self.is_pump_due = False
        self.replica = new_replica(self.views["pull"])
        self.num_requests = 0
        self.is_alive = True
        self.hears_at = self.tells_at = 0.0  # When the last note on each way arrives.

    def view(self, mode: str) -> FleetView:
        return self._new_view(self.settings[mode], self.fleet, self.pairs, self.turns)

    def _tell(self, note: Note) -> None:
        self.tell(note)

    def apply(self, note: Note) -> None:
        """Apply a note as the shell's `Worker` does."""
        self.replica.apply(note, self._world.now)
        if isinstance(note, Drains) and (engine := self.fleet.find(note.engine)) is not None:
            self.watch_drain(engine)

    def watch_drain(self, engine: Engine) -> None:
        until_s = engine.drain_until_s
        if until_s is None or engine.is_removed:
            return
        self._world.after(DRAIN_GRACE_S, lambda: self.fleet.hand_over(engine, until_s))
        self._world.at(until_s, lambda: self.fleet.end_drain(engine, until_s))


class Processes:
    def __init__(
        self, world: World, new_process: Callable[[], Process], num_workers: int, on_hub: Callable[[], None]
    ) -> None:
        """`num_workers`: 0: one process is all. `on_hub`: a note has changed what the coordinator knows."""
        self._world, self._new_process, self._on_hub = world, new_process, on_hub
        self.hub = new_process()
        self.is_alone = not num_workers
        self._loads = Loads()
        self.link: PeerLink | None = None  # The link to another router.
        self.workers = [self.hub] if self.is_alone else [self._start() for _ in range(num_workers)]
        if not self.is_alone:
            self.hub.tell = self._tell_all

    def of(self, engine: Engine) -> Process:
        """The process that knows the engine by this object."""
        return next((one for one in self.workers if one.fleet.find(engine.key) is engine), self.hub)

    def connect(self, new_link: Callable[..., PeerLink]) -> PeerLink:
        """Connect as the shell's `Router` or `Coordinator` does."""
        hub = self.hub
        self.link = link = new_link(
            load=lambda: hub.replica.load(hub.num_requests) if self.is_alone else self._loads.beside(None),
            kept=hub.replica.kept_turns,
            on_note=self._hear_peer,
            on_load=self._share_loads,
        )
        if self.is_alone:
            hub.tell, hub.fleet.on_load = link.tell, link.load_has_changed
        return link

    def _hear_peer(self, note: Note) -> None:
        self.hub.replica.apply(note, self._world.now)
        if not self.is_alone:
            self._tell_all(note)

    def end(self, worker: Process) -> None:
        """Kill the worker's process. The coordinator replaces it when it has read its last notes."""
        worker.is_alive = False
        self.workers.remove(worker)
        self._world.at(worker.tells_at, partial(self._replace, worker))

    def stop(self) -> None:
        for process in (self.hub, *self.workers):
            process.is_alive = False
        if self.link is not None:
            self.link.is_alive = False

    def _replace(self, worker: Process) -> None:
        if self.hub.is_alive:
            self._loads.end(id(worker))
            self.workers.append(self._start())
            self._share_loads()

    def _start(self) -> Process:
        worker = self._new_process()
        for note in self.hub.replica.history(self._world.now):
            worker.apply(note)
        worker.hears_at = worker.tells_at = self._world.now
        worker.tell = partial(self._tell_hub, worker)
        is_due = False

        def report() -> None:
            nonlocal is_due
            is_due = False
            if worker.is_alive:
                worker.tell(worker.replica.load(worker.num_requests))
                if worker.num_requests:
                    report_in(ALIVE_S)

        def report_in(seconds: float) -> None:
            nonlocal is_due
            if not is_due:
                is_due = True
                self._world.after(seconds, report)

        worker.fleet.on_load = lambda: report_in(LOAD_S)
        return worker

    # --- Notes

    def _tell_hub(self, worker: Process, note: Note) -> None:
        worker.tells_at = max(worker.tells_at, self._world.now + self._world.spread(NOTE_S))
        self._world.at(worker.tells_at, lambda: self._read(worker, note))

    def _read(self, worker: Process, note: Note) -> None:
        if not self.hub.is_alive:
            return
        self._world.count(f"note: {type(note).__name__}")
        if isinstance(note, Load):
            self._loads.put(id(worker), note)
            self._share_loads()
            if self.link is not None:
                self.link.load_has_changed()
        else:
            if self.link is not None:
                self.link.tell(note)
            self.hub.replica.apply(note, self._world.now)
            for other in self.workers:
                if other is not worker:
                    self._deliver(other, note)
        self._on_hub()

    def _share_loads(self) -> None:
        others = [] if self.link is None else [self.link.peers.load()]
        self.hub.replica.apply(sum_of([self._loads.beside(None), *others]), self._world.now)
        if not self.is_alone:
            for worker in self.workers:
                self._deliver(worker, sum_of([self._loads.beside(id(worker)), *others]))

    def _tell_all(self, note: Note) -> None:
        for worker in self.workers:
            self._deliver(worker, note)

    def _deliver(self, worker: Process, note: Note) -> None:
        world = self._world
        worker.hears_at = max(worker.hears_at, world.now + world.spread(NOTE_S))
        world.at(worker.hears_at, lambda: worker.apply(note) if worker.is_alive else None)
