"""The processes of one router: whatever crosses on the way between them, they end up with the same fleet."""

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from baton.router.fleet.breaker import Probe
from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.links import HEARTBEAT_S, LOAD_EVERY_S, NOTHING, Links
from baton.router.fleet.notes import Drains, EngineLoad, Joined, Load, Note, Probed
from baton.router.fleet.pairs import FAILURES_TO_STOP, Pairs
from baton.router.fleet.replica import Replica
from baton.router.fleet.turns import Turn, TurnTable
from baton.router.fleet.view import FleetView
from baton.router.values.errors import LegFailure
from baton.router.values.members import Member
from baton.router.values.settings import RouterSettings

SETTINGS = RouterSettings(prefill_urls=("http://p:1",), decode_urls=("http://d:1", "http://u:k@d:2"))
NEW = "http://d:3"
NUM_WORKERS = 3


class Way:
    """Notes from one process to another, in their order. Implements `Link`."""

    load_every_s = LOAD_EVERY_S

    def __init__(self) -> None:
        self.notes: deque[Note] = deque()

    def send(self, note: Note) -> None:
        self.notes.append(note)


class Process:
    """A worker, or the coordinator."""

    def __init__(self, world: "Router") -> None:
        self.taken_back: list[Any] = []
        self.fleet = Fleet(SETTINGS)
        turns = TurnTable(
            lambda engine, params: self.taken_back.append(params), lambda note: self.links.tell(note)
        )
        self.view = FleetView(SETTINGS, self.fleet, Pairs(), turns)
        self.links = Links(Replica(self.view), self)
        self.fleet.tell, self.fleet.on_load = self.links.tell, self.links.load_has_changed
        self.running: list[Engine] = []
        self.links.num_own = lambda: len(self.running)
        self._world, self.due = world, deque[Callable[[], None]]()

    # --- Clock

    def time(self) -> float:
        return self._world.now_s

    def call_later(self, delay: float, callback: Callable[[], None], /) -> None:
        if delay < HEARTBEAT_S:
            self.due.append(callback)

    def report(self) -> None:
        """Send the loads that are due."""
        while self.due:
            self.due.popleft()()

    def hear(self, note: Note, link: Way) -> None:
        """Hear the note in the form in which it comes from the wire."""
        self.links.hear(msgspec.msgpack.decode(msgspec.msgpack.encode(note), type=Note), link)


class Router:
    """Notes wait between the processes until they are delivered, in the order of each direction."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.hub = Process(self)
        self.workers: dict[int, Process] = {}
        self.up: dict[int, Way] = {}
        self.down: dict[int, Way] = {}
        for number in range(NUM_WORKERS):
            self.start(number)

    def start(self, number: int) -> None:
        worker = self.workers[number] = Process(self)
        self.up[number], self.down[number] = Way(), Way()
        for note in self.hub.links.replica.history(self.now_s):
            worker.hear(note, self.up[number])
        worker.links.join(self.up[number])
        self.hub.links.join(self.down[number])

    def restart(self, number: int) -> None:
        self.hub.links.leave(self.down[number])
        self.start(number)

    def deliver(self, number: int, *, is_up: bool) -> None:
        way = (self.up if is_up else self.down)[number]
        if not way.notes:
            return
        note = way.notes.popleft()
        if is_up:
            self.hub.hear(note, self.down[number])
        else:
            self.workers[number].hear(note, self.up[number])

    def settle(self) -> None:
        processes = (self.hub, *self.workers.values())
        while any(way.notes for way in (*self.up.values(), *self.down.values())) or any(
            process.due for process in processes
        ):
            for process in processes:
                process.report()
            for number in self.workers:
                self.deliver(number, is_up=True)
                self.deliver(number, is_up=False)

    def probe(self, engine: Engine, probe: Probe) -> None:
        self.hub.fleet.health.note_probe(engine, probe, self.now_s)
        self.hub.fleet.tell(Probed(engine.key, probe.kind, probe.why, engine.admin_port))


WORKERS = st.integers(0, NUM_WORKERS - 1)
STEPS = st.one_of(
    st.tuples(st.just("start"), WORKERS, st.integers(0, 3)),
    st.tuples(st.just("end"), WORKERS, st.just(0)),
    st.tuples(st.just("fail"), WORKERS, st.integers(0, 3)),
    st.tuples(st.just("report"), WORKERS, st.just(0)),
    st.tuples(st.just("up"), WORKERS, st.just(0)),
    st.tuples(st.just("down"), WORKERS, st.just(0)),
    st.tuples(st.just("restart"), WORKERS, st.just(0)),
    st.tuples(st.just("share"), WORKERS, st.just(0)),
    st.tuples(st.sampled_from(["refused", "healthy", "silent"]), st.just(0), st.integers(0, 3)),
    st.tuples(st.sampled_from(["add", "drain", "remove"]), st.just(0), st.integers(0, 3)),
)


def carry_out(router: Router, what: str, number: int, index: int) -> None:
    worker, hub = router.workers[number], router.hub
    router.now_s += 0.1

    def picked(fleet: Fleet) -> Engine | None:
        engines = fleet.engines
        return engines[index % len(engines)] if engines else None

    match what:
        case "start":
            if (engine := picked(worker.fleet)) is not None:
                worker.fleet.note_start(engine)
                worker.running.append(engine)
        case "end":
            if worker.running:
                worker.fleet.note_end(worker.running.pop())
        case "fail":
            if (engine := picked(worker.fleet)) is not None:
                failure = LegFailure("unreachable", engine.url, "it is away", was_sent=False)
                worker.fleet.health.note_failure(engine, failure, router.now_s)
        case "report":
            worker.report()
        case "share":
            hub.report()
        case "up" | "down":
            router.deliver(number, is_up=what == "up")
        case "restart":
            router.restart(number)
        case "refused" | "healthy" | "silent":
            if (engine := picked(hub.fleet)) is not None:
                router.probe(engine, Probe(what))
        case "add":
            known = hub.fleet.find(("decode", NEW))
            if known is None or known.drain_until_s is not None:
                hub.fleet.add(Member("decode", NEW), 0.0)
                hub.fleet.tell(Joined(Member("decode", NEW)))
        case "drain" | "remove":
            if (engine := picked(hub.fleet)) is not None:
                hub.fleet.drain(engine, router.now_s + 1.0, is_leaving=what == "remove")
                hub.fleet.tell(Drains(engine.key, 1.0, is_leaving=what == "remove"))


@given(st.lists(STEPS, max_size=60))
def test_all_processes_end_up_with_one_fleet(steps: list[tuple[str, int, int]]) -> None:
    router = Router()
    for step in steps:
        carry_out(router, *step)
    for worker in router.workers.values():
        while worker.running:
            worker.fleet.note_end(worker.running.pop())
    router.settle()
    router.now_s += 10.0
    for engine in router.hub.fleet.engines:
        router.probe(engine, Probe("healthy"))
    router.settle()
    hub = {engine.key: engine for engine in router.hub.fleet.engines}
    for worker in router.workers.values():
        seen = {engine.key: engine for engine in worker.fleet.engines}
        assert seen.keys() == hub.keys()
        for key, engine in seen.items():
            assert (engine.status, engine.is_eligible) == (hub[key].status, hub[key].is_eligible)
            assert (engine.load, hub[key].load) == (0, 0)
            totals = engine.num_requests + engine.elsewhere.num_requests
            assert totals == hub[key].elsewhere.num_requests


def test_a_process_knows_how_busy_the_others_keep_an_engine() -> None:
    router = Router()
    for number, count in ((0, 3), (1, 2)):
        for _ in range(count):
            carry_out(router, "start", number, 1)
    router.settle()
    assert [worker.fleet.engines[1].load for worker in router.workers.values()] == [5, 5, 5]
    assert router.hub.fleet.engines[1].load == 5
    assert [worker.links.replica.num_requests_elsewhere for worker in router.workers.values()] == [2, 3, 5]
    router.restart(0)
    router.settle()
    assert [worker.fleet.engines[1].load for worker in router.workers.values()] == [2, 2, 2]


def test_a_session_goes_on_in_another_process_and_its_turn_is_used_once() -> None:
    router = Router()
    one, two, three = router.workers.values()
    keeper = one.fleet.engines[2]
    one.view.turns.put("s", Turn(keeper, {"n": 1}), 0.0)
    router.settle()
    turn = two.view.turns.take("s", 1.0)
    assert turn is not None
    assert (turn.keeper, turn.params) == (two.fleet.engines[2], {"n": 1})
    router.settle()
    assert [worker.view.turns.take("s", 1.0) for worker in (one, three)] == [None, None]
    two.view.turns.put("s", Turn(two.fleet.engines[2], {"n": 2}), 2.0)
    router.settle()
    three.view.turns.put("s", Turn(three.fleet.engines[2], {"n": 3}), 3.0)
    router.settle()
    # Only one process takes the replaced turn back.
    assert [worker.taken_back for worker in (one, two, three)] == [[], [], [{"n": 2}]]
    router.restart(0)
    turn = router.workers[0].view.turns.take("s", 4.0)
    assert turn is not None
    assert turn.params == {"n": 3}


def test_what_a_pair_does_not_do_is_learned_by_all() -> None:
    router = Router()
    for number in range(FAILURES_TO_STOP):
        worker = router.workers[number % NUM_WORKERS]
        producer, consumer, _ = worker.fleet.engines
        worker.view.note_handoff(producer, consumer, "computed", 1.0)
    router.settle()
    for process in (router.hub, *router.workers.values()):
        producer, consumer, _ = process.fleet.engines
        assert process.view.pairs.why_not(producer, consumer, 2.0) is not None


def test_an_engine_that_the_other_processes_have_removed_has_no_load_there() -> None:
    process, way = Process(Router()), Way()
    process.links.join(way)
    engine = process.fleet.engines[-1]
    rows = [EngineLoad(engine.key, 1, num_requests=3, num_failures=0, num_heard=2, num_queued_tokens=9)]
    process.hear(Load(1, rows), way)
    assert (engine.load, engine.queued_tokens) == (1, 9)
    process.hear(NOTHING, way)
    assert (engine.load, engine.queued_tokens, engine.elsewhere.num_heard) == (0, 0, 2)
