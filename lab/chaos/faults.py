"""The faults of the matrix: how each begins, how long it lasts and how it ends."""

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lab.chaos.load import Load
from lab.chaos.modes import DECODE, ENGINES, PREFILL, Feature
from lab.chaos.rules import FRONT, Rule
from lab.chaos.system import END_S, PLAIN, EngineProcess, System, SystemFailed, Variant, wait_until

RESTART_S = 60.0  # Time limit for an engine that was asked to end; a drain takes at most 30 s.
SHORT_S = 4.0

Action = Callable[["FaultContext"], None]


@dataclass
class FaultContext:
    """What a fault acts on: the system and its load."""

    system: System
    load: Load
    rng: random.Random
    num_updates: int = 8  # Updates of all engines together, where weights change.

    def engine(self, name: str) -> EngineProcess:
        return self.system.engines[name]

    def rules(self, *rules: Rule) -> None:
        self.system.network.replace_rules(rules)


@dataclass(frozen=True)
class Fault:
    """One fault.

    `target` is the engine that does not serve during the fault and has to serve again after it.
    """

    name: str
    what: str
    begin: Action
    end: Action
    lasts_s: float = SHORT_S
    target: str | None = None
    needs: frozenset[Feature] = frozenset()
    variant: Variant = PLAIN
    open_defects: str = ""  # A known defect that is not fixed yet; shown in the report's table.
    keeps_streams: bool = False  # Other engines continue the streams of those that fail.
    is_planned: bool = False  # No request may fail.
    keeps_loans: bool = False  # No loan may end by time: engines and network are sound.
    keeps_weights: bool = True  # If false, an answer of that time may be one with the other weights.
    strikes: bool = False  # The switch counts affected packets; with a count of 0 the cell shows nothing.


def _nothing(context: FaultContext) -> None:
    """Do nothing."""


def _kill(name: str, *, only: str | None = None) -> Action:
    """SIGKILL all processes of an engine, or only the first process with the name `only`."""

    def begin(context: FaultContext) -> None:
        engine = context.engine(name)
        victims = engine.processes_named(only)[:1] if only is not None else engine.processes()
        for process in victims:
            process.kill()

    return begin


def _kill_front_end_of_stopped_core(name: str) -> Action:
    def begin(context: FaultContext) -> None:
        engine = context.engine(name)
        for core in engine.processes_named("baton-core"):
            core.suspend()
        engine.processes()[0].kill()

    return begin


def _both(first: Action, second: Action) -> Action:
    def act(context: FaultContext) -> None:
        first(context)
        second(context)

    return act


def _restart(name: str) -> Action:
    return lambda context: context.engine(name).restart(RESTART_S)


def _restart_soon(name: str) -> Action:
    """Restart an engine whose processes have to be gone at once."""
    return lambda context: context.engine(name).restart(END_S)


def _send(name: str, number: signal.Signals) -> Action:
    return lambda context: context.engine(name).send(number)


def _ask_to_end(name: str) -> Action:
    return lambda context: context.engine(name).child.send_signal(signal.SIGTERM)


def _restart_all_in_turn(context: FaultContext) -> None:
    """Ask one engine after the other to end, and start it again; the next one when the router uses it."""
    system = context.system
    for name, engine in system.engines.items():
        engine.child.send_signal(signal.SIGTERM)
        engine.restart(RESTART_S)
        if not wait_until(lambda: engine.is_healthy() and system.is_in_use(name), system.start_s):  # noqa: B023
            raise SystemFailed(f"the router does not use {name} {system.start_s:g} s after its restart")


def _update_weights_in_turn(context: FaultContext) -> None:
    """Update the weights of one engine after the other, in random order, named or not; the next one when the
    router sees it and has answered some requests. The last round brings the first weights back.
    """
    system, rng = context.system, context.rng
    num_rounds = max(2, round(context.num_updates / len(system.engines) / 2) * 2)
    for number in range(1, num_rounds + 1):
        folder = system.other_model if number % 2 else system.model
        version = None if number == num_rounds else rng.choice([None, f"round {number}"])
        for name in rng.sample([*system.engines], len(system.engines)):
            before = system.router_says(name, "weights")
            system.engines[name].update_weights(folder, version)
            if not wait_until(lambda: system.router_says(name, "weights") != before, system.start_s):  # noqa: B023
                raise SystemFailed(f"the router does not see the other weights of {name}")
            # Requests of before may need an engine of the weights that they began with.
            seen_s = time.monotonic()
            wait_until(lambda: context.load.num_ended_since(seen_s) >= 2 * context.load.num_clients, 30.0)  # noqa: B023


def _signal_router(number: signal.Signals) -> Action:
    return lambda context: context.system.router.send_signal(number)


def _rules(*rules: Rule) -> Action:
    return lambda context: context.rules(*rules)


def _set_leave_share(share: float) -> Action:
    def act(context: FaultContext) -> None:
        context.load.leave_share = share

    return act


def _set_failing(status: str) -> Action:
    def act(context: FaultContext) -> None:
        context.system.failing.write_text(status)

    return act


def _role(name: str) -> str:
    return "a prefill engine" if name in PREFILL else "a decode engine"


def _death(key: str, how: str, name: str, begin: Action, restart: Action, *needs: Feature) -> Fault:
    """An engine ends and is restarted. `how` describes the fault and has a `{}` for the engine."""
    return Fault(
        f"{key}-{name[0]}",
        f"{how.format(_role(name))}, restart on the same ports",
        begin,
        restart,
        target=name,
        needs=frozenset(needs),
        keeps_streams=name in DECODE,
    )


def _stop(name: str, lasts_s: float) -> Fault:
    return Fault(
        f"stop-{name[0]}-{lasts_s:g}",
        f"SIGSTOP of {_role(name)} for {lasts_s:g} s",
        _send(name, signal.SIGSTOP),
        _send(name, signal.SIGCONT),
        lasts_s,
        target=name,
        keeps_streams=name in DECODE,
    )


def _between_engines(rule: Rule) -> list[Rule]:
    """Return the rule for every pair of a prefill and a decode engine, in both directions."""
    return [*_to_decode(rule), *_to_prefill(rule)]


def _to_decode(rule: Rule) -> list[Rule]:
    return [_from_to(rule, prefill, decode) for prefill in PREFILL for decode in DECODE]


def _to_prefill(rule: Rule) -> list[Rule]:
    return [_from_to(rule, decode, prefill) for prefill in PREFILL for decode in DECODE]


def _from_to(rule: Rule, source: str, target: str) -> Rule:
    fields = {name: getattr(rule, name) for name in rule.__struct_fields__}
    return Rule(**{**fields, "source": source, "target": target})


def _network(
    name: str, what: str, rules: Sequence[Rule], lasts_s: float = SHORT_S, *, by_packets: bool = False
) -> Fault:
    return Fault(
        name,
        what,
        _rules(*rules),
        _rules(),
        lasts_s,
        needs=frozenset({"network", "packets"} if by_packets else {"network"}),
        strikes=True,
    )


def _disk(name: str, what: str, begin: Action, end: Action, *, needs: Sequence[Feature] = ()) -> Fault:
    return Fault(name, what, begin, end, needs=frozenset({"storage", *needs}))


def _layer(
    name: str, what: str, *, needs: Sequence[Feature] = (), engines: Sequence[str], **values: Any
) -> Fault:
    """A fault that sets values of the fault layer of these engines."""

    def begin(context: FaultContext) -> None:
        for engine in engines:
            context.system.layers[engine].set(**values)

    def end(context: FaultContext) -> None:
        for engine in engines:
            context.system.layers[engine].set()

    return Fault(name, what, begin, end, needs=frozenset(needs), variant=Variant(has_layer=True))


CUT = Rule(loss=1.0)


def _isolation(name: str) -> list[Rule]:
    """Drop every packet to or from that engine."""
    others = [other for other in (FRONT, *ENGINES) if other != name]
    return [_from_to(CUT, *pair) for other in others for pair in ((name, other), (other, name))]


FAULTS: Sequence[Fault] = (
    Fault("none", "no fault", _nothing, _nothing),
    *(_death("kill", "kill -9 of {}", name, _kill(name), _restart_soon(name)) for name in ("p0", "d0")),
    *(
        _death("core", "kill -9 of the core of {}", name, _kill(name, only="baton-core"), _restart(name))
        for name in ("p0", "d0")
    ),
    *(_death("term", "SIGTERM of {}", name, _ask_to_end(name), _restart(name)) for name in ("p0", "d0")),
    Fault(
        "rolling",
        "SIGTERM of each engine and restart, one after the other",
        _restart_all_in_turn,
        _nothing,
        keeps_streams=True,
        is_planned=True,
    ),
    _death(
        "front",
        "kill -9 of the front end of {} while its core is stopped",
        "p0",
        _kill_front_end_of_stopped_core("p0"),
        _restart_soon("p0"),
    ),
    _death("rank", "kill -9 of a rank of {}", "p0", _kill("p0", only="baton-rank"), _restart("p0"), "ranks"),
    Fault(
        "rank-p-restarts",
        "kill -9 of a rank of a prefill engine, which starts it again by itself",
        _kill("p0", only="baton-rank"),
        _nothing,
        target="p0",
        needs=frozenset({"ranks"}),
        variant=Variant(options=("--on-rank-death", "restart")),
    ),
    Fault(
        "kill-ps",
        "kill -9 of both prefill engines, restart",
        _both(_kill("p0"), _kill("p1")),
        _both(_restart_soon("p0"), _restart_soon("p1")),
        target="p0",
    ),
    Fault(
        "kill-ds",
        "kill -9 of both decode engines, restart",
        _both(_kill("d0"), _kill("d1")),
        _both(_restart_soon("d0"), _restart_soon("d1")),
        target="d0",
        keeps_streams=True,
        open_defects="E9: without a decode engine, no request is answered",
    ),
    Fault(
        "vanish-p",
        "a prefill engine's host disappears: no packet passes, then kill -9; restart",
        _both(_rules(*_isolation("p0")), _kill("p0")),
        _both(_restart_soon("p0"), _rules()),
        target="p0",
        needs=frozenset({"network"}),
        strikes=True,
    ),
    *(_stop(name, lasts_s) for name in ("p0", "d0") for lasts_s in (2.0, 15.0, 60.0)),
    Fault(
        "stop-router",
        "SIGSTOP of the router for 2 s",
        _signal_router(signal.SIGSTOP),
        _signal_router(signal.SIGCONT),
        2.0,
    ),
    _network(
        "loss",
        "5 % of the packets between P and D are lost",
        _between_engines(Rule(loss=0.05)),
        by_packets=True,
    ),
    _network(
        "delay",
        "each packet between P and D is delayed by 50 to 100 ms",
        _between_engines(Rule(delay_s=0.05, jitter_s=0.05)),
    ),
    _network(
        "reorder",
        "20 % of the packets between P and D are overtaken",
        _between_engines(Rule(reorder=0.2)),
        by_packets=True,
    ),
    _network(
        "duplicate",
        "20 % of the packets between P and D arrive twice",
        _between_engines(Rule(duplicate=0.2)),
        by_packets=True,
    ),
    _network("rate", "at most 1 MB/s between each P and D", _between_engines(Rule(rate_bytes_s=1e6))),
    _network("cut-to-d", "no packet from P to D", _to_decode(CUT)),
    _network("cut-to-p", "no packet from D to P", _to_prefill(CUT)),
    _network("partition", "no packet between P and D", _between_engines(CUT)),
    _network("partition-15", "no packet between P and D for 15 s", _between_engines(CUT), 15.0),
    _network(
        "partition-router",
        "no packet between the router and one prefill engine",
        [_from_to(CUT, FRONT, "p0"), _from_to(CUT, "p0", FRONT)],
    ),
    _network(
        "reset",
        "one packet in 50 between P and D resets its connection",
        _between_engines(Rule(reset=0.02)),
    ),
    _network(
        "corrupt-requests",
        "one bit flips in 3 of 10 packets of read requests, with a valid TCP checksum",
        _to_prefill(Rule(channel="data", corrupt=0.3)),
    ),
    _network(
        "corrupt-answers",
        "one bit flips in 3 of 10 packets of read answers, with a valid TCP checksum",
        _to_decode(Rule(channel="data", corrupt=0.3)),
    ),
    _network(
        "corrupt-control",
        "one bit flips in 1 of 10 packets of control channels, with a valid TCP checksum",
        _between_engines(Rule(channel="control", corrupt=0.1)),
    ),
    _disk(
        "disk-full",
        "no byte is free in the shared folder",
        lambda context: context.system.disk.fill(),
        lambda context: context.system.disk.empty(),
        needs=("mount",),
    ),
    _disk(
        "disk-read-only",
        "the shared folder is mounted read-only",
        lambda context: context.system.disk.set_read_only(True),
        lambda context: context.system.disk.set_read_only(False),
        needs=("mount",),
    ),
    _disk(
        "disk-corrupt",
        "one bit flips in half of the files, a quarter lose their end",
        lambda context: context.system.disk.corrupt(context.rng),
        _nothing,
    ),
    _disk(
        "disk-fifos",
        "every second file is replaced by a FIFO",
        lambda context: context.system.disk.put_fifos(context.rng),
        lambda context: context.system.disk.remove_fifos(),
    ),
    _disk("disk-gone", "all files are removed", lambda context: context.system.disk.remove_files(), _nothing),
    _layer(
        "disk-slow",
        "each file call takes 100 ms longer",
        needs=("storage",),
        engines=ENGINES,
        delay_s=0.1,
    ),
    _layer("disk-hung", "no file call returns", needs=("storage",), engines=ENGINES, is_hung=True),
    _layer(
        "clock-forward",
        "the wall clocks of one P and one D step one hour forward, then back",
        engines=("p0", "d0"),
        clock_offset_s=3600,
    ),
    _layer(
        "clock-back",
        "the wall clocks of one P and one D step one hour back, then forward",
        engines=("p0", "d0"),
        clock_offset_s=-3600,
    ),
    Fault("tiny-pools", "80 blocks: four prompts", _nothing, _nothing, variant=Variant(num_blocks=80)),
    *(
        Fault(
            f"errors-{status}",
            f"a healthy decode engine answers each request with {status} at once",
            _set_failing(str(status)),
            _set_failing(""),
            lasts_s=8.0,
            variant=Variant(has_failing=True),
            is_planned=True,
        )
        for status in (500, 429)
    ),
    Fault(
        "weights",
        "other weights for each engine, one after the other, several times",
        _update_weights_in_turn,
        _nothing,
        lasts_s=0.0,
        variant=Variant(takes_weights=True),
        keeps_weights=False,
        is_planned=True,
    ),
    Fault(
        "disconnects",
        "8 of 10 clients disconnect within 0.4 s",
        _set_leave_share(0.8),
        _set_leave_share(0.0),
        keeps_loans=True,
    ),
)


def fault_named(name: str) -> Fault:
    """Return the fault with this name. Raises KeyError."""
    return {fault.name: fault for fault in FAULTS}[name]
