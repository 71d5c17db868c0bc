"""Embedded engines hand a prompt over, and the answer is that of one engine alone."""

from collections.abc import Callable, Iterator

import pytest

from baton.core.config import ModelConfig
from baton.engine.api import SamplingParams
from baton.engine.llm import LLM
from tests.connectors.engine_world import ONE_TOKEN, PATIENT, QUICK, engines, prompt_of

Start = Callable[..., LLM]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture
def start(model: ModelConfig) -> Iterator[Start]:
    with engines(model) as start_any:

        def start_engine(
            engine_id: str | None = None, policy: str = "recompute", timers: dict[str, float] = PATIENT
        ) -> LLM:
            if engine_id is None:
                return start_any()
            return start_any(
                {
                    "kv_connector": "BatonPullConnector",
                    "engine_id": engine_id,
                    "kv_connector_extra_config": {"timers": timers},
                    "kv_load_failure_policy": policy,
                }
            )

        yield start_engine


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
def test_under_policy_fail_only_that_request_gets_the_error(start: Start) -> None:
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
    p, d, alone = start("p"), start("d", timers=QUICK), start()
    prompt = prompt_of(20)
    (prefilled,) = p.generate([prompt], ONE_TOKEN, kv_transfer_params=[{"do_remote_decode": True}])
    p.close()
    (decoded,) = d.generate([prompt], GREEDY, kv_transfer_params=[prefilled.kv_transfer_params])
    (expected,) = alone.generate([prompt], GREEDY)
    assert decoded.token_ids == expected.token_ids
    assert decoded.num_transferred_tokens == 0
