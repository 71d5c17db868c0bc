"""Health of engines in random histories: the engines that serve, and how soon one that is back serves."""

from dataclasses import dataclass, field
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.fleet.breaker import BACKOFF_MAX_S, SHARE_FIRST, Health, Probe
from baton.router.fleet.engine import Engine
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.policies import RoutedRequest
from baton.router.values.errors import LegFailure
from baton.router.values.members import Member
from baton.router.values.settings import ProbeSettings, RouterSettings

SETTINGS = ProbeSettings()
KINDS = get_args(get_type_hints(Probe)["kind"])
BACK_IN_S = 2.0
URLS = ("http://d:1", "http://d:2")


def opened() -> Health:
    health = Health(SETTINGS)
    assert health.on_probe(Probe("refused"), 0.0)
    return health


@pytest.mark.parametrize("kind", ["refused", "unhealthy"])
def test_an_answer_to_a_request_does_not_close_an_open_breaker(kind: str) -> None:
    health = Health(SETTINGS)
    health.on_probe(Probe(kind), 0.0)
    health.on_answer()
    assert health.breaker(0.0) == "open"


def test_the_share_grows_until_the_breaker_is_closed() -> None:
    health = opened()
    assert health.on_probe(Probe("healthy"), 10.0)
    ends_s = 10.0 + SETTINGS.slow_start_s
    times = [10.0, 10.0 + SETTINGS.slow_start_s / 2, ends_s]
    assert [health.share(now_s) for now_s in times] == pytest.approx([SHARE_FIRST, 0.55, 1.0])
    assert [health.breaker(now_s) for now_s in times] == ["half_open", "half_open", "closed"]


def test_one_failure_in_slow_start_opens_the_breaker_and_the_back_off_grows() -> None:
    health, now_s, waits = opened(), 0.0, []
    for _ in range(6):
        began_s = now_s
        while not health.is_up:
            health.on_probe(Probe("healthy"), now_s)
            now_s = health.probe_at_s if not health.is_up else now_s
        waits.append(now_s - began_s)
        assert health.on_failure(now_s, is_decisive=False)
    assert waits == [0.0, 0.5, 1.0, BACKOFF_MAX_S, BACKOFF_MAX_S, BACKOFF_MAX_S]
    while not health.is_up:
        now_s = health.probe_at_s
        health.on_probe(Probe("healthy"), now_s)
    now_s += SETTINGS.slow_start_s
    assert not health.on_failure(now_s, is_decisive=False)
    assert health.on_failure(now_s, is_decisive=True)
    assert health.on_probe(Probe("healthy"), now_s), "the back-off is forgotten"


def test_an_engine_that_stays_up_is_never_in_slow_start() -> None:
    health = Health(SETTINGS)
    for kind in ("healthy", "broken", "healthy", "silent", "slow", "healthy"):
        health.on_probe(Probe(kind), 5.0)
        assert (health.share(5.0), health.breaker(5.0)) == (1.0, "closed")


def test_an_engine_that_is_not_known_yet_may_be_asked_and_is_probed_at_once() -> None:
    health = Health()
    assert (health.status, health.is_up, health.probe_at_s) == ("unknown", True, 0.0)
    assert (health.share(0.0), health.breaker(0.0)) == (1.0, "closed")
    assert Health(status="down").status == "down"


def test_a_probe_follows_one_interval_after_the_last_one() -> None:
    health = Health(SETTINGS)
    health.on_probe(Probe("healthy"), 7.0)
    assert (health.status, health.probe_at_s) == ("up", 7.0 + SETTINGS.every_s)
    health.on_probe(Probe("broken"), 9.0)
    assert health.probe_at_s == 9.0 + SETTINGS.every_s


def test_silences_in_a_row_eject_and_the_second_probe_follows_at_once() -> None:
    health = Health(ProbeSettings(silences_to_eject=3, failures_to_eject=99))
    for kind in ("silent", "slow", "silent", "healthy", "silent", "silent"):
        assert not health.on_probe(Probe(kind), 5.0)
        assert health.probe_at_s == (5.0 if kind == "silent" else 5.0 + SETTINGS.every_s)
    assert not health.is_silent
    assert health.on_probe(Probe("silent"), 5.0)
    assert health.is_silent
    assert health.status == "down"


def test_an_engine_that_is_down_is_probed_more_often_and_when_its_back_off_ends() -> None:
    settings = ProbeSettings(every_s=10.0, down_every_s=3.0)
    health = Health(settings)
    health.on_probe(Probe("healthy"), 0.0)
    assert health.on_failure(2.0, is_decisive=True)
    assert health.probe_at_s == 5.0, "earlier than its next probe was due"
    health.on_probe(Probe("refused"), 5.0)
    assert health.probe_at_s == 8.0
    health.eject(5.5, 1.0)
    assert health.probe_at_s == 6.5
    health.on_probe(Probe("healthy"), 6.0)
    assert (health.status, health.probe_at_s) == ("down", 6.5)
    health.on_probe(Probe("healthy"), 6.5)
    assert health.status == "up"


def test_a_probe_at_the_end_of_the_back_off_is_not_repeated_at_once() -> None:
    health = Health(SETTINGS)
    health.eject(0.0, 6.5)
    health.on_probe(Probe("refused"), 6.5)
    assert health.probe_at_s == 6.5 + SETTINGS.down_every_s


def test_an_engine_that_starts_as_down_is_up_after_its_first_healthy_probe() -> None:
    health = Health(SETTINGS, status="down")
    assert health.on_probe(Probe("healthy"), 0.0)
    assert health.breaker(0.0) == "half_open"


def test_a_broken_probe_is_not_decisive() -> None:
    health = Health(ProbeSettings(failures_to_eject=3))
    assert [health.on_probe(Probe("broken"), 0.0) for _ in range(3)] == [False, False, True]


# --- Random histories of a fleet ------------------------------------------------------------------


@dataclass(eq=False)
class Leg:
    """A `Wait`."""

    fleet: Fleet
    engine: Engine
    has_begun: bool = False
    is_given_up: bool = False

    def give_up(self) -> None:
        self.is_given_up = True
        self.end()

    def hand_over(self) -> None:
        raise AssertionError("no drain here hands streams over")

    def end(self) -> None:
        self.engine.waits.pop(self, None)
        self.fleet.note_end(self.engine)


@dataclass
class World:
    now_s: float = 0.0
    turn: int = 0
    legs: list[Leg] = field(default_factory=list)
    fleet: Fleet = field(init=False)
    healthy_since_s: dict[Engine, float] = field(default_factory=dict)
    drains: list[tuple[Engine, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        urls = ("http://p:1",)
        self.fleet = Fleet(RouterSettings(prefill_urls=urls, decode_urls=URLS), unix_clock=lambda: 0.0)

    def probe(self, engine: Engine, probe: Probe) -> None:
        self.fleet.health.note_probe(engine, probe, self.now_s)
        if probe.kind == "healthy":
            self.healthy_since_s.setdefault(engine, self.now_s)
        else:
            self.healthy_since_s.pop(engine, None)

    def pass_time(self, seconds: float) -> None:
        """Engines that were healthy in their last probe stay so."""
        until_s = self.now_s + seconds
        while self.healthy_since_s:
            due = min(self.healthy_since_s, key=lambda engine: engine.health.probe_at_s)
            if due.health.probe_at_s > until_s:
                break
            self.now_s = max(self.now_s, due.health.probe_at_s)
            self.probe(due, Probe("healthy"))
        self.now_s = until_s
        for engine, ends_s in self.drains:
            if ends_s <= self.now_s:
                self.fleet.end_drain(engine, self.now_s)

    def request(self) -> None:
        self.turn += 1
        engine = self.fleet.choice.choose("decode", RoutedRequest(self.turn), self.now_s)
        candidates = [other for other in self.fleet.engines if other.role == "decode" and other.is_eligible]
        assert (engine is None) == (not candidates)
        if engine is not None:
            assert engine in candidates
            leg = Leg(self.fleet, engine)
            engine.waits[leg] = None
            self.fleet.note_start(engine)
            self.legs.append(leg)

    def drain(self, engine: Engine, seconds: float, *, is_leaving: bool) -> None:
        until_s = self.now_s + seconds
        self.fleet.drain(engine, until_s, is_leaving=is_leaving)
        self.drains.append((engine, until_s))

    def add(self, url: str) -> None:
        engine = next((known for known in self.fleet.engines if known.url == url), None)
        if engine is None or engine.drain_until_s is not None:
            assert self.fleet.add(Member("decode", url), 0.0).is_eligible == (
                engine is not None and engine.is_up
            )

    def fail(self, leg: Leg, kind: str) -> None:
        self.healthy_since_s.pop(leg.engine, None)
        leg.end()
        self.fleet.health.note_failure(leg.engine, LegFailure(kind, "", "why", was_sent=True), self.now_s)

    def check(self) -> None:
        for engine, until_s in self.drains:
            if engine.is_removed:
                assert engine not in self.fleet.engines
                assert not engine.waits
                self.healthy_since_s.pop(engine, None)
            elif engine.drain_until_s == until_s <= self.now_s:
                assert not engine.waits
                assert not engine.is_leaving
        for engine in self.fleet.engines:
            assert engine.in_flight == len(engine.waits) >= 0
            since_s = self.healthy_since_s.get(engine)
            if since_s is not None and self.now_s >= since_s + BACK_IN_S:
                assert engine.is_up, "healthy for two seconds, and does not serve"
            if engine.health.is_silent:
                assert not engine.waits


steps = st.lists(
    st.one_of(
        st.tuples(st.just("probe"), st.integers(0, 2), st.sampled_from(KINDS)),
        st.tuples(st.just("request"), st.just(0), st.just("")),
        st.tuples(st.just("fail"), st.integers(0, 9), st.sampled_from(["broken", "timeout", "unreachable"])),
        st.tuples(st.just("answer"), st.integers(0, 9), st.just("")),
        st.tuples(st.just("begin"), st.integers(0, 9), st.just("")),
        st.tuples(st.sampled_from(["drain", "remove"]), st.integers(0, 2), st.sampled_from(["now", "later"])),
        st.tuples(st.just("add"), st.integers(0, 1), st.just("")),
        st.tuples(st.just("time"), st.sampled_from([0, 1, 4, 20]), st.just("")),
    ),
    max_size=60,
)


@given(steps=steps)
def test_random_histories(steps: list[tuple[str, int, str]]) -> None:
    world = World()
    for what, number, kind in steps:
        open_legs = [leg for leg in world.legs if leg in leg.engine.waits]
        leg = open_legs[number % len(open_legs)] if open_legs else None
        engines = world.fleet.engines
        match what:
            case "probe" if number < len(engines):
                world.probe(engines[number], Probe(kind))
            case "drain" | "remove" if number < len(engines):
                world.drain(engines[number], 0.0 if kind == "now" else 2.0, is_leaving=what == "remove")
                world.pass_time(0.0)
            case "add":
                world.add(URLS[number])
            case "request":
                world.request()
            case "time":
                world.pass_time(number / 4)
            case "fail" if leg is not None:
                world.fail(leg, kind)
            case "answer" if leg is not None:
                leg.end()
                world.fleet.health.note_answer(leg.engine, 200, world.now_s)
            case "begin" if leg is not None:
                leg.has_begun = True
        world.check()


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("has_begun", [False, True])
def test_legs_that_another_engine_can_take_over_are_given_up(has_begun: bool, is_last: bool) -> None:
    world = World()
    if is_last:
        world.probe(world.fleet.engines[2], Probe("refused"))
    while not world.legs or world.legs[-1].engine is not world.fleet.engines[1]:
        world.request()
    leg = world.legs[-1]
    leg.has_begun = has_begun
    world.probe(leg.engine, Probe("unhealthy"))
    assert not leg.is_given_up, "the engine finishes its requests"
    world.probe(leg.engine, Probe("healthy"))
    world.probe(leg.engine, Probe("refused"))
    assert leg.is_given_up is not (has_begun or is_last)


@given(now_s=st.floats(0.0, 1e6), phase=st.integers(0, 99).map(lambda drawn: drawn / 100))
def test_probes_come_at_the_engines_time_in_each_interval(now_s: float, phase: float) -> None:
    health, every_s = Health(SETTINGS), SETTINGS.every_s
    health.phase = phase
    for _ in range(3):
        health.on_probe(Probe("healthy"), now_s)
        assert now_s <= health.probe_at_s <= now_s + every_s
        now_s = health.probe_at_s + 0.001  # The probe takes some time.
    assert (now_s - phase * every_s) % every_s == pytest.approx(0.001, abs=1e-6)
