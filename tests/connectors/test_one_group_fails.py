"""The reads of one cache group fail over real wires: the tokens are a single engine's, or it is an error.

What was read of the other groups is not believed either, nothing of it is found by anybody else, and the next
handoff between the same engines goes well.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from baton.engine.llm import LLM
from tests.connectors.engine_world import (
    GREEDY,
    ONE_TOKEN,
    SETTLE_S,
    ModelOf,
    Start,
    engines,
    hands_over,
    prompt_of,
)

PROMPT = prompt_of(70)
SHARER = [*PROMPT[:64], *prompt_of(5, step=11)]
SHORTER = PROMPT[:41]
OTHER = prompt_of(50, step=13)
WIRES = [("local", "recompute"), ("local", "fail"), ("tcp", "recompute"), ("nixl", "recompute")]
EVERYTHING, WINDOW = 0, 1  # The groups of gpt_oss, three layers each.


@pytest.fixture(scope="module")
def start(model_of: ModelOf) -> Iterator[Start]:
    with engines(model_of("gpt_oss")) as start:
        yield start


@pytest.fixture(scope="module")
def alone(start: Start) -> LLM:
    return start(num_blocks=200)


def producer(start: Start, wire: str) -> LLM:
    return start(hands_over("p", transports=[wire]), num_blocks=200)


def consumer(start: Start, wire: str, policy: str, tp_size: int = 1, **breaks: Any) -> LLM:
    return start(
        {
            "kv_connector": "BreakingPull",
            "kv_connector_module_path": "tests.connectors.breaking_pull",
            "engine_id": "d",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"transports": [wire], "breaks": breaks},
        },
        num_blocks=200,
        tp_size=tp_size,
    )


def check(p: LLM, d: LLM, alone: LLM, policy: str) -> None:
    def of_alone(*prompts: list[int]) -> list[list[int]]:
        return [completion.token_ids for completion in alone.generate(prompts, GREEDY)]

    def ticket(prompt: list[int]) -> dict[str, Any]:
        (prefilled,) = p.generate([prompt], ONE_TOKEN, kv_transfer_params=[{"do_remote_decode": True}])
        assert prefilled.kv_transfer_params is not None
        return prefilled.kv_transfer_params

    assert len(d.core.scheduler.kv_cache.groups) == 2
    loaded, shared = d.generate([PROMPT, SHARER], GREEDY, kv_transfer_params=[ticket(PROMPT), None])
    if policy == "recompute":
        assert [loaded.token_ids] == of_alone(PROMPT)
        assert loaded.num_transferred_tokens == 0
    else:
        assert loaded.error is not None
        assert "kv_load_failure_policy is 'fail'" in loaded.error.message
        assert not loaded.token_ids
    d.settle(SETTLE_S)
    d.core.scheduler.kv_cache.assert_consistent()
    later = d.generate([PROMPT, SHORTER], GREEDY)
    assert [c.token_ids for c in (shared, *later)] == of_alone(SHARER, PROMPT, SHORTER)
    (good,) = d.generate([OTHER], GREEDY, kv_transfer_params=[ticket(OTHER)])
    assert [good.token_ids] == of_alone(OTHER)
    assert good.num_transferred_tokens > 0
    for llm in (p, d):
        llm.settle(SETTLE_S)
        llm.core.scheduler.kv_cache.assert_empty()


@pytest.mark.slow
@pytest.mark.parametrize(("wire", "policy"), WIRES)
@pytest.mark.parametrize("group", [EVERYTHING, WINDOW])
def test_on_every_rank(start: Start, alone: LLM, wire: str, group: int, policy: str) -> None:
    if wire == "nixl":
        pytest.importorskip("nixl")
    check(producer(start, wire), consumer(start, wire, policy, group=group), alone, policy)


@pytest.mark.slow
def test_of_a_prompt_whose_beginning_is_here(start: Start, alone: LLM) -> None:
    p, d = producer(start, "local"), consumer(start, "local", "recompute", group=WINDOW)
    d.generate([SHORTER], ONE_TOKEN)
    check(p, d, alone, "recompute")


@pytest.mark.slow
@pytest.mark.processes
def test_on_one_rank_of_two(start: Start, alone: LLM) -> None:
    """Its no is the engine's; what the other rank has read of every group is not used."""
    d = consumer(start, "tcp", "recompute", tp_size=2, group=WINDOW, rank=1)
    check(producer(start, "tcp"), d, alone, "recompute")
