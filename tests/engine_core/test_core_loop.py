"""Waiting of the core's process: it does not spin, and does not delay a request that can continue."""

import socket
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from baton.engine.api import (
    EngineOutput,
    EngineOutputs,
    EngineRequest,
    RequestError,
    SamplingParams,
    SchedulerStats,
)
from baton.engine.core.core_messages import Abort, AddRequest, Drain, Drained, FromCore, Outputs, Stop, ToCore
from baton.engine.core.core_process import (
    RESTARTS_MAX,
    RESTARTS_WITHIN_S,
    CoreLoop,
    Restarts,
    Stopping,
    StopSignal,
)
from baton.engine.core.step_waits import IDLE_S, Waker
from baton.engine.process.channel import Channel


class NoRanks:
    def death_filenos(self) -> list[int]:
        return []


@dataclass
class ScriptedCore:
    """Each step returns the next of `steps`: its outputs, and how many tokens it scheduled."""

    steps: list[tuple[EngineOutputs, int]]
    has_unfinished_requests: bool = False
    num_scheduled_tokens: int = 0
    has_progressed: bool = False
    is_woken: bool = False
    wake: Callable[[], None] = lambda: None
    executor: NoRanks = field(default_factory=NoRanks)
    seen: list[str] = field(default_factory=list)
    after_last_step: Callable[[], None] = lambda: None

    @property
    def has_requests(self) -> bool:
        return bool(self.steps)

    @property
    def is_drained(self) -> bool:
        return not self.steps

    def take_update_end(self) -> None:
        return None

    def bind_wake(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def drain(self, timeout_s: float) -> None:
        self.seen.append(f"drain {timeout_s:g}")

    def step(self) -> EngineOutputs:
        outputs, self.num_scheduled_tokens = self.steps.pop(0)
        self.has_progressed = bool(self.num_scheduled_tokens or outputs.outputs)
        if not self.steps:
            self.after_last_step()
        return outputs

    def add_request(self, request: EngineRequest) -> EngineOutput | None:
        self.seen.append(f"add {request.request_id}")
        if request.request_id == "bad":
            return EngineOutput(
                request_id="bad", new_token_ids=[], finish_reason="error", error=RequestError("too bad")
            )
        return None

    def abort(self, request_id: str) -> None:
        self.seen.append(f"abort {request_id}")


class World:
    def __init__(self, core: ScriptedCore) -> None:
        ours, theirs = socket.socketpair()
        self.front_end = Channel(theirs)
        self.core_end = Channel(ours)
        self.stop_signal = StopSignal()
        self.core = core
        self.waker = Waker()
        self.loop = CoreLoop(core, self.core_end, self.stop_signal, self.waker)  # type: ignore[arg-type]

    def send(self, *messages: ToCore) -> None:
        for message in messages:
            self.front_end.send_nowait(msgspec.msgpack.encode(message))

    def run(self) -> list[FromCore]:
        """Runs the loop until the core has read Stop. Returns the core's messages."""
        with pytest.raises(Stopping):
            self.loop.run()
        payloads = self.front_end.receive_nowait() if self.front_end.wait_readable(0.0) else []
        return [msgspec.msgpack.decode(payload, type=FromCore) for payload in payloads]

    def close(self) -> None:
        self.stop_signal.close()
        self.waker.close()
        self.front_end.close()
        self.core_end.close()


@pytest.fixture
def make_world():
    worlds: list[World] = []

    def make(core: ScriptedCore) -> World:
        worlds.append(World(core))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def empty(**stats: int) -> EngineOutputs:
    return EngineOutputs(outputs=[], stats=SchedulerStats(**stats))


TOKEN = EngineOutputs(outputs=[EngineOutput(request_id="a", new_token_ids=[1])], stats=SchedulerStats())


def test_messages_are_taken_in_order_and_refusals_answered_at_once(make_world) -> None:
    world = make_world(ScriptedCore([]))
    params = SamplingParams()
    asked = [
        EngineRequest(request_id=name, prompt_token_ids=[1], sampling_params=params, arrival_time_s=0.0)
        for name in ("good", "bad")
    ]
    world.send(*map(AddRequest, asked), Abort("good"), Stop())
    [answer] = world.run()
    assert isinstance(answer, Outputs)
    assert world.core.seen == ["add good", "add bad", "abort good"]
    assert [(o.request_id, o.error) for o in answer.outputs.outputs] == [("bad", RequestError("too bad"))]


def test_a_drain_is_checked_often_because_only_its_deadline_ends_it(make_world) -> None:
    world = make_world(ScriptedCore([(empty(), 0)], is_woken=True))
    world.send(Drain(60.0))
    world.loop._take_messages()
    assert world.loop.next_wait_s() == IDLE_S


def test_a_wait_ends_with_a_message(make_world) -> None:
    """A sleep of a minute would fail the suite."""
    world = make_world(ScriptedCore([(empty(), 0)], is_woken=True))
    world.send(Stop())
    world.loop._wait(60.0)
    with pytest.raises(Stopping):
        world.loop._take_messages()


def test_empty_steps_without_news_are_not_sent(make_world) -> None:
    held = empty(num_delayed_free=1)
    failing = empty(num_delayed_free=1, num_kv_load_failures=1)
    steps = [(TOKEN, 1), (held, 0), (held, 0), (failing, 0), (failing, 0), (held, 0), (held, 0)]
    world = make_world(ScriptedCore(steps))
    world.core.after_last_step = lambda: world.send(Stop())
    told = [message.outputs for message in world.run() if isinstance(message, Outputs)]
    assert told == [TOKEN, held, failing, failing, held]


def test_a_drain_is_over_when_nothing_is_held_any_more(make_world) -> None:
    world = make_world(ScriptedCore([(empty(num_delayed_free=1), 0)] * 2))
    world.core.after_last_step = lambda: world.send(Stop())
    world.send(Drain(60.0))
    with pytest.raises(Stopping):
        world.loop.run()
    assert world.core.seen == ["drain 60"]
    world.loop._report_drained()
    world.loop._report_drained()  # A second call reports nothing.
    told = [msgspec.msgpack.decode(p, type=FromCore) for p in world.front_end.receive_nowait()]
    assert [m for m in told if isinstance(m, Drained)] == [Drained(is_whole=True)]


def test_a_drain_that_reaches_its_deadline_reports_it(make_world) -> None:
    world = make_world(ScriptedCore([(empty(num_delayed_free=1), 0)] * 2))
    world.core.after_last_step = lambda: world.send(Stop())
    world.send(Drain(0.0))
    assert [m for m in world.run() if isinstance(m, Drained)] == [Drained(is_whole=False)]


# --- Ranks that die -----------------------------------------------------------------------------------


def test_ranks_are_restarted_a_limited_number_of_times() -> None:
    now = [0.0]
    restarts = Restarts(True, lambda: now[0])
    assert [restarts.may_restart() for _ in range(RESTARTS_MAX)] == [True] * RESTARTS_MAX
    now[0] = RESTARTS_WITHIN_S - 1
    assert not restarts.may_restart()
    now[0] = RESTARTS_WITHIN_S
    assert restarts.may_restart()


def test_ranks_are_not_restarted_by_default() -> None:
    assert not Restarts(False).may_restart()
