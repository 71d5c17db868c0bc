"""Engines with ranks in child or Ray processes hand over to an engine of one rank, and lose a rank.

phoenix   two child processes, two steps in flight; restarts its ranks
sunrise   two ranks by Ray, two steps in flight; restarts its ranks and its Ray
d         one rank in its engine's process; recomputes what it cannot load
"""

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.cli.processes import Fleet
from tests import fork_server
from tests.system.engines import (
    START_S,
    TIMERS,
    WAIT_S,
    Engine,
    Engines,
    Waiting,
    make_prompt,
    tokens_of,
    wait_until,
)
from tests.system.test_topologies import decode_params, pulled, pushed

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.timeout(2 * START_S),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

NOTICED_S = 5.0  # Bound after which a client of an engine that has lost a rank gets an error.
PUSH_TIMERS = {**TIMERS, "grant_every_s": 0.5, "silence_s": 4.0, "hold_s": 8.0}
AHEAD = ["--tensor-parallel-size", "2", "--max-concurrent-batches", "2", "--max-num-batched-tokens", "100"]


def both() -> dict[str, Any]:
    return {
        "kv_connector": "BatonPushConnector",  # This connector also pulls, if it gets a ticket.
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"timers": PUSH_TIMERS, "stream": "chunk"},
    }


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    with Fleet(tmp_path_factory.mktemp("logs")) as fleet, closing(Engines(fleet)) as engines:
        started = engines.start(
            ("phoenix", model, both()),
            ("sunrise", model, both()),
            ("d", model, both()),
            options={
                "phoenix": [*AHEAD, "--on-rank-death", "restart"],
                "sunrise": [*AHEAD, "--executor", "ray", "--on-rank-death", "restart"],
            },
        )
        yield {engine.name: engine for engine in started}


@pytest.mark.parametrize("hand_over", [pulled, pushed])
@pytest.mark.parametrize(
    ("producer", "consumer"), [("sunrise", "d"), ("d", "sunrise"), ("phoenix", "d"), ("d", "phoenix")]
)
def test_two_ranks_and_one_hand_over_and_give_one_engines_tokens(
    engines: dict[str, Engine],
    expected: Callable[[list[int]], list[int]],
    hand_over: Callable[[Engine, Engine, list[int]], list[int]],
    producer: str,
    consumer: str,
) -> None:
    p, d = engines[producer], engines[consumer]
    moved = d.metric("kv_transfer_bytes_total")
    prompt = make_prompt(hash((len(producer), len(consumer), hand_over is pulled)) % 1000, 250)
    assert hand_over(p, d, prompt) == expected(prompt)
    assert d.metric("kv_transfer_bytes_total") > moved
    p.wait_at_rest()
    d.wait_at_rest()


def ranks_of(engine: Engine) -> list[psutil.Process]:
    return [p for p in engine.processes() if p.name().startswith(("ray::RankActor", "baton-rank"))]


def kill_a_rank(engine: Engine) -> None:
    ranks = ranks_of(engine)
    assert len(ranks) == 2
    ranks[1].kill()


def below_core(engine: Engine) -> set[psutil.Process]:
    """Processes below the core: ranks and their helpers."""
    [core] = [process for process in engine.processes() if process.name() == "baton-core"]
    return {process for process in core.children(recursive=True) if process.name() != fork_server.NAME}


@pytest.mark.parametrize("name", ["phoenix", "sunrise"])
def test_an_engine_that_restarts_its_ranks_fails_open_requests_only(
    engines: dict[str, Engine], expected: Callable[[list[int]], list[int]], name: str
) -> None:
    p, d = engines[name], engines["d"]
    old = make_prompt(2001, 150)
    ticket = p.prefill(old)
    waiting = Waiting(lambda: p.complete(make_prompt(2003), max_tokens=1500))
    p.wait_metric("num_requests_running", lambda value: value == 1)
    before = below_core(p)
    kill_a_rank(p)
    answer = waiting.answer(NOTICED_S)
    assert answer.status_code == 500
    assert "lost a rank" in answer.json()["error"]["message"]
    assert re.search("rank [01] is gone", answer.json()["error"]["message"])
    health = p.client.get(f"{p.url}/health")
    assert health.status_code == 503
    assert "starts its ranks anew" in health.json()["error"]["message"]

    # P serves again, with an empty cache. Its old loans have ended and are not confused with new ones.
    refused = p.complete(old)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "not_ready"
    wait_until(lambda: p.client.get(f"{p.url}/health").status_code == 200, within_s=START_S)
    assert tokens_of(p.complete(old)) == expected(old)
    assert tokens_of(d.complete(old, ticket)) == expected(old)
    for seed, hand_over in ((2006, pulled), (2007, pushed)):
        moved = d.metric("kv_transfer_bytes_total")
        prompt = make_prompt(seed, 150)
        assert hand_over(p, d, prompt) == expected(prompt)
        assert d.metric("kv_transfer_bytes_total") > moved
    assert not psutil.wait_procs(before, timeout=WAIT_S)[1], "a process of the lost ranks still runs"
    assert len(ranks_of(p)) == 2
    p.wait_at_rest()
    d.wait_at_rest()


def test_a_producer_that_is_killed_over_a_stopped_core_leaves_no_process_and_changes_no_token(
    engines: dict[str, Engine], expected: Callable[[list[int]], list[int]]
) -> None:
    """A decode leg waits for its push meanwhile. The ranks of the killed engine are processes of Ray."""
    p, d = engines["sunrise"], engines["d"]
    prompt = make_prompt(2008, 700)
    decode = decode_params(p, "doomed")
    waiting = Waiting(lambda: d.complete(prompt, decode))
    d.wait_metric("num_requests_waiting_for_remote_kvs", lambda value: value > 0)
    front_end, *others = p.processes()
    for process in others:
        process.suspend()
    front_end.kill()
    assert not psutil.wait_procs(others, timeout=WAIT_S)[1]
    assert tokens_of(waiting.answer()) == expected(prompt)
    d.wait_at_rest()
