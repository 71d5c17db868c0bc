"""The halves over a real control channel, real transports and real threads, in one process.

An engine that steps only when its connector wakes it misses nothing. A handoff needs no polling.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch

from baton.contract import KVConnectorOutput
from baton.core.config import ClusterSecret, EngineConfig
from baton.testing.host.model import HEAD_DIM
from tests.connectors.pull_world import BLOCK, HEADS, LAYERS, SECRET, engine_config
from tests.connectors.wired_world import OURS, PATIENCE_S, Engine, ask, engines_of, lend, two


class Sleeper(Engine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._woken = threading.Event()
        assert self.scheduler.bind_wake(self._woken.set)
        assert self.worker.bind_wake(self._woken.set)

    def sleep_until(self, done: Callable[[KVConnectorOutput], bool]) -> KVConnectorOutput:
        while not done(output := self.step()):
            assert self._woken.wait(PATIENCE_S), "the connector did not wake the engine"
            self._woken.clear()
        return output


@pytest.fixture
def start() -> Iterator[Callable[[EngineConfig], Sleeper]]:
    with engines_of(Sleeper) as start_engine:
        yield start_engine


def has_received(output: KVConnectorOutput) -> bool:
    return bool(output.finished_recving)


@pytest.mark.parametrize(("transport", "secret"), [("local", SECRET), ("tcp", SECRET), ("tcp", None)])
def test_a_handoff_wakes_the_engine_that_has_to_step(
    start: Callable[[EngineConfig], Sleeper], transport: str, secret: ClusterSecret | None
) -> None:
    extra = {"transports": [transport]}
    p, d = (start(engine_config(name, extra=extra, secret=secret)) for name in ("p", "d"))
    params, theirs = lend(p, "r")
    ask(d, params)
    assert d.sleep_until(has_received).invalid_block_ids == set()
    assert torch.equal(d.cache[:, OURS], p.cache[:, theirs])
    assert p.sleep_until(lambda output: bool(output.finished_sending)).finished_sending == {"r"}
    stats = d.scheduler.get_kv_connector_stats()
    assert stats is not None
    (record,) = stats.to_dict()["transfers"]
    assert record["transport"].partition(":")[0] == transport
    assert record["bytes"] == 8 * LAYERS * HEADS * BLOCK * 2 * HEAD_DIM * 4


def test_a_deadline_wakes_it(start: Callable[[EngineConfig], Sleeper]) -> None:
    """The peer does not answer: the control thread's timer ends the handoff, then the ranks get an order."""
    timers = {"round_trip_max_s": 0.05, "ttl_s": 2.0, "deadline_s": 1.0, "loan_max_s": 10.0}
    p, d = two(start, timers=timers)
    params, _ = lend(p, "r")
    p.shutdown()
    ask(d, params)
    assert d.sleep_until(has_received).invalid_block_ids == set(OURS)


def test_a_loan_that_expires_wakes_its_owner(start: Callable[[EngineConfig], Sleeper]) -> None:
    timers = {"round_trip_max_s": 0.05, "ttl_s": 1.0, "deadline_s": 1.0, "loan_max_s": 10.0}
    p = start(engine_config("p", extra={"transports": ["local"], "timers": timers}))
    lend(p, "r")
    assert p.sleep_until(lambda output: bool(output.finished_sending)).finished_sending == {"r"}


def test_a_reset_data_connection_is_replaced_and_counted(
    start: Callable[[EngineConfig], Sleeper],
) -> None:
    """E2: after one lost connection the pair hands over again."""
    p, d = two(start, "tcp")
    for request_id in ("before", "after"):
        params, theirs = lend(p, request_id)
        ask(d, params, request_id)
        assert d.handed_over(request_id) == set()
        assert torch.equal(d.cache[:, OURS], p.cache[:, theirs])
        if request_id == "before":
            transport = p.worker.worker_half._transports["tcp"]  # type: ignore[attr-defined]
            for connection in list(transport._owner._connections):
                with suppress(OSError):  # The reader closes all lanes when one is lost.
                    connection.sock.shutdown(socket.SHUT_RDWR)
            d.step_until(lambda _: counts_a_lost_link(d))


def counts_a_lost_link(d: Engine) -> bool:
    stats = d.scheduler.get_kv_connector_stats()
    return stats is not None and stats.to_dict()["lost_links"] == {"p": 1}
