"""The same halves over a real control channel, real transports and real threads, in one process."""

import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch

from baton.core.config import ClusterSecret, EngineConfig
from baton.testing.host.model import HEAD_DIM
from tests.connectors.pull_world import (
    BLOCK,
    HEADS,
    LAYERS,
    SECRET,
    engine_config,
)
from tests.connectors.wired_world import OURS, Engine, ask, engines_of, lend, two


@pytest.fixture
def start() -> Iterator[Callable[[EngineConfig], Engine]]:
    with engines_of(Engine) as start_engine:
        yield start_engine


@pytest.mark.parametrize(("transport", "secret"), [("local", SECRET), ("tcp", SECRET), ("tcp", None)])
def test_a_handoff(
    start: Callable[[EngineConfig], Engine], transport: str, secret: ClusterSecret | None
) -> None:
    extra = {"transports": [transport]}
    p, d = (start(engine_config(name, extra=extra, secret=secret)) for name in ("p", "d"))
    params, theirs = lend(p, "r")
    ask(d, params)
    assert d.handed_over() == set()
    assert torch.equal(d.cache[:, OURS], p.cache[:, theirs])
    assert p.step_until(lambda output: bool(output.finished_sending)).finished_sending == {"r"}
    stats = d.scheduler.get_kv_connector_stats()
    assert stats is not None
    (record,) = stats.to_dict()["transfers"]
    assert record["transport"].partition(":")[0] == transport
    assert record["bytes"] == 8 * LAYERS * HEADS * BLOCK * 2 * HEAD_DIM * 4


def test_a_reset_data_connection_is_replaced_and_counted(
    start: Callable[[EngineConfig], Engine],
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


def test_a_producer_that_is_gone_fails_the_request_and_nothing_else(
    start: Callable[[EngineConfig], Engine],
) -> None:
    quick = {"round_trip_max_s": 0.05, "ttl_s": 2.0, "deadline_s": 5.0, "loan_max_s": 10.0}
    extra = {"transports": ["local"], "timers": quick}
    p, d = (start(engine_config(name, extra=extra)) for name in ("p", "d"))
    params, _ = lend(p, "r")
    p.shutdown()
    ask(d, params)
    output = d.step_until(lambda output: bool(output.finished_recving))
    assert output.invalid_block_ids == set(OURS)
