"""Engines whose /health is good and whose answers are errors: clients hardly see them, and they come back."""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from baton.cli.route import app
from baton.router.fleet.breaker import Probe
from baton.router.fleet.engine import Engine
from baton.router.fleet.outlier_detection import Tally, is_outlier, may_eject
from baton.router.fleet.policies import RoutedRequest
from baton.router.values.identity import ModelCard
from baton.router.values.settings import OutlierDetection, PolicyName
from tests.router.fakes import Call, FakeEngine, answers, lends, system
from tests.router.fleets import decoders, fleet_of

POLICIES: list[PolicyName] = ["least_in_flight", "round_robin"]
DETECTION = OutlierDetection()
ROUTE = ["--prefill", "http://p:1", "--decode", "http://d:1", "--outlier-detection"]
SERVICE_S = 1.0


@dataclass
class World:
    """Requests at a steady rate to decode engines, some of which fail a share of them; one retry each."""

    num_engines: int
    policy: PolicyName
    fails: dict[int, float]  # Failing share of an engine's requests, by engine.
    outcome: str = "500"
    seed: int = 0
    poison: float = 0.0  # Share of the requests that fail on every engine.
    rate: float = 10.0
    fails_after_s: float = 0.0
    fails_from_load: int = 0  # The engines fail only with so many requests at once.
    fails_model: str | None = None  # The engines fail only for this model.
    shares: dict[str, float] = field(default_factory=lambda: {"a": 1.0})  # Shares of the requests, by model.
    num_asked_for: Counter[tuple[int, str]] = field(default_factory=Counter)
    now_s: float = 0.0
    num_asked: dict[int, int] = field(default_factory=dict)
    num_ejections: dict[int, int] = field(default_factory=dict)
    errors_at_s: list[float] = field(default_factory=list)  # Times of errors that clients see.

    def __post_init__(self) -> None:
        self.fleet = fleet_of(1, self.num_engines, policy=self.policy)
        self.engines = decoders(self.fleet)
        for engine in self.engines:
            self.fleet.models.note_identity(engine, None, tuple(ModelCard(model) for model in self.shares))
        self.fleet.health.on_ejected.append(self._note_ejection)
        self._rng, self._turns, self._numbers = random.Random(self.seed), count(), count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def run(self, seconds: float) -> None:
        ends_s = self.now_s + seconds
        for number in range(int(seconds * self.rate)):
            self._after(number / self.rate, self._ask)
        for second in range(0, int(seconds), 2):
            self._after(second, self._probe)
        while self._due and self._due[0][0] <= ends_s:
            self.now_s, _, act = heapq.heappop(self._due)
            act()

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now_s + delay_s, next(self._numbers), act))

    def _probe(self) -> None:
        for engine in self.engines:
            self.fleet.health.note_probe(engine, Probe("healthy"), self.now_s)

    def _ask(self) -> None:
        [model] = self._rng.choices([*self.shares], [*self.shares.values()])
        request = RoutedRequest(next(self._turns), model=model)
        self._attempt(request, [], is_poison=self._rng.random() < self.poison)

    def _attempt(self, request: RoutedRequest, tried: list[Engine], *, is_poison: bool) -> None:
        engine = (
            self.fleet.choice.choose("decode", request, self.now_s, tried=tried) if len(tried) < 2 else None
        )
        if engine is None:
            if not is_poison:
                self.errors_at_s.append(self.now_s)
            return
        number = self.engines.index(engine)
        self.num_asked[number] = self.num_asked.get(number, 0) + 1
        self.num_asked_for[number, request.model] += 1
        may_fail = engine.load >= self.fails_from_load and self.fails_model in (None, request.model)
        self.fleet.note_start(engine)
        if not is_poison and not (may_fail and self._rng.random() < self.fails.get(number, 0.0)):
            return self._after(SERVICE_S, lambda: self._end(engine, "200", request))

        def fail() -> None:
            self._end(engine, self.outcome, request)
            self._attempt(request, [*tried, engine], is_poison=is_poison)

        return self._after(self.fails_after_s, fail)

    def _end(self, engine: Engine, outcome: str, request: RoutedRequest) -> None:
        self.fleet.health.note_answer(engine, int(outcome) if outcome.isdigit() else 200, self.now_s)
        self.fleet.health.note_outcome(engine, outcome, self.now_s, request.model)
        self.fleet.note_end(engine)

    def _note_ejection(self, engine: Engine) -> None:
        number = self.engines.index(engine)
        self.num_ejections[number] = self.num_ejections.get(number, 0) + 1


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(POLICIES),
    num_engines=st.integers(2, 6),
    share=st.sampled_from([0.6, 0.9, 1.0]),
    outcome=st.sampled_from(["500", "503", "429", "broken", "timeout"]),
)
def test_an_engine_that_fails_gets_few_requests_and_its_clients_get_others(
    seed: int, policy: PolicyName, num_engines: int, share: float, outcome: str
) -> None:
    world = World(num_engines, policy, {0: share}, outcome, seed)
    world.run(60.0)
    assert world.num_ejections.keys() <= {0}
    assert world.num_asked[0] <= max(
        60, 300 / num_engines
    )  # Half of its share of 600, or a tenth of them all.
    assert not world.errors_at_s, "another engine has answered"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("fails_after_s", "fails_from_load"), [(5.0, 0), (0.0, 3), (2.0, 3)])
def test_an_engine_may_fail_slowly_or_under_load_only(
    policy: PolicyName, fails_after_s: float, fails_from_load: int
) -> None:
    world = World(3, policy, {0: 1.0}, fails_after_s=fails_after_s, fails_from_load=fails_from_load)
    world.run(90.0)
    assert not world.errors_at_s
    assert world.num_ejections.keys() <= {0}
    num_failed = world.engines[0].answers[None].tally(world.now_s, 10.0).num_failed
    assert num_failed <= 10, "in the last seconds, of a hundred requests"


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(POLICIES),
    num_engines=st.integers(2, 6),
    outcome=st.sampled_from(["500", "429", "broken"]),
)
def test_an_engine_may_fail_for_one_model_only(
    seed: int, policy: PolicyName, num_engines: int, outcome: str
) -> None:
    world = World(num_engines, policy, {0: 1.0}, outcome, seed, fails_model="b", shares={"a": 0.8, "b": 0.2})
    world.run(120.0)
    assert not world.errors_at_s
    assert not world.num_ejections, "it goes on with the other model"
    num_here, num_there = (world.num_asked_for[0, model] for model in ("b", "a"))
    assert num_here <= max(20, 240 / num_engines / 4)
    assert num_there >= 960 / num_engines / 4


def test_an_engine_that_is_mended_for_one_model_gets_it_again() -> None:
    world = World(2, "round_robin", {0: 1.0}, fails_model="b", shares={"a": 0.8, "b": 0.2})
    world.run(60.0)
    world.fails = {}
    world.run(DETECTION.max_ejection_time_s + 60.0)
    world.num_asked_for.clear()
    world.run(60.0)
    assert world.num_asked_for[0, "b"] == pytest.approx(world.num_asked_for[1, "b"], rel=0.4)


@pytest.mark.parametrize("policy", POLICIES)
def test_some_of_a_hundred_engines_may_fail_at_once(policy: PolicyName) -> None:
    failing = dict.fromkeys(range(10), 1.0)
    world = World(100, policy, failing, rate=200.0)
    world.run(20.0)
    assert world.num_ejections.keys() == failing.keys()
    assert len(world.errors_at_s) <= 10, "requests that two engines have failed, of 4,000"
    assert max(world.num_asked[number] for number in failing) <= 10, "of 40"
    world.errors_at_s.clear()
    world.run(20.0)
    assert not world.errors_at_s
    assert max(world.num_asked.values()) <= 1.5 * 80, "no engine gets all requests of those that fail"


@pytest.mark.parametrize("policy", POLICIES)
def test_half_of_the_engines_may_fail_at_once(policy: PolicyName) -> None:
    world = World(4, policy, {0: 1.0, 1: 1.0})
    world.run(40.0)
    assert world.num_ejections.keys() == {0, 1}
    assert len(world.errors_at_s) <= sum(world.num_asked[number] for number in (0, 1)) / 2
    world.errors_at_s.clear()
    world.run(60.0)
    assert not world.errors_at_s


@pytest.mark.parametrize("policy", POLICIES)
def test_an_engine_that_is_mended_gets_its_share_again(policy: PolicyName) -> None:
    world = World(2, policy, {0: 1.0})
    world.run(60.0)
    world.fails, world.num_asked = {}, {}
    world.run(DETECTION.max_ejection_time_s + 60.0)
    world.num_asked = {}
    world.run(60.0)
    assert world.num_asked[0] == pytest.approx(world.num_asked[1], rel=0.3)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(POLICIES),
    num_engines=st.integers(2, 6),
    poison=st.sampled_from([0.05, 0.3, 0.9, 1.0]),
)
def test_requests_that_fail_on_every_engine_leave_a_fleet_that_serves(
    seed: int, policy: PolicyName, num_engines: int, poison: float
) -> None:
    world = World(num_engines, policy, {}, seed=seed, poison=poison)
    for _ in range(6):
        world.run(10.0)
        assert sum(one.is_up for one in world.engines) * 2 >= num_engines
    assert not world.errors_at_s, "other requests are answered"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_client_whose_requests_fail_everywhere_ejects_no_engine(policy: PolicyName) -> None:
    world = World(3, policy, {}, poison=0.5)
    world.run(120.0)
    assert not world.num_ejections


@given(
    own=st.builds(Tally, st.integers(1, 50), st.integers(0, 50)),
    peers=st.lists(st.builds(Tally, st.integers(0, 50), st.integers(0, 50)), max_size=4),
    in_row=st.integers(0, 9),
    on_trial=st.booleans(),
)
def test_no_engine_is_an_outlier_that_fails_as_its_peers_do(
    own: Tally, peers: list[Tally], in_row: int, on_trial: bool
) -> None:
    own = own._replace(num_failed=min(own.num_failed, own.num_answers))
    peers = [one._replace(num_failed=min(one.num_failed, one.num_answers)) for one in peers]
    if is_outlier(DETECTION, own, in_row, peers, on_trial=on_trial):
        assert own.num_failed
        asked = [one for one in peers if one.num_answers]
        assert not asked or min(one.share_failed for one in asked) < own.share_failed / 2
        assert on_trial or in_row >= 5 or (own.num_answers >= 10 and own.num_failed * 2 >= own.num_answers)


@given(st.integers(1, 20), st.data())
def test_half_of_the_engines_and_at_least_one_stay(num_engines: int, data: st.DataObject) -> None:
    num_up = data.draw(st.integers(0, num_engines))
    if may_eject(DETECTION, num_engines, num_up):
        assert num_up - 1 >= max(1, num_engines / 2)


# --- With the router's machine --------------------------------------------------------------------------


async def breaks_after_two_tokens(call: Call) -> None:
    await call.start(200, "text/event-stream")
    for _ in range(2):
        await call.piece(b'data: {"choices": [{"text": "x"}]}\n\n')
    call.cut()


async def test_streams_that_break_after_a_good_head_eject_their_engine() -> None:
    bad, good = FakeEngine(breaks_after_two_tokens), FakeEngine(answers)
    async with system([FakeEngine(lends)], [bad, good], policy="round_robin") as s:
        broken = 0
        for _ in range(60):
            broken += b"error" in (await s.complete(stream=True)).content
    assert 0 < broken <= 2 * DETECTION.consecutive_5xx


async def test_an_engine_that_asks_to_be_left_alone_is() -> None:
    async def refuses(call: Call) -> None:
        await call.answer(429, {"error": {"message": "too much"}}, retry_after="30")

    busy, other = FakeEngine(refuses), FakeEngine(answers)
    async with system([FakeEngine(lends)], [busy, other], policy="round_robin") as s:
        assert {(await s.complete()).status_code for _ in range(20)} == {200}
        assert len(busy.calls) == 1
        other.respond = refuses
        answer = await s.complete()
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "30"), "there is no other engine"


def test_the_settings_have_envoys_names_and_are_checked() -> None:
    found = CliRunner().invoke(app, [*ROUTE, '{"consecutive_5xx": 3}', "--show-config"])
    assert found.exit_code == 0, found.output
    for text in ('{"consecutive_5xx": 0}', '{"consecutive5xx": 3}', "[]", "{", "1e400"):
        found = CliRunner().invoke(app, [*ROUTE, text, "--show-config"])
        assert found.exit_code == 2, text
        assert "outlier_detection" in found.output
