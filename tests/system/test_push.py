"""Push between real processes, with both legs at once, in either order: the tokens are a single engine's.

wide     two ranks, blocks of 16, tells of each layer     narrow   one rank, blocks of 32, of each chunk
"""

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.cli.processes import Fleet
from baton.engine.checkpoints.random_model import write_checkpoint
from tests.system.engines import TIMERS, WAIT_S, Engine, Engines, make_prompt, tokens_of

pytestmark = [pytest.mark.processes, pytest.mark.slow]

QUICK = {**TIMERS, "grant_every_s": 0.5, "silence_s": 4.0, "hold_s": 8.0}


def pushes(stream: str) -> dict[str, Any]:
    return {
        "kv_connector": "BatonPushConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"stream": stream, "timers": QUICK},
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "small"
    write_checkpoint(folder, family="qwen3", hidden=64, layers=3, heads=4, kv_heads=2, seed=0)
    return folder


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with Fleet(tmp_path_factory.mktemp("logs")) as fleet, closing(Engines(fleet)) as engines:
        yield engines


@pytest.fixture(scope="module")
def pair(engines: Engines, model: Path) -> list[Engine]:
    chunks = ["--max-num-batched-tokens", "128"]
    return engines.start(
        ("wide", model, pushes("layer")),
        ("narrow", model, pushes("chunk")),
        options={
            "wide": ["--tensor-parallel-size", "2", *chunks],
            "narrow": ["--block-size", "32", *chunks],
        },
    )


def decode_params(p: Engine, transfer_id: str) -> dict[str, Any]:
    introduced = p.client.get(f"{p.url}/baton/introduction").raise_for_status().json()
    return {
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_engine_id": introduced["engine_id"],
        "baton_introduction": introduced["introduction"],
    }


def push(p: Engine, d: Engine, prompt: list[int], *, p_first: bool) -> httpx.Response:
    """Both legs. The second one starts when the first one runs, or has ended."""
    transfer_id = uuid.uuid4().hex
    prefill = {"do_remote_decode": True, "transfer_id": transfer_id}
    params = decode_params(p, transfer_id)
    if p_first:
        tokens_of(p.complete(prompt, prefill, max_tokens=1))
        return d.complete(prompt, params)
    answers: list[httpx.Response] = []
    decode = threading.Thread(target=lambda: answers.append(d.complete(prompt, params)))
    decode.start()
    d.wait_metric("num_requests_waiting_for_remote_kvs", lambda value: value > 0)
    tokens_of(p.complete(prompt, prefill, max_tokens=1))
    decode.join(WAIT_S)
    return answers[0]


@pytest.mark.parametrize("p_first", [True, False], ids=["p-first", "d-first"])
@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)], ids=["wide-narrow", "narrow-wide"])
def test_the_tokens_are_those_of_a_single_engine(
    pair: list[Engine],
    expected: Callable[[list[int]], list[int]],
    source: int,
    target: int,
    p_first: bool,
) -> None:
    p, d = pair[source], pair[target]
    failures = d.metric("kv_transfer_failures_total")
    for num_tokens in (5, 150, 700):
        prompt = make_prompt(num_tokens + 10 * source + p_first, num_tokens)
        assert tokens_of(push(p, d, prompt, p_first=p_first)) == expected(prompt)
    assert d.metric("kv_transfer_failures_total") == failures
    p.wait_at_rest()
    d.wait_at_rest()


def test_announced_blocks_are_read_before_the_prefill_has_ended(
    pair: list[Engine], expected: Callable[[list[int]], list[int]]
) -> None:
    """D or the prefill may be faster, depending on the machine, but D must be faster at least once."""
    p, d = pair
    for seed in range(30):
        prompt = make_prompt(1000 + seed, 1500)
        assert tokens_of(push(p, d, prompt, p_first=False)) == expected(prompt)
        if d.metric("kv_early_tokens_total") > 0:
            return
    raise AssertionError("nothing was ever read early")


def test_a_producer_that_is_killed_costs_time_and_changes_no_token(
    engines: Engines, model: Path, pair: list[Engine], expected: Callable[[list[int]], list[int]]
) -> None:
    _, d = pair
    (p,) = engines.start(("doomed", model, pushes("chunk")))
    prompt = make_prompt(99, 700)
    params = decode_params(p, "doomed")
    answers: list[httpx.Response] = []
    decode = threading.Thread(target=lambda: answers.append(d.complete(prompt, params)))
    decode.start()
    d.wait_metric("num_requests_waiting_for_remote_kvs", lambda value: value > 0)
    p.kill()
    decode.join(WAIT_S)
    assert tokens_of(answers[0]) == expected(prompt)
    d.wait_at_rest()
