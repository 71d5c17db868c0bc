"""Updates of the weights while KV changes hands: what was computed with others is not used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import BadTransferParams
from baton.core.prefilled import PrefilledTokens
from baton.engine.request import RequestStatus
from baton.protocol.messages import Announced, Failed, Hello, Renewed
from tests.connectors.pull_world import BLOCK, Engine, FakeRequest, World
from tests.connectors.push_world import PushWorld, stream_params

TOKENS = list(range(1, 11))
NUM_BLOCKS = 3


@pytest.fixture
def push_world() -> Iterator[PushWorld]:
    world = PushWorld()
    yield world
    world.close()


@pytest.fixture
def p(world: World) -> Engine:
    return world.engine("p")


@pytest.fixture
def d(world: World) -> Engine:
    return world.engine("d")


def assert_no_fault(d: Engine, num_failures: int = 1) -> None:
    assert d.counted("failures") == {"other weights": num_failures}
    assert d.counted("peer_failures") == {}


def assert_dropped(world: World, d: Engine, request: FakeRequest) -> None:
    """The host got a failed load, and no engine is counted for it."""
    world.settle()
    assert d.read_out(request).valid_tokens == 0
    assert_no_fault(d)
    world.assert_settles_whole()


def assert_delivered(world: World, p: Engine, d: Engine, request_id: str = "fresh") -> None:
    request = d.fetch(request_id, TOKENS, p.prefill(request_id, TOKENS))
    world.settle()
    outcome = d.read_out(request)
    assert outcome.valid_tokens == len(TOKENS)
    assert d.holds(TOKENS, outcome.block_ids)
    world.assert_settles_whole()


# --- D changes its weights ---------------------------------------------------------------------------


def test_a_reserved_load_is_dropped_and_the_prompt_computed(world: World, p: Engine, d: Engine) -> None:
    request = d.submit("r", TOKENS, p.prefill("r", TOKENS))
    d.set_weights("v2")
    assert not d.admit(request)
    world.settle()
    assert_no_fault(d)
    world.assert_whole()  # P's loan ended at once, too.


def test_under_policy_fail_a_reserved_load_fails_as_any_other(world: World) -> None:
    p, d = world.engine("p"), world.engine("d", policy="fail")
    request = d.submit("r", TOKENS, p.prefill("r", TOKENS))
    d.set_weights("v2")
    assert d.admit(request)
    assert d.half.get_load_failure("r") == "other weights"
    assert_dropped(world, d, request)


def test_a_load_is_dropped_before_its_reads_begin(world: World, p: Engine, d: Engine) -> None:
    request = d.fetch("r", TOKENS, p.prefill("r", TOKENS))
    d.set_weights("v2")
    assert_dropped(world, d, request)


def test_the_blocks_of_a_dropped_load_wait_for_its_reads(world: World, p: Engine, d: Engine) -> None:
    world.network.hold()
    request = d.fetch("r", TOKENS, p.prefill("r", TOKENS))
    world.settle()
    d.set_weights("v2")
    d.half._fetches.weights_changed(world.now)  # Nothing is dropped twice.
    assert d.half.num_open_fetches == 1
    assert "r" in d.parked, "a read may still write"
    world.network.release()
    assert_dropped(world, d, request)


def received(world: World, d: Engine) -> None:
    """The load of the only request is delivered, and not reported."""
    world.wire.drop = [Renewed]
    world.settle()
    world.wire.drop = []
    world.now += 1.5
    while world.wire.deliver():
        pass
    assert d.half._fetches.received


def test_a_load_is_dropped_after_its_delivery_and_before_its_report(
    world: World, p: Engine, d: Engine
) -> None:
    request = d.fetch("r", TOKENS, p.prefill("r", TOKENS))
    received(world, d)
    d.set_weights("v2")
    assert d.half.get_load_failure("r") == "other weights"
    assert_dropped(world, d, request)
    assert len(d.counted("failed")) == 1


def test_an_aborted_load_that_is_not_reported_stays_aborted(world: World, p: Engine, d: Engine) -> None:
    request = d.fetch("r", TOKENS, p.prefill("r", TOKENS))
    received(world, d)
    d.abort(request)
    d.set_weights("v2")
    world.assert_settles_whole()
    assert d.counted("failures") == {}


def test_the_tokens_of_a_dropped_load_are_not_used(world: World, p: Engine, d: Engine) -> None:
    params = p.prefill("r", TOKENS, prefilled_tokens=PrefilledTokens((7,)))
    d.submit("r", TOKENS, params)
    d.set_weights("v2")
    assert d.half.take_prefilled_tokens("r") is None


def test_an_update_to_the_same_weights_changes_nothing(world: World, p: Engine, d: Engine) -> None:
    request = d.fetch("r", TOKENS, p.prefill("r", TOKENS))
    d.set_weights("", weights="weights")
    world.settle()
    assert d.read_out(request).valid_tokens == len(TOKENS)


def test_a_reset_without_other_weights_forgets_nothing(world: World, p: Engine, d: Engine) -> None:
    request = d.fetch("r", TOKENS, p.prefill("r", TOKENS))
    assert d.half.reset_cache()
    world.settle()
    assert d.read_out(request).valid_tokens == len(TOKENS)


# --- P changes its weights ---------------------------------------------------------------------------


def test_a_loan_from_before_is_delivered_to_the_old_weights_only(world: World) -> None:
    p, d, new = world.engine("p"), world.engine("d"), world.engine("new")
    assert_delivered(world, p, d, "greeting")  # D knows P.
    first, second = p.prefill("r", TOKENS), p.prefill("s", TOKENS)
    p.set_weights("v2")
    new.set_weights("v2")
    request = d.fetch("r", TOKENS, first)
    world.settle()
    outcome = d.read_out(request)
    assert outcome.valid_tokens == len(TOKENS)
    assert d.holds(TOKENS, outcome.block_ids)
    assert not new.admit(new.submit("s", TOKENS, second))
    world.settle()
    assert new.counted("refused") == {"weights": 1}
    assert p.half.num_open_loans == 1, "its consumer may still come"


def test_a_prompt_that_was_computed_across_an_update_is_not_lent(world: World, p: Engine, d: Engine) -> None:
    request = FakeRequest("r", TOKENS, {"do_remote_decode": True})
    block_ids = p.compute_prompt(request)
    p.set_weights("v2")
    d.set_weights("v2")
    assert p.end_prompt(request, block_ids) is None
    assert_delivered(world, p, d)


def test_a_peer_that_has_other_weights_rests_for_a_second(world: World, p: Engine, d: Engine) -> None:
    params = p.prefill("r", TOKENS), p.prefill("s", TOKENS)
    p.set_weights("v2")
    for number, of_request in enumerate(params):
        request = d.fetch(f"r{number}", TOKENS, of_request)
        world.settle()
        assert d.read_out(request).valid_tokens == 0
        world.pass_time(1)
    assert_no_fault(d, 2)
    world.pass_time(60)  # A peer that is refused gets no message: its loans end by time.
    d.set_weights("v2")
    assert_delivered(world, p, d)


# --- Admission ---------------------------------------------------------------------------------------


def test_a_ticket_of_other_weights_is_computed_and_no_error_of_the_client(
    world: World, p: Engine, d: Engine
) -> None:
    params = p.prefill("r", TOKENS)
    d.set_weights("v2")
    assert not d.admit(d.submit("r", TOKENS, params))
    world.settle()
    assert d.counted("refused") == {"weights": 1}


def test_under_policy_fail_a_ticket_of_other_weights_says_why(world: World) -> None:
    p, d = world.engine("p"), world.engine("d", policy="fail")
    params = p.prefill("r", TOKENS)
    d.set_weights("v2")
    with pytest.raises(BadTransferParams, match=r"baton_ticket: is for other weights: an update .*version"):
        d.submit("r", TOKENS, params)


def test_an_introduction_is_signed_for_the_weights_of_its_moment(push_world: PushWorld) -> None:
    p, d = push_world.engine("p"), push_world.engine("d")
    before = stream_params(p, "t")
    for engine in (p, d):
        engine.set_weights("v2")
    assert not d.admit(d.submit("old", TOKENS, before))
    push_world.settle()
    assert d.counted("refused") == {"weights": 1}
    request = push_world.stream(p, d, TOKENS)
    p.prefill_in_chunks("r", len(TOKENS))
    push_world.end_delivered(d, request)


# --- Both change ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["pd", "dp"])
def test_equal_names_work_again_after_unlike_ones(world: World, order: str) -> None:
    engines = {"p": world.engine("p"), "d": world.engine("d")}
    p, d = engines["p"], engines["d"]
    assert_delivered(world, p, d, "first")
    for name in order:
        engines[name].set_weights("v2")
    assert_delivered(world, p, d, "second")
    for version in (None, "v3"):
        p.set_weights(version)
        d.set_weights(version)
        if version is None:  # Two engines never draw the same random version.
            assert not d.admit(d.submit("third", TOKENS, p.prefill("third", TOKENS)))
            world.pass_time(200)
    assert_delivered(world, p, d, "fourth")
    for engine in (p, d):
        engine.set_weights(None, weights="weights")  # Those of the start are back.
    assert_delivered(world, p, d, "fifth")
    assert sum(isinstance(m, Hello) for e in world.wire.carried for m in e.messages) >= 4, "greeted anew"


# --- Streams -------------------------------------------------------------------------------------------


def test_an_update_of_p_withdraws_its_streams_at_once(push_world: PushWorld) -> None:
    p, d = push_world.engine("p"), push_world.engine("d")
    request = push_world.stream(p, d, TOKENS)
    push_world.settle()
    p.prefill_in_chunks("r", BLOCK)
    p.set_weights("v2")
    push_world.wire.carried.clear()
    push_world.settle()
    sent = [message for envelope in push_world.wire.carried for message in envelope.messages]
    assert [message.has_new_weights for message in sent if isinstance(message, Failed)] == [True]
    assert d.read_out(request).valid_tokens == 0
    assert_no_fault(d)
    p.prefill_in_chunks("r", len(TOKENS) - BLOCK)
    assert p.finished["r"] is None
    assert not any(isinstance(m, Announced) for e in push_world.wire.carried for m in e.messages)
    push_world.assert_settles_whole()


def test_a_want_that_comes_late_hears_of_the_update_too(push_world: PushWorld) -> None:
    p, d = push_world.engine("p"), push_world.engine("d")
    p.begin("r", TOKENS)
    p.prefill_in_chunks("r", BLOCK)
    request = d.follow("r", TOKENS, p)  # D's Want is not delivered yet.
    d.admit(request)
    p.set_weights("v2")
    push_world.settle()
    assert d.read_out(request).valid_tokens == 0
    assert d.counted("failures") == {"other weights": 1}
    p.end_prefill("r", RequestStatus.FINISHED_ABORTED)
    push_world.assert_settles_whole()


def test_an_update_of_d_drops_its_stream_and_the_loan_is_taken_back(push_world: PushWorld) -> None:
    p, d = push_world.engine("p"), push_world.engine("d")
    request = push_world.stream(p, d, TOKENS)
    push_world.settle()
    p.prefill_in_chunks("r", BLOCK)
    d.set_weights("v2")
    push_world.settle()
    p.prefill_in_chunks("r", len(TOKENS) - BLOCK)
    assert_dropped(push_world, d, request)


def test_the_ticket_of_a_stream_is_compared_when_it_comes(push_world: PushWorld) -> None:
    """P is greeted and introduced with older weights than it computes this prompt with."""
    p, d = push_world.engine("p"), push_world.engine("d")
    greeting = push_world.stream(p, d, TOKENS)
    p.prefill_in_chunks("r", len(TOKENS))
    push_world.end_delivered(d, greeting)
    introduced = stream_params(p, "u")
    p.set_weights("v2")
    p.begin("s", TOKENS, "u")
    request = d.submit("s", TOKENS, introduced)
    assert d.admit(request)
    push_world.settle()
    p.prefill_in_chunks("s", BLOCK, len(TOKENS) - BLOCK)
    push_world.settle()
    assert d.read_out(request).valid_tokens == 0
    assert_no_fault(d)
    push_world.pass_time(60)
    push_world.assert_whole()


# --- Any order -----------------------------------------------------------------------------------------

_UPDATES = st.tuples(
    st.just("update"), st.sampled_from(["p", "d", "pd"]), st.sampled_from(["v1", "v2", "start", "unnamed"])
)
_LANES: list[list[tuple[str, ...]]] = [
    [("compute",), ("lend",), ("submit",), ("admit",), ("deliver",), ("step", "d"), ("carry",), ("settle",)],
    [("compute",), ("settle",), ("lend",), ("settle",), ("submit",), ("settle",), ("admit",), ("settle",)],
    [("follow",), ("admit",), ("carry",), ("chunk",), ("carry",), ("step", "d"), ("chunk",), ("settle",)],
    [("follow",), ("admit",), ("settle",), ("chunk",), ("settle",), ("chunk",), ("chunk",), ("settle",)],
    [("hold",), ("release",)],
    [("abort",), ("second",)],
]


@st.composite
def _histories(draw: st.DrawFn) -> list[tuple[str, ...]]:
    """Requests, each with its steps in order, and updates, in any interleaving."""
    lanes = [[*draw(st.sampled_from(_LANES))] for _ in range(draw(st.integers(1, 5)))]
    lanes += [[draw(_UPDATES)] for _ in range(draw(st.integers(0, 5)))]
    history = []
    while lanes:
        lane = draw(st.sampled_from(lanes))
        history.append(lane.pop(0))
        lanes = [of_one for of_one in lanes if of_one]
    return history


class Interleaving:
    """Requests, steps and updates of two engines in any order."""

    def __init__(self, world: PushWorld) -> None:
        self.world = world
        self.engines = {name: world.engine(name, num_blocks=96) for name in "pd"}
        self.p, self.d = self.engines["p"], self.engines["d"]
        self.computed: list[tuple[FakeRequest, list[int]]] = []
        self.tickets: list[tuple[str, list[int], dict[str, Any]]] = []
        self.submitted: list[FakeRequest] = []
        self.num_requests = 0

    def act(self, action: str, *arguments: str) -> None:
        simple: dict[str, Callable[[], object]] = {
            "deliver": self.world.wire.deliver,
            "settle": self.world.settle,
            "hold": self.world.network.hold,
            "release": self.world.network.release,
        }
        (simple.get(action) or getattr(self, f"_{action}"))(*arguments)
        self._check()

    def _check(self) -> None:
        """What is reported has been computed with exactly the weights that D has now."""
        for request_id, outcome in list(self.d.outcomes.items()):
            tokens = self.prompt(request_id)
            whole = range(outcome.valid_tokens // BLOCK)
            assert self.d.holds(tokens, outcome.block_ids, blocks=whole), "KV of other weights was delivered"
            self.d.read_out(FakeRequest(request_id, tokens, {"do_remote_prefill": True}))

    def prompt(self, request_id: str) -> list[int]:
        return [int(request_id[1:]) % 90 + 1, *TOKENS, 3]

    def new_request(self, kind: str) -> tuple[str, list[int]]:
        self.num_requests += 1
        request_id = f"{kind}{self.num_requests}"
        return request_id, self.prompt(request_id)

    def _update(self, names: str, version: str) -> None:
        weights = "weights" if version == "start" else None
        named = None if version in ("start", "unnamed") else version
        for name in names:
            self.engines[name].set_weights(named, weights=weights)

    def _compute(self) -> None:
        if len(self.computed) < 3:
            request = FakeRequest(*self.new_request("a"), {"do_remote_decode": True})
            self.computed.append((request, self.p.compute_prompt(request)))

    def _lend(self) -> None:
        if self.computed:
            request, block_ids = self.computed.pop(0)
            params = self.p.end_prompt(request, block_ids)
            if params is not None:
                self.tickets.append((request.request_id, request.prompt_token_ids, params))

    def _submit(self) -> None:
        if self.tickets and len(self.submitted) < 3:
            self.submitted.append(self.d.submit(*self.tickets.pop(0)))

    def _admit(self) -> None:
        if self.submitted:
            self.d.admit(self.submitted.pop(0))

    def _carry(self) -> None:
        """No engine makes a step: what is delivered is not reported."""
        while self.world.wire.deliver():
            pass

    def _abort(self) -> None:
        if self.d.parked:
            self.d.abort(next(iter(self.d.parked.values())).request)

    def _follow(self) -> None:
        if len(self.p.prefills) < 3 and len(self.submitted) < 3:
            request_id, tokens = self.new_request("b")
            self.submitted.append(self.d.follow(request_id, tokens, self.p, request_id))
            self.p.begin(request_id, tokens, request_id)

    def _chunk(self) -> None:
        for request_id, prefill in list(self.p.prefills.items())[:1]:
            missing = len(prefill.request.prompt_token_ids) - prefill.num_computed
            self.p.schedule(request_id, min(BLOCK, missing))
            self._step("p")

    def _step(self, name: str) -> None:
        self.engines[name].step()

    def _second(self) -> None:
        self.world.now += 1.0

    def end(self) -> None:
        """Everything ends; then engines with weights of one name hand over again."""
        self.world.network.release()
        self.act("update", "pd", "v3")
        while self.submitted or self.computed or self.p.prefills:
            for action in ("lend", "admit", "chunk"):
                self.act(action)
        for _ in range(500):
            self.world.now += 0.5
            self.act("settle")
        self.world.assert_whole()
        assert_delivered(self.world, self.p, self.d)
        request = self.world.stream(self.p, self.d, TOKENS)
        self.p.prefill_in_chunks("r", BLOCK, len(TOKENS) - BLOCK)
        self.world.end_delivered(self.d, request)


@given(_histories())
@settings(max_examples=100, deadline=None)
def test_delivered_kv_is_of_the_weights_that_d_has(history: list[tuple[str, ...]]) -> None:
    world = PushWorld()
    try:
        interleaving = Interleaving(world)
        for action in history:
            interleaving.act(*action)
        interleaving.end()
    finally:
        world.close()
