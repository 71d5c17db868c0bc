"""Embedded engines hand a prompt over, and the answer is that of one engine alone."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from baton.core.config import CacheConfig, ClusterSecret, EngineConfig, KVTransferConfig, ModelConfig
from baton.engine.api import SamplingParams
from baton.engine.llm import LLM

Start = Callable[..., LLM]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)


@pytest.fixture
def start(model: ModelConfig) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_engine(engine_id: str | None = None, policy: str = "recompute") -> LLM:
            transfer = None
            if engine_id is not None:
                transfer = KVTransferConfig(
                    kv_connector="BatonPullConnector",
                    kv_role="kv_both",
                    engine_id=engine_id,
                    kv_connector_extra_config={"timers": {"round_trip_max_s": 0.1}},
                    kv_load_failure_policy=policy,  # type: ignore[arg-type]
                )
            config = EngineConfig(
                model_config=model,
                cache_config=CacheConfig(num_gpu_blocks=64, block_size=4),
                kv_transfer_config=transfer,
                cluster_secret=ClusterSecret(b"sixteen bytes or more"),
            )
            return stack.enter_context(LLM(config, "baton.assemble:connector_factory"))

        yield start_engine


def prompt_of(num_tokens: int, step: int = 7) -> list[int]:
    return [(step * i) % 500 + 5 for i in range(num_tokens)]


@pytest.mark.slow
def test_the_tokens_are_those_of_a_single_engine(start: Start) -> None:
    p, d, alone = start("p"), start("d"), start()
    for prompt in (prompt_of(50), prompt_of(3), prompt_of(32, step=11), [*prompt_of(30), 9, 9, 9]):
        (prefilled,) = p.generate([prompt], ONE_TOKEN, kv_transfer_params=[{"do_remote_decode": True}])
        assert prefilled.kv_transfer_params is not None
        (decoded,) = d.generate([prompt], GREEDY, kv_transfer_params=[prefilled.kv_transfer_params])
        (expected,) = alone.generate([prompt], GREEDY)
        assert decoded.token_ids == expected.token_ids
        assert decoded.num_transferred_tokens > 0


@pytest.mark.slow
def test_a_ticket_for_another_prompt_gives_this_prompts_answer(start: Start) -> None:
    p, d, alone = start("p"), start("d"), start()
    (prefilled,) = p.generate([prompt_of(20)], ONE_TOKEN, kv_transfer_params=[{"do_remote_decode": True}])
    other = prompt_of(20, step=13)
    (decoded,) = d.generate([other], GREEDY, kv_transfer_params=[prefilled.kv_transfer_params])
    (expected,) = alone.generate([other], GREEDY)
    assert decoded.token_ids == expected.token_ids
    assert decoded.num_transferred_tokens == 0


@pytest.mark.slow
def test_under_policy_fail_it_is_that_requests_error_and_nobody_elses(start: Start) -> None:
    p, d = start("p"), start("d", policy="fail")
    (prefilled,) = p.generate([prompt_of(20)], ONE_TOKEN, kv_transfer_params=[{"do_remote_decode": True}])
    wrong, right = d.generate(
        [prompt_of(20, step=13), prompt_of(8)],
        GREEDY,
        kv_transfer_params=[prefilled.kv_transfer_params, None],
    )
    assert wrong.finish_reason == "error"
    assert wrong.error is not None
    assert "another prompt" in wrong.error.message
    assert right.finish_reason == "length"


@pytest.mark.slow
def test_a_producer_that_is_gone_costs_time_and_no_token(start: Start) -> None:
    p, d, alone = start("p"), start("d"), start()
    prompt = prompt_of(20)
    (prefilled,) = p.generate([prompt], ONE_TOKEN, kv_transfer_params=[{"do_remote_decode": True}])
    p.close()
    (decoded,) = d.generate([prompt], GREEDY, kv_transfer_params=[prefilled.kv_transfer_params])
    (expected,) = alone.generate([prompt], GREEDY)
    assert decoded.token_ids == expected.token_ids
    assert decoded.num_transferred_tokens == 0
