"""A consumer with its only rank in the same process starts reads in the middle of a step."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from baton.connectors.pull.metadata import EndReads, ReadBlocks
from baton.connectors.pull.scheduler import boot_clock
from baton.contract import KVConnectorMetadata
from baton.core.config import EngineConfig
from baton.engine.request import RequestStatus
from tests.connectors.pull_world import FakeRequest, engine_config
from tests.connectors.wired_world import OURS, PATIENCE_S, Engine, ask, engines_of, lend, two


class Busy(Engine):
    """An engine in one long step: after `begin` its connector gets all messages but no calls of a step."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.woken = threading.Event()
        self.scheduler.bind_wake(self.woken.set)
        self.worker.bind_wake(self.woken.set)
        self.scheduler.bind_only_rank(self.worker)

    def begin(self) -> None:
        """The step begins, with the orders of a peer that has answered while the request was scheduled."""
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(None))  # type: ignore[arg-type]

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert self.woken.wait(PATIENCE_S), "nothing happened between steps"
            self.woken.clear()


@pytest.fixture
def start() -> Iterator[Callable[[EngineConfig], Busy]]:
    with engines_of(Busy) as start_engine:
        yield start_engine


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_a_prompt_arrives_in_the_middle_of_a_step(
    start: Callable[[EngineConfig], Busy], transport: str
) -> None:
    p, d = two(start, transport)
    params, theirs = lend(p, "r")
    ask(d, params)
    d.begin()
    d.wait_for(lambda: torch.equal(d.cache[:, OURS], p.cache[:, theirs]))
    # Only a step gives it to the request.
    assert d.handed_over() == set()


def test_the_lease_is_renewed_in_the_middle_of_a_step(start: Callable[[EngineConfig], Busy]) -> None:
    """The renewal is in time only if effects are executed at once: the next one is a minute away."""
    timers = {"ttl_s": 300.0, "loan_max_s": 600.0}
    extra = {"transports": ["local"], "timers": timers, "stream": "off"}
    p, d = (start(engine_config(name, extra=extra, connector="BatonPushConnector")) for name in ("p", "d"))
    introduction = p.scheduler.introduction()
    params: dict[str, object] = {
        "do_remote_prefill": True,
        "remote_engine_id": "p",
        "transfer_id": "t",
        "baton_introduction": introduction,
    }
    prefill = FakeRequest("r", list(range(30)), {"do_remote_decode": True, "transfer_id": "t"})
    p.scheduler.on_new_request(prefill)
    ask(d, params)
    d.begin()
    prefill.num_computed_tokens, prefill.status = 30, RequestStatus.FINISHED_LENGTH_CAPPED
    p.scheduler.request_finished(prefill, [9, 3, 4, 5, 0, 11, 12, 7])
    consumer = d.scheduler.scheduler_half._agent.consumer  # type: ignore[attr-defined]
    pause, patience = threading.Event(), time.monotonic() + PATIENCE_S
    while not consumer.is_held(1, boot_clock()):
        assert time.monotonic() < patience, "the lease was not renewed"
        pause.wait(0.01)


def test_a_failure_is_still_reported_by_a_step(start: Callable[[EngineConfig], Busy]) -> None:
    timers = {"round_trip_max_s": 0.05, "ttl_s": 2.0, "deadline_s": 1.0, "loan_max_s": 10.0}
    p, d = two(start, timers=timers)
    params, _ = lend(p, "r")
    p.shutdown()
    ask(d, params)
    assert d.handed_over() == set(OURS)


def test_an_order_that_fails_ends_its_own_claim(
    start: Callable[[EngineConfig], Busy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error occurs on the control thread, which must survive it for all other claims."""
    p, d = two(start)
    links = d.worker.worker_half._links  # type: ignore[attr-defined]
    read = links.read

    def break_once(order: ReadBlocks) -> None:
        monkeypatch.setattr(links, "read", read)
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(links, "read", break_once)
    params, _ = lend(p, "r")
    request = ask(d, params)
    assert d.handed_over() == set(OURS)
    d.scheduler.request_finished(request, [])

    params, theirs = lend(p, "again")
    ask(d, params, "again")
    assert d.handed_over("again") == set()
    assert torch.equal(d.cache[:, OURS], p.cache[:, theirs])


def test_effects_that_fail_are_counted_and_contained(
    start: Callable[[EngineConfig], Busy], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = two(start)
    half = d.scheduler.scheduler_half  # type: ignore[attr-defined]
    agent, absorb = half._agent, half._agent.on_effect

    def break_once(effect: object, now: float) -> None:
        monkeypatch.setattr(agent, "on_effect", absorb)
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(agent, "on_effect", break_once)
    params, _ = lend(p, "r")
    request = ask(d, params)
    d.begin()
    d.wait_for(lambda: agent.on_effect == absorb)
    stats = d.scheduler.get_kv_connector_stats()
    assert stats is not None
    assert stats.to_dict()["failures"] == {"internal error": 1}
    d.scheduler.request_finished(request, [])

    params, theirs = lend(p, "again")
    ask(d, params, "again")
    d.step_until(lambda output: "again" in (output.finished_recving or ()))
    assert torch.equal(d.cache[:, OURS], p.cache[:, theirs])


def test_without_a_bound_rank_orders_go_with_the_step(start: Callable[[EngineConfig], Busy]) -> None:
    """Hosts that plan one step while another one runs bind no rank."""
    p = start(engine_config("p", extra={"transports": ["local"]}))
    d = Engine(engine_config("d", extra={"transports": ["local"]}))
    try:
        params, _ = lend(p, "r")
        request = ask(d, params)
        seen: list[object] = []

        def build() -> KVConnectorMetadata:
            metadata = d.scheduler.build_connector_meta(None)  # type: ignore[arg-type]
            seen.extend(metadata.orders)  # type: ignore[attr-defined]
            return metadata

        pause = threading.Event()
        for _ in range(int(PATIENCE_S / 0.01)):
            build()
            if any(isinstance(order, ReadBlocks) for order in seen):
                break
            pause.wait(0.01)
        d.scheduler.request_finished(request, [])
        build()
        assert [type(order) for order in seen if isinstance(order, ReadBlocks | EndReads)] == [
            ReadBlocks,
            EndReads,
        ]
    finally:
        d.shutdown()
