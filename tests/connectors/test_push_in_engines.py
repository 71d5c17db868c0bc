"""Embedded engines hand a prompt over while it is computed, and the answer is that of one engine alone.

`test_push_of_groups` has the cases of preemption, aborts and dead engines.
"""

from collections.abc import Iterator

import pytest

from baton.core.config import ModelConfig
from baton.engine.api import SamplingParams
from tests.connectors.engine_world import (
    GREEDY,
    PATIENT,
    StartCore,
    cores,
    hands_over,
    legs_of,
    one_token,
    prompt_of,
    run_all,
    step_all,
)

pytestmark = pytest.mark.slow
SEEDED = SamplingParams(max_tokens=10, temperature=0.8, seed=7, logprobs=2, presence_penalty=0.5)


@pytest.fixture
def start(model: ModelConfig) -> Iterator[StartCore]:
    with cores(model) as start_core:
        yield lambda engine_id=None, stream="chunk", **options: start_core(
            hands_over(engine_id, "Push", stream=stream, timers=PATIENT), num_blocks=96, **options
        )


@pytest.mark.parametrize("stream", ["off", "chunk", "layer"])
@pytest.mark.parametrize("comes_first", ["p", "d"])
def test_the_tokens_are_those_of_a_single_engine(start: StartCore, stream: str, comes_first: str) -> None:
    p, d, alone = start("p", stream, budget=16), start("d"), start()
    decoded, expected = [], []
    asked = [(prompt_of(50), SEEDED), (prompt_of(3), SEEDED), (prompt_of(32, step=11), GREEDY)]
    for index, (prompt, sampling) in enumerate(asked):
        for_p, for_d = legs_of(p.core, f"t{index}")
        if comes_first == "p":
            p.add(f"r{index}", prompt, one_token(sampling), for_p)
            for _ in range(3):
                step_all(p, d, alone)
        decoded.append(d.add(f"r{index}", prompt, sampling, for_d))
        if comes_first == "d":
            for _ in range(3):
                step_all(p, d, alone)
            p.add(f"r{index}", prompt, one_token(sampling), for_p)
        expected.append(alone.add(f"r{index}", prompt, sampling))
    run_all(p, d, alone)
    assert [c.token_ids for c in decoded] == [c.token_ids for c in expected]
    assert [c.finish_reason for c in decoded] == [c.finish_reason for c in expected]
    assert all(c.num_transferred_tokens > 0 for c in decoded)
    for ours, theirs in zip(decoded, expected, strict=True):
        assert [e.chosen.token_id for e in ours.logprobs] == [e.chosen.token_id for e in theirs.logprobs]
