"""The router of a world: its real machine, fleet and policies, with doors of engines and clients around.

What is modelled is the shell: legs are `door.Door`, probes find an engine that is back, and what the router
knows of an engine is as old as its last probe.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from baton.core.engine_card import EngineCard
from baton.engine.api import EngineOutput, EngineRequest, SamplingParams
from baton.router.fleet.admission import Objective, Ticket
from baton.router.fleet.block_index import Match
from baton.router.fleet.breaker import Probe
from baton.router.fleet.engine import Engine
from baton.router.fleet.notes import Probed
from baton.router.fleet.policies import POLICIES, RoutedRequest
from baton.router.fleet.view import FleetView
from baton.router.request.events import (
    ClientGone,
    Close,
    Closed,
    Count,
    Doubt,
    Effect,
    Event,
    Found,
    Head,
    Hold,
    HoldOver,
    Look,
    Meet,
    Met,
    Over,
    Queue,
    Send,
    Stopped,
    TakeBack,
    tell_ended,
)
from baton.router.request.events import Leg as RouterLeg
from baton.router.request.learning import settle
from baton.router.request.machine import Machine, Request
from baton.router.values.dialects import COMPLETIONS, Dialect
from baton.router.values.errors import FailureKind
from baton.router.values.identity import Introduced
from baton.router.values.members import ROLES, Member
from baton.router.values.settings import AdmissionSettings, LegTimeouts, RouterSettings
from baton.router.values.sse import EventSplitter, data_of
from lab.sim.host.clients import Ask
from lab.sim.host.cluster import Cluster
from lab.sim.host.door import Door
from lab.sim.host.legs import Leg
from lab.sim.host.members import Members
from lab.sim.host.processes import NOTE_S, Process, Processes
from lab.sim.kernel.process import SOON_S

Role = Literal["prefill", "decode"]

PREFILL_S = 20.0
FIRST_TOKEN_S = 30.0
IMPATIENT_S = 0.5
PROBE_S = 2.0  # A probe waits so long for an answer.
PROBES_END_S = 30.0  # Afterwards only engines that are down are probed: no fault comes any more.
UPDATES_END_S = 100.0  # The same in worlds with updates, which may come late.
INTRODUCTION_MAX_S = 2.0  # How old what a router knows of an engine may be.
PREFILL_RATE = 1e4
LOOK_S = 0.5  # Interval between two looks at requests that wait: engines come and go.
ADMISSIONS = [
    AdmissionSettings(max_running=2),
    AdmissionSettings(max_tokens=1),
    AdmissionSettings(max_tokens=1, by_priority=True),
]
PULL_AMONG_PUSH = 0.2  # One pair of engines serves both kinds of routers.


class Plan(NamedTuple):
    """What all routers of a world have in common."""

    settings: Mapping[str, RouterSettings]  # Settings by mode.
    decode_rate: float  # Prefill speed of decode engines, in tokens per second.
    num_workers: int

    @classmethod
    def draw(cls, cluster: Cluster) -> Plan:
        world, rng = cluster.world, cluster.world.rng
        timeouts = LegTimeouts(prefill_s=PREFILL_S, first_byte_s=FIRST_TOKEN_S, answer_s=FIRST_TOKEN_S)
        settings: dict[str, Any] = {
            "prefill_urls": tuple(map(_url, cluster.producers)),
            "decode_urls": tuple(map(_url, cluster.consumers)),
            "policy": rng.choice(sorted(POLICIES)),
            "first_token": rng.random() < 0.7,
            "decode_leg": rng.choice(["at_once", "at_once", "late"]),
            "hedge_prefill": world.rng_of_hedges.random() < 0.5,
            "timeouts": timeouts,
            "admission": world.rng_of_queue.choice([None, None, *ADMISSIONS]),
        }
        by_mode = {mode: RouterSettings(**settings, mode=mode) for mode in ("pull", "push")}
        # `cost` hands a prompt over always, or unless P has a queue.
        decode_rate = world.rng_of_router.choice([1.0, PREFILL_RATE / 2])
        return cls(by_mode, decode_rate, world.rng_of_router.choice([0, 0, 0, 2, 3]))


class Router:
    dialect: Dialect = COMPLETIONS  # The dialect of all clients.

    def __init__(
        self,
        cluster: Cluster,
        plan: Plan,
        on_params: Callable[[str, dict[str, Any], Ask], None],
        on_start: Callable[[Processes], None],
    ) -> None:
        """`on_start`: the router has started, or started again."""
        self.cluster, self.world, self._machine = cluster, cluster.world, cluster.parts.router
        self.settings, self._decode_rate, self._num_workers = plan
        self.on_params, self._on_start = on_params, on_start
        self._next_id = 0
        # True: the router takes back, by their ids, transfers whose answer it has not read.
        self.takes_back_unseen = False
        self._answers: dict[str, _Answer] = {}
        first = {role: self.settings["pull"].option_urls(role) for role in ROLES}
        self.members = frozenset(Member(role, url) for role in ROLES for url in first[role])
        self._named = self.members  # Members that the source names now.
        self._start()

    def _start(self) -> None:
        self._met_at: dict[Engine, float] = {}
        self._probed: set[Engine] = set()
        self.processes = Processes(self.world, self._new_process, self._num_workers, self._note_all)
        self._on_start(self.processes)
        self.hub = self.processes.hub
        self._probed.update(self.hub.fleet.engines)
        for engine in self.hub.fleet.engines:
            self.world.after(self.world.rng.uniform(0, 1), partial(self._probe, engine))
        self._members = Members(self.world, self.hub, self.cluster.parts.membership, self._joined)
        self.name(self._named)

    def _joined(self, engine: Engine) -> None:
        self._probed.add(engine)
        self._probe(engine)

    def name(self, members: frozenset[Member]) -> None:
        """What the source of members names."""
        self._named = members
        if self.is_alive:
            self._members.name(members)

    def change_role(self, url: str, role: Role) -> None:
        if self.is_alive:
            self.world.note("router", f"{url} becomes a {role} engine")
            self._members.change_role(url, role)

    def _new_process(self) -> Process:
        process = Process(self.settings, _View, self.cluster.parts.replica, self._take_back, self.world)
        for engine in process.fleet.engines:
            engine.prefill_rate.note(PREFILL_RATE if engine.role == "prefill" else self._decode_rate)
        for view in process.views.values():
            view.new_transfer_id = self._new_id
            view.look_min_tokens = 0 if self.settings["pull"].policy == "cost" else None
        if process.admission is not None:
            process.admission.on_room = lambda: self._pump_soon(process)
        return process

    def _pump_soon(self, process: Process, seconds: float = 0.0) -> None:
        if not process.is_pump_due:
            process.is_pump_due = True
            self.world.after(seconds, partial(self._pump, process))

    def _pump(self, process: Process) -> None:
        process.is_pump_due = False
        if process.admission is not None and process.is_alive:
            tell_ended(process.admission.pump(self.world.now))
            if process.admission.num_waiting:
                self._pump_soon(process, LOOK_S)

    def wait(self, process: Process, ticket: Ticket, tell: Callable[[Any], None]) -> None:
        self.world.count("requests that wait in the router")
        ticket.tell = tell
        self._pump_soon(process, LOOK_S)

    def restart(self) -> None:
        """End the requests that run, and forget everything."""
        if not self.is_alive:
            return
        self.world.note("router", "restarts")
        self.world.count("router restarts")
        for answer in list(self._answers.values()):
            answer.ask.causes.add("the router was told to stop")
            answer.on(Stopped())
        self.processes.stop()
        self._start()

    @property
    def is_alive(self) -> bool:
        return self.hub.is_alive

    def kill(self, down_s: float) -> None:
        """Kill the router with all its processes. It starts again later, and has forgotten everything."""
        self.world.note("router", "is killed")
        self.world.count("routers killed")
        for answer in list(self._answers.values()):
            answer.ask.causes.add("the router was killed")
            answer.kill()
        self.processes.stop()
        self.world.after(down_s, self._start)

    def kill_worker(self) -> None:
        """Kill one worker. Clients and legs of it lose their connections. Another worker takes its place."""
        if self.processes.is_alone or len(self.processes.workers) < 2:
            return
        worker = self.world.rng_of_router.choice(self.processes.workers)
        self.world.note("router", "a worker is killed")
        self.world.count("router: workers killed")
        for answer in [answer for answer in self._answers.values() if answer.process is worker]:
            answer.ask.causes.add("a process of the router was killed")
            answer.kill()
        self.processes.end(worker)

    def _view(self, process: Process, mode: str, ask: Ask) -> FleetView:
        if not ask.is_probe:
            return process.views[mode]
        view = process.view(mode)
        view.admission = None
        assert isinstance(view, _View)
        view.urls = set(map(_url, ask.way or self.cluster.hosts))
        view.new_transfer_id = self._new_id
        return view

    def _new_id(self) -> str:
        return f"{self.world.rng.getrandbits(128):032x}"

    # --- Clients ----------------------------------------------------------------------------------

    def ask(self, ask: Ask) -> None:
        world, rng = self.world, self.world.rng
        is_push = self.cluster.mode == "push" and not world.chance(PULL_AMONG_PUSH)
        mode = "push" if is_push else "pull"
        process = self.hub if self.processes.is_alone else world.rng_of_router.choice(self.processes.workers)
        view = self._view(process, mode, ask)
        world.note("client", f"asks {ask.name} with {len(ask.prompt)} tokens")
        for engine in process.fleet.engines:
            met_at = self._met_at.get(engine, -INTRODUCTION_MAX_S)
            if engine.was_asked and world.now - met_at > INTRODUCTION_MAX_S:
                self._introduce(engine)
        body = {
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "stream": rng.random() < 0.7,
            "return_token_ids": True,
            "cache_salt": ask.salt,
            "priority": ask.priority,
        }
        if not self.dialect.has_token_ids:  # The prompt is in a field that the dialect does not know.
            body[self.dialect.texts[0]] = "word" * len(ask.prompt)
        objective = Objective(ask.priority, world.rng_of_queue.choice("ab"))
        request = Request(
            ask.name,
            body,
            dialect=self.dialect,
            session=ask.session or None,
            received_at_s=world.now,
            objective=objective,
        )
        answer = self._answers[ask.name] = _Answer(self, process, ask, self._machine(view, request))
        process.num_requests += 1
        answer.carry_out(answer.machine.begin(world.now))

    def hang_up(self, ask: Ask) -> None:
        answer = self._answers.get(ask.name)
        if answer is None:
            return
        self.world.note("client", f"hangs up on {ask.name}")
        self.world.count("hung up")
        answer.end("gone")
        answer.on(ClientGone())

    def forget(self, answer: _Answer) -> None:
        if self._answers.get(answer.ask.name) is answer:
            del self._answers[answer.ask.name]
            answer.process.num_requests -= 1

    # --- Engines ----------------------------------------------------------------------------------

    def meet(self, engine: Engine, then: Callable[[], None]) -> None:
        def asked() -> None:
            self._introduce(engine)
            then()

        self.world.after(self.world.spread(self.world.faults.leg_delay_s), asked)

    def look(self, prompt: list[int], then: Callable[[Found], None]) -> None:
        """Find anything: the index may have lost events, or missed that a cache was reset."""
        rng = self.world.rng_of_router
        # A prompt is handed over in a healthy world: the prefix that D reports must not be worth more.
        names = self.cluster.producers if self._decode_rate > 1.0 else self.cluster.hosts
        cached = {_url(name): Match.in_cache(rng.randint(0, len(prompt))) for name in names}
        home = random.Random(str(prompt)).getrandbits(64)
        self.world.count("prompts looked up")
        self.world.after(
            self.world.spread(NOTE_S), lambda: then(Found(rng.choice([0, len(prompt)]), cached, home))
        )

    def _introduce(self, engine: Engine) -> None:
        engine.was_asked = True
        host = self.cluster.hosts[_name(engine)]
        if not host.is_alive:
            return
        self._met_at[engine] = self.world.now
        # Worlds without updates are those of engines that report no identity.
        kv = host.half._identity.kv_identity if self.cluster.updates.happen else None
        card = EngineCard(host.engine_id, host.half.introduction(), kv_identity=kv, lends=("cache",))
        self.processes.of(engine).fleet.models.note_introduced(
            engine, Introduced("baton", card, 1 << 20, None, None)
        )

    def _note_all(self) -> None:
        for engine in self.hub.fleet.engines:
            self.note_status(engine)

    def note_status(self, engine: Engine) -> None:
        """Probe an engine that is down after a failure, until it is back."""
        if not engine.is_up and engine not in self._probed:
            self._probed.add(engine)
            self.world.after(
                max(0.0, engine.health.probe_at_s - self.world.now), partial(self._probe, engine)
            )

    def _probe(self, engine: Engine) -> None:
        if engine.is_removed:
            return self._probed.discard(engine)
        host, world = self.cluster.hosts[_name(engine)], self.world
        if host.is_alive and host.is_paused:
            num_heard = _num_heard(engine)
            return world.after(PROBE_S, lambda: self._noted(engine, _silent(engine, num_heard)))
        if host.is_alive:
            probe = Probe("unhealthy", "draining") if host.is_draining else Probe("healthy")
            return self._noted(engine, probe)
        return self._noted(engine, Probe("refused", "dead"))

    def _noted(self, engine: Engine, probe: Probe) -> None:
        world = self.world
        world.count(f"probe: {probe.kind}")
        if not self.is_alive or engine.is_removed:
            return
        self.hub.fleet.health.note_probe(engine, probe, world.now)
        self.hub.fleet.tell(Probed(engine.key, probe.kind, probe.why, None))
        end_s = UPDATES_END_S if self.cluster.updates.happen else PROBES_END_S
        if (world.now < end_s or not engine.is_up) and engine in self._probed:
            world.after(max(SOON_S, engine.health.probe_at_s - world.now), partial(self._probe, engine))
        else:
            self._probed.discard(engine)

    def _take_back(self, engine: Engine, params: Mapping[str, Any]) -> None:
        if "baton_ticket" not in params and not self.takes_back_unseen:
            return
        host = self.cluster.hosts[_name(engine)]
        delay_s = self.world.spread(self.world.faults.leg_delay_s)
        self.world.count("loans taken back")
        self.world.after(delay_s, lambda: host.when_awake(lambda: host.take_back(dict(params))))

    def take_back(self, effect: TakeBack) -> None:
        self._take_back(effect.engine, effect.params)

    def leg(
        self,
        name: str,
        ask: Ask,
        params: dict[str, Any] | None,
        first_s: float,
        on_output: Callable[[EngineOutput], None],
        on_failure: Callable[[FailureKind, bool], None],
        *,
        prompt: list[int] | None = None,
        max_tokens: int | None = None,
        output: Sequence[int] = (),
    ) -> Leg:
        world = self.world
        self._next_id += 1
        step_s = world.rng.uniform(-1e3, 1e3) if world.chance(world.faults.wall_steps) else 0.0
        request = EngineRequest(
            request_id=f"{ask.name}-{self._next_id}",
            prompt_token_ids=ask.prompt if prompt is None else prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens or ask.max_tokens, temperature=0.0),
            arrival_time_s=max(0.0, world.now + step_s),
            priority=ask.priority,
            cache_salt=ask.salt,
            kv_transfer_params=params,
            output_token_ids=list(output),
        )
        if world.chance(world.faults.router_retry):
            first_s = IMPATIENT_S
        return Leg(
            self.cluster, name, request, ask, first_s=first_s, on_output=on_output, on_failure=on_failure
        )


class _View(FleetView):
    urls: set[str] | None = None  # A probe's engines.

    def place(self, *args: Any) -> tuple[Engine, bool] | None:
        """A probe tests its engines, not the choice."""
        return None if self.urls is not None else super().place(*args)

    def choose(
        self,
        role: Role,
        routed: RoutedRequest,
        tried: Sequence[Engine],
        now_s: float,
        is_fit: Callable[[Engine], bool] = lambda engine: True,
    ) -> Engine | None:
        urls = self.urls
        return super().choose(
            role, routed, tried, now_s, lambda engine: (urls is None or engine.url in urls) and is_fit(engine)
        )


class _Answer:
    """The machine of one request, its legs, and what its client has been sent."""

    def __init__(self, router: Router, process: Process, ask: Ask, machine: Machine) -> None:
        self.router, self.process, self.ask, self.machine = router, process, ask, machine
        self._world = router.world
        self._is_killed = False
        self._doors: dict[RouterLeg, Door] = {}
        self._waiting: deque[Event] = deque()
        self._events = EventSplitter()
        self._is_stream = False
        self._body = b""
        self._error: str | None = None

    def on(self, event: Event) -> None:
        """An event that comes while effects are carried out has its turn after them."""
        if self._is_killed:
            return
        self._waiting.append(event)
        if len(self._waiting) > 1:
            return
        while self._waiting:
            self.carry_out(self.machine.on(self._waiting[0], self._world.now))
            self._waiting.popleft()

    def carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case RouterLeg():
                    self._doors[effect] = Door(self, effect)
                case Close(leg):
                    self._doors[leg].close()
                case Queue(ticket):
                    self.router.wait(self.process, ticket, self.on)
                case Look(prompt):
                    self.router.look(prompt, lambda found: self.on(found))
                case Meet(engine):
                    self.router.meet(engine, lambda: self.on(Met()))
                case Hold(seconds, transfer_id):
                    self._world.after(seconds, partial(self.on, HoldOver(transfer_id)))
                case Head(_, headers):
                    self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
                case Send(data, is_last):
                    self._take(data, is_last=is_last)
                case TakeBack():
                    self.router.take_back(effect)
                case Count(metric, labels):
                    shown = labels if metric == "prefills" else labels[:1]
                    self._world.count(" ".join(("router:", metric, *shown)))
                case Doubt():
                    self._settle_soon(effect)
                case Over(_, error):
                    self.router.forget(self)
                    if error is not None:
                        self.end("error", str(error))

    def _settle_soon(self, doubt: Doubt) -> None:
        def settled() -> None:
            outcome = settle(self.process.views["pull"], doubt, self._world.now)
            self._world.count(f"router: handoffs {outcome}")

        self.router.meet(doubt.lent.engine, lambda: self.router.meet(doubt.used.engine, settled))

    def closed(self, leg: RouterLeg) -> None:
        if self.process is self.router.hub:
            self.router.note_status(leg.engine)
        self.on(Closed(leg))

    def kill(self) -> None:
        self._is_killed = True
        for door in self._doors.values():
            door.close()
        self.router.forget(self)
        self.end("error", "connection lost")

    def end(self, outcome: str, message: str = "") -> None:
        if self.ask.outcome is not None:
            return
        engines = self.process.fleet.engines
        if outcome == "error" and not all(engine.is_up for engine in engines):
            self.ask.causes.add("an engine is down")
        if outcome == "error" and not any(engine.role == "decode" for engine in engines):
            self.ask.causes.add("one decode engine was removed, and the other has another role")
        self._world.count(f"client: {outcome}")
        self._world.note("client", f"{self.ask.name}: {outcome} {message}")
        self.ask.end(outcome, message)

    def _take(self, data: bytes, *, is_last: bool) -> None:
        if self.ask.outcome is not None:
            return
        if not self._is_stream:
            self._take_whole(json.loads(data))
            return
        self._events.push(data)
        while (event := self._events.next()) is not None:
            if (text := data_of(event)) != b"[DONE]":
                self._take_chunk(json.loads(text))
        if is_last:
            self.end("answered" if self._error is None else "error", self._error or "")

    def _take_whole(self, answer: dict[str, Any]) -> None:
        if "error" in answer:
            self.end("error", answer["error"]["message"])
            return
        self.ask.hear(answer["choices"][0]["token_ids"])
        self.end("answered")

    def _take_chunk(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self._error = chunk["error"]["message"]
        for choice in chunk.get("choices", [chunk] if "token_ids" in chunk else []):
            self.ask.hear(choice["token_ids"])


def _num_heard(engine: Engine) -> int:
    return engine.num_heard + engine.elsewhere.num_heard


def _silent(engine: Engine, num_heard: int) -> Probe:
    return Probe("silent" if _num_heard(engine) == num_heard else "slow", "no answer")


def _url(name: str) -> str:
    return f"http://{name}"


def _name(engine: Engine) -> str:
    return engine.url.removeprefix("http://")
