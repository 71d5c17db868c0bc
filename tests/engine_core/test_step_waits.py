"""Waits between steps of a core: no useless step is taken, and no useful step is missed."""

import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from engine_core_fakes import FACTORY, FakeSchedulerHalf, FakeWorkerHalf, factory

from baton.contract import KVConnectorTransferResults
from baton.core.config import KVTransferConfig
from baton.engine.api import EngineOutputs, SamplingParams
from baton.engine.core import step_waits
from baton.engine.core.step_waits import IDLE_S, LOOK_S, RETRY_S, StepWaits, Waker
from baton.engine.executor import ExecutorDied
from baton.engine.llm import LLM

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = list(range(20, 40))
ASYNC = {"matched": 16, "is_async": True}
STEPS_MAX = 50  # Bound for a request that needs a tenth of it.
NEVER_S = 60.0  # A sleep of this time fails the suite.


@dataclass
class Ranks:
    deaths: list[int] = field(default_factory=list)

    def death_filenos(self) -> list[int]:
        return self.deaths

    def check_alive(self) -> None:
        raise ExecutorDied("rank 1 is gone")


@dataclass
class SomeCore:
    has_requests: bool = True
    has_unfinished_requests: bool = False
    has_progressed: bool = False
    is_woken: bool = False
    wake: Callable[[], None] = lambda: None
    executor: Ranks = field(default_factory=Ranks)

    def bind_wake(self, wake: Callable[[], None]) -> None:
        self.wake = wake


@pytest.fixture
def waker():
    waker = Waker()
    yield waker
    waker.close()


def waits_of(core: SomeCore, waker: Waker) -> StepWaits:
    return StepWaits(core, waker)  # type: ignore[arg-type]


def test_waits_grow_while_only_loans_are_out(waker: Waker) -> None:
    core = SomeCore()
    waits = waits_of(core, waker)
    assert [waits.next_wait_s() for _ in range(8)] == [
        *(RETRY_S * factor for factor in (1, 2, 4, 8, 16)),
        *[IDLE_S] * 3,
    ]
    core.has_progressed = True
    assert waits.next_wait_s() == 0.0
    core.has_progressed = False
    assert waits.next_wait_s() == RETRY_S, "progress resets the wait"


def test_waits_stay_short_while_a_request_waits(waker: Waker) -> None:
    waits = waits_of(SomeCore(has_unfinished_requests=True), waker)
    assert {waits.next_wait_s() for _ in range(8)} == {RETRY_S}


def test_a_connector_that_wakes_us_is_not_polled(waker: Waker) -> None:
    waits = waits_of(SomeCore(has_unfinished_requests=True, is_woken=True), waker)
    assert {waits.next_wait_s() for _ in range(8)} == {LOOK_S}


def test_a_wait_ends_when_the_connector_wakes_us(waker: Waker) -> None:
    """Also if the signal came while the step still ran."""
    core = SomeCore(is_woken=True)
    waits = waits_of(core, waker)
    thread = threading.Timer(0.0, core.wake)
    thread.start()
    waits.wait(NEVER_S)
    thread.join()
    core.wake()
    core.wake()
    waits.wait(NEVER_S)
    assert select.select([waker], [], [], 0.0)[0] == [], "several signals wake it once"


def test_a_wait_ends_with_a_rank(waker: Waker) -> None:
    read, write = os.pipe()
    try:
        waits = waits_of(SomeCore(executor=Ranks([read])), waker)
        os.close(write)
        with pytest.raises(ExecutorDied, match="rank 1"):
            waits.wait(NEVER_S)
    finally:
        os.close(read)


@pytest.mark.parametrize("core", [SomeCore(has_progressed=True), SomeCore(has_requests=False)])
def test_a_core_with_work_or_without_requests_does_not_wait(
    waker: Waker, monkeypatch: pytest.MonkeyPatch, core: SomeCore
) -> None:
    core.is_woken = True
    monkeypatch.setattr(step_waits, "LOOK_S", NEVER_S)
    waits_of(core, waker).wait_for_more()


def test_a_waker_that_is_closed_can_be_called() -> None:
    waker = Waker()
    waker.close()
    waker.wake()
    waker.close()


# --- An engine in the caller's process -----------------------------------------------------------------


def make_llm(make_config: Any, monkeypatch: pytest.MonkeyPatch, *, is_woken: bool) -> tuple[LLM, list[int]]:
    """An engine, and the number of tokens of each step.

    Its connector holds loads until the test ends them.
    """
    for half in (FakeSchedulerHalf, FakeWorkerHalf):
        monkeypatch.setattr(half, "bind_wake", lambda self, wake: is_woken)
    transfer = KVTransferConfig(kv_connector="Fake", kv_role="kv_both")
    llm = LLM(make_config(kv_transfer_config=transfer), FACTORY)
    counts: list[int] = []
    step = llm.core.step

    def counting_step() -> EngineOutputs:
        outputs = step()
        counts.append(llm.core.num_scheduled_tokens)
        assert len(counts) < STEPS_MAX, "it spins"
        return outputs

    monkeypatch.setattr(llm.core, "step", counting_step)
    return llm, counts


def end_load() -> None:
    assert factory.worker is not None
    factory.worker.results = [KVConnectorTransferResults(set(), {"llm-0"})]


@pytest.mark.parametrize(("is_woken", "expected_s"), [(True, LOOK_S), (False, RETRY_S)])
def test_no_step_is_taken_while_all_wait_for_a_load(
    make_config: Any, monkeypatch: pytest.MonkeyPatch, is_woken: bool, expected_s: float
) -> None:
    waited_s = []

    def wait(waits: StepWaits, timeout_s: float) -> None:
        waited_s.append(timeout_s)
        end_load()

    monkeypatch.setattr(StepWaits, "wait", wait)
    llm, counts = make_llm(make_config, monkeypatch, is_woken=is_woken)
    with llm:
        [completion] = llm.generate([PROMPT], GREEDY, kv_transfer_params=[ASYNC])
    assert len(completion.token_ids) == 6
    assert waited_s == [expected_s]
    assert counts[:2] == [0, 0], "one step begins the load, one finds its end"
    assert all(counts[2:])


def test_the_end_of_a_load_wakes_a_waiting_engine(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_waits, "LOOK_S", NEVER_S)
    llm, counts = make_llm(make_config, monkeypatch, is_woken=True)
    assert factory.worker is not None

    def end_and_wake() -> None:
        end_load()
        llm._waker.wake()

    timer = threading.Timer(0.0, end_and_wake)
    monkeypatch.setattr(factory.worker, "start_load_kv", lambda context: timer.ident or timer.start())
    with llm:
        [completion] = llm.generate([PROMPT], GREEDY, kv_transfer_params=[ASYNC])
        timer.join()
    assert len(completion.token_ids) == 6
    assert counts.count(0) <= 2


def test_settling_waits_for_what_is_lent(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(waits: StepWaits, timeout_s: float) -> None:
        assert factory.worker is not None
        factory.worker.results = [KVConnectorTransferResults({"llm-0"})]

    monkeypatch.setattr(StepWaits, "wait", wait)
    llm, _ = make_llm(make_config, monkeypatch, is_woken=True)
    with llm:
        llm.generate([PROMPT], GREEDY, kv_transfer_params=[{"lend": True}])
        assert llm.core.has_requests
        llm.settle(NEVER_S)
        assert not llm.core.has_requests


def test_settling_has_an_end(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make_llm(make_config, monkeypatch, is_woken=True)
    with llm:
        llm.generate([PROMPT], GREEDY, kv_transfer_params=[{"lend": True}])
        with pytest.raises(TimeoutError, match="not at rest after 0 s"):
            llm.settle(0.0)
