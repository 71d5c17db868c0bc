"""Models whose layers have windows are handed over group by group, and only what the windows see moves."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from baton.core.config import (
    CacheConfig,
    ClusterSecret,
    EngineConfig,
    KVTransferConfig,
    ParallelConfig,
)
from baton.engine.api import EngineRequest, SamplingParams
from baton.engine.llm import LLM, Completion
from tests.connectors.engine_world import PATIENT, QUICK
from tests.connectors.windowed_models import BLOCK, ModelOf, bytes_moved, model_of

__all__ = ["model_of"]

Start = Callable[..., LLM]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)
SETTLE_S = 30.0  # Only reached when something is wrong.


@pytest.fixture
def start(model_of: ModelOf) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_engine(
            family: str,
            engine_id: str | None = None,
            *,
            hybrid: str = "auto",
            block_size: int = BLOCK,
            tp: int = 1,
            **extra: Any,
        ) -> LLM:
            transfer = None
            if engine_id is not None:
                transfer = KVTransferConfig(
                    kv_connector="BatonPullConnector",
                    kv_role="kv_both",
                    engine_id=engine_id,
                    kv_connector_extra_config={"timers": PATIENT, **extra},
                )
            config = EngineConfig(
                model_config=model_of(family),
                cache_config=CacheConfig(
                    num_gpu_blocks=200,
                    block_size=block_size,
                    hybrid_kv_cache=hybrid,  # type: ignore[arg-type]
                ),
                parallel_config=ParallelConfig(
                    tensor_parallel_size=tp, executor="multiprocess" if tp > 1 else "inprocess"
                ),
                kv_transfer_config=transfer,
                cluster_secret=ClusterSecret(b"sixteen bytes or more"),
            )
            return stack.enter_context(LLM(config, "baton.assemble:connector_factory"))

        yield start_engine


def prompt_of(num_tokens: int, step: int = 7) -> list[int]:
    return [(step * i) % 500 + 5 for i in range(num_tokens)]


def hand_over(p: LLM, d: LLM, prompt: list[int]) -> Completion:
    (prefilled,) = p.generate([prompt], ONE_TOKEN, kv_transfer_params=[{"do_remote_decode": True}])
    assert prefilled.kv_transfer_params is not None
    (decoded,) = d.generate([prompt], GREEDY, kv_transfer_params=[prefilled.kv_transfer_params])
    return decoded


def counted_bytes(llm: LLM) -> list[int]:
    """Of each transfer from now on."""
    moved: list[int] = []
    step = llm.core.step

    def counting_step() -> Any:
        outputs = step()
        stats = outputs.stats.kv_connector_stats if outputs.stats is not None else None
        moved.extend(record["bytes"] for record in (stats or {}).get("transfers", ()))
        return outputs

    llm.core.step = counting_step  # type: ignore[method-assign]
    return moved


def come_to_rest(*engines: LLM) -> None:
    for llm in engines:
        llm.settle(SETTLE_S)
        llm.core.scheduler.kv_cache.assert_empty()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "mistral"])
def test_the_tokens_are_those_of_a_single_engine(start: Start, family: str) -> None:
    p, d, alone = start(family, "p"), start(family, "d"), start(family)
    moved = counted_bytes(d)
    assert p.core.scheduler.kv_cache.is_hybrid
    for prompt in (prompt_of(70), prompt_of(3), prompt_of(32, step=11), [*prompt_of(60), 9, 9, 9]):
        decoded = hand_over(p, d, prompt)
        (expected,) = alone.generate([prompt], GREEDY)
        assert decoded.token_ids == expected.token_ids
        assert decoded.num_transferred_tokens > 0
    come_to_rest(p, d)
    # 70 tokens are 18 blocks; later tokens see the last ten, which lie in three or, one token
    # earlier, four.
    assert moved[0] == bytes_moved(p.core.scheduler.config, 70)


@pytest.mark.slow
def test_two_ranks_hand_over_to_one(start: Start) -> None:
    p, d, alone = start("gemma3", "p", tp=2), start("gemma3", "d"), start("gemma3")
    prompt = prompt_of(70)
    decoded = hand_over(p, d, prompt)
    (expected,) = alone.generate([prompt], GREEDY)
    assert decoded.token_ids == expected.token_ids
    assert decoded.num_transferred_tokens > 0
    come_to_rest(p, d)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("producers", "consumers"),
    [({}, {"hybrid": "off"}), ({}, {"block_size": 8}), ({"block_size": 8}, {})],
)
def test_engines_that_differ_compute_for_themselves(
    start: Start, producers: dict[str, Any], consumers: dict[str, Any]
) -> None:
    p, d, alone = start("gemma3", "p", **producers), start("gemma3", "d", **consumers), start("gemma3")
    prompt = prompt_of(70)
    decoded = hand_over(p, d, prompt)
    (expected,) = alone.generate([prompt], GREEDY)
    assert decoded.token_ids == expected.token_ids
    assert decoded.num_transferred_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_a_producer_that_keeps_everything_serves_one_that_does_not(start: Start, family: str) -> None:
    p, d, alone = start(family, "p", hybrid="off"), start(family, "d"), start(family)
    moved = counted_bytes(d)
    for prompt in (prompt_of(70), prompt_of(3), prompt_of(69)):  # Of the last, only a token is missing.
        decoded = hand_over(p, d, prompt)
        (expected,) = alone.generate([prompt], GREEDY)
        assert decoded.token_ids == expected.token_ids
        assert decoded.num_transferred_tokens > 0
    come_to_rest(p, d)
    assert moved[0] == bytes_moved(d.core.scheduler.config, 70), "of layers with a window, their end"


@pytest.mark.slow
def test_a_producer_that_is_gone_costs_time_and_no_token(start: Start) -> None:
    p, d, alone = start("gpt_oss", "p"), start("gpt_oss", "d", timers=QUICK), start("gpt_oss")
    prompt = prompt_of(70)
    (prefilled,) = p.generate([prompt], ONE_TOKEN, kv_transfer_params=[{"do_remote_decode": True}])
    p.close()
    (decoded,) = d.generate([prompt], GREEDY, kv_transfer_params=[prefilled.kv_transfer_params])
    (expected,) = alone.generate([prompt], GREEDY)
    assert decoded.token_ids == expected.token_ids
    assert decoded.num_transferred_tokens == 0
    come_to_rest(d)


@pytest.mark.slow
def test_a_request_that_is_aborted_while_it_loads_leaves_nothing(start: Start) -> None:
    p, d, alone = start("gemma3", "p"), start("gemma3", "d"), start("gemma3")
    prompt = prompt_of(70)
    (prefilled,) = p.generate([prompt], ONE_TOKEN, kv_transfer_params=[{"do_remote_decode": True}])
    d.core.add_request(
        EngineRequest(
            request_id="gone",
            prompt_token_ids=prompt,
            sampling_params=GREEDY,
            arrival_time_s=0.0,
            kv_transfer_params=prefilled.kv_transfer_params,
        )
    )
    d.core.step()
    d.core.abort("gone")
    come_to_rest(p, d)
    (decoded,) = d.generate([prompt], GREEDY)
    assert decoded.token_ids == alone.generate([prompt], GREEDY)[0].token_ids
