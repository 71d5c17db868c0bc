"""The same halves over a real control channel, real transports and real threads, in one process."""

from collections.abc import Callable, Iterator

import pytest
import torch

from baton.core.config import ClusterSecret, EngineConfig
from tests.connectors.pull_world import (
    BLOCK,
    HEAD_DIM,
    HEADS,
    LAYERS,
    engine_config,
)
from tests.connectors.wired_world import OURS, Engine, ask, engines_of, lend


@pytest.fixture
def start() -> Iterator[Callable[[EngineConfig], Engine]]:
    with engines_of(Engine) as start_engine:
        yield start_engine


@pytest.mark.parametrize("transport", ["local", "tcp"])
@pytest.mark.parametrize(
    "secret", [ClusterSecret(b"sixteen bytes or more"), None], ids=["secret", "no-secret"]
)
def test_a_handoff(
    start: Callable[[EngineConfig], Engine], transport: str, secret: ClusterSecret | None
) -> None:
    extra = {"transports": [transport]}
    p, d = (start(engine_config(name, extra=extra, secret=secret)) for name in ("p", "d"))
    params, theirs = lend(p, "r")
    ask(d, params)
    output = d.step_until(lambda output: bool(output.finished_recving))
    assert output.finished_recving == {"r"}
    assert output.invalid_block_ids == set()
    assert torch.equal(d.cache[:, OURS], p.cache[:, theirs])
    assert p.step_until(lambda output: bool(output.finished_sending)).finished_sending == {"r"}
    stats = d.scheduler.get_kv_connector_stats()
    assert stats is not None
    (record,) = stats.to_dict()["transfers"]
    assert record["transport"] == transport
    assert record["bytes"] == 8 * LAYERS * HEADS * BLOCK * 2 * HEAD_DIM * 4


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
