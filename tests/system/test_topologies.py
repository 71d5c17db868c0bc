"""Handoffs between real engines of different shapes: the tokens are a single engine's.

    wide     two ranks, blocks of 16                 narrow    one rank, blocks of 16
    coarse   one rank, blocks of 32

All engines prefill and decode. A failed load is an error, so every right answer was handed over.
"""

import uuid
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from baton.cli.processes import Fleet
from tests.system.engines import Engine, Engines, make_prompt, tokens_of

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.usefixtures("forked_programs")]

NUM_TOKENS = (5, 32, 250)
CHUNKS = ["--max-num-batched-tokens", "100"]  # Chunks of prefill that are no multiple of a block.


def prompt_of(producer: str, consumer: str, num_tokens: int) -> list[int]:
    """A prompt that no other test has sent, so no block of it is cached."""
    return make_prompt(zlib.crc32(f"{producer} {consumer} {num_tokens}".encode()), num_tokens)


def both(transport: str) -> dict[str, Any]:
    """An engine that reads over this transport, and can be read over any."""
    others = [name for name in ("local", "tcp") if name != transport]
    return {
        "kv_connector": "BatonPushConnector",  # This connector also pulls, if it gets a ticket.
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"transports": [transport, *others], "stream": "layer"},
    }


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    with Fleet(tmp_path_factory.mktemp("logs")) as fleet, closing(Engines(fleet)) as engines:
        started = engines.start(
            ("wide", model, both("local")),
            ("narrow", model, both("tcp")),
            ("coarse", model, both("tcp")),
            options={
                "wide": [*CHUNKS, "--tensor-parallel-size", "2"],
                "narrow": CHUNKS,
                "coarse": [*CHUNKS, "--block-size", "32"],
            },
        )
        yield {engine.name: engine for engine in started}


@pytest.fixture(autouse=True)
def at_rest(engines: dict[str, Engine]) -> Iterator[None]:
    yield
    for engine in engines.values():
        engine.wait_at_rest()


def pulled(p: Engine, d: Engine, prompt: list[int]) -> list[int]:
    return tokens_of(d.complete(prompt, p.prefill(prompt)))


def decode_params(p: Engine, transfer_id: str) -> dict[str, Any]:
    introduced = p.client.get(f"{p.url}/baton/introduction").raise_for_status().json()
    return {
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_engine_id": introduced["engine_id"],
        "baton_introduction": introduced["introduction"],
    }


def pushed(p: Engine, d: Engine, prompt: list[int]) -> list[int]:
    """The decode leg begins when the prefill leg has ended."""
    transfer_id = uuid.uuid4().hex
    tokens_of(p.complete(prompt, {"do_remote_decode": True, "transfer_id": transfer_id}, max_tokens=1))
    return tokens_of(d.complete(prompt, decode_params(p, transfer_id)))


def pushed_to_waiting(p: Engine, d: Engine, prompt: list[int]) -> list[int]:
    """The decode leg waits for the prefill leg."""
    transfer_id = uuid.uuid4().hex
    with ThreadPoolExecutor(1) as pool:
        leg = pool.submit(d.complete, prompt, decode_params(p, transfer_id))
        d.wait_metric("num_requests_waiting_for_remote_kvs", lambda value: value > 0)
        tokens_of(p.complete(prompt, {"do_remote_decode": True, "transfer_id": transfer_id}, max_tokens=1))
        return tokens_of(leg.result())


# `tests/connectors/test_topologies` reads between engines of any two shapes, in one process.
@pytest.mark.parametrize(
    ("hand_over", "producer", "consumer"),
    [
        (pulled, "wide", "narrow"),  # TP 2 to 1, tcp.
        (pushed_to_waiting, "narrow", "wide"),  # TP 1 to 2, local.
        (pushed, "narrow", "coarse"),  # 16 to 32, tcp.
        (pushed_to_waiting, "coarse", "narrow"),  # 32 to 16, tcp.
        (pushed, "wide", "coarse"),  # TP 2 to 1 and 16 to 32.
        (pulled, "coarse", "wide"),  # TP 1 to 2 and 32 to 16, local.
    ],
)
def test_tokens_are_those_of_a_single_engine(
    engines: dict[str, Engine],
    expected: Callable[[list[int]], list[int]],
    producer: str,
    consumer: str,
    hand_over: Callable[[Engine, Engine, list[int]], list[int]],
) -> None:
    p, d = engines[producer], engines[consumer]
    for num_tokens in NUM_TOKENS:
        prompt = prompt_of(producer, consumer + hand_over.__name__, num_tokens)
        moved = d.metric("kv_transfer_bytes_total")
        assert hand_over(p, d, prompt) == expected(prompt)
        assert d.metric("kv_transfer_bytes_total") > moved


def test_announced_blocks_are_read_before_the_prefill_has_ended(
    engines: dict[str, Engine], expected: Callable[[list[int]], list[int]]
) -> None:
    """D or the prefill may be faster, depending on the machine, but D must be faster at least once."""
    p, d = engines["wide"], engines["narrow"]
    for seed in range(30):
        if d.metric("kv_early_tokens_total") > 0:
            return
        prompt = make_prompt(1000 + seed, 1500)
        assert pushed_to_waiting(p, d, prompt) == expected(prompt)
    raise AssertionError("nothing was ever read early")
