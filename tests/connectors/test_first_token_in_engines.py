"""P's first token and D's continuation equal a single engine's, for each kind of request."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from baton.core.config import ModelConfig
from baton.engine.api import SamplingParams
from baton.engine.llm import LLM, Completion
from tests.connectors.engine_world import engines as starting
from tests.connectors.engine_world import hands_over

pytestmark = pytest.mark.slow

SETTLE_S = 10.0  # Only reached when something is wrong; a loan lasts longer.


@pytest.fixture(scope="module")
def engines(model: ModelConfig) -> Iterator[tuple[LLM, LLM, LLM]]:
    """P, D, and one alone."""

    with starting(model) as start:
        p, d, alone = (start(hands_over(name), num_blocks=96) for name in ("p", "d", None))
        yield p, d, alone


def prompt_of(number: int, num_tokens: int = 21) -> list[int]:
    return [(7 * i + 31 * number) % 500 + 5 for i in range(num_tokens)]


VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 0},
    {"seed": 11},
    {"seed": 12, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.7, "presence_penalty": 1.0, "frequency_penalty": 1.5},
    {"seed": 13, "frequency_penalty": 2.0, "presence_penalty": 2.0},
    {"temperature": 0.0, "logit_bias": {7: 100.0}, "frequency_penalty": 2.0},
    {"temperature": 0.0, "min_tokens": 3, "ignore_eos": False},
    {"temperature": 0.0, "allowed_token_ids": tuple(range(100, 140))},
    {"seed": 14, "allowed_token_ids": tuple(range(100, 110)), "bad_words_token_ids": ((101,), (103, 104))},
    {"temperature": 0.0, "allowed_token_ids": (7, 8), "bad_words_token_ids": ((7, 7), (8, 8))},
]


def hand_over(p: LLM, d: LLM, prompt: list[int], sampling: SamplingParams, **on_p: Any) -> Completion:
    leg = msgspec.structs.replace(sampling, max_tokens=1, min_tokens=min(1, sampling.min_tokens))
    leg = msgspec.structs.replace(leg, **on_p)
    (prefilled,) = p.generate([prompt], leg, kv_transfer_params=[{"do_remote_decode": True}])
    (decoded,) = d.generate([prompt], sampling, kv_transfer_params=[prefilled.kv_transfer_params])
    return decoded


@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_the_answer_is_the_same_and_nothing_of_the_prompt_is_computed_again(
    engines: tuple[LLM, LLM, LLM], number: int
) -> None:
    p, d, alone = engines
    sampling = SamplingParams(**{"max_tokens": 10, "ignore_eos": True, **VARIANTS[number]})
    prompt = prompt_of(number)
    decoded = hand_over(p, d, prompt, sampling)
    (expected,) = alone.generate([prompt], sampling)
    assert decoded.token_ids == expected.token_ids
    assert decoded.finish_reason == expected.finish_reason
    assert decoded.num_cached_tokens == len(prompt), "the first token came with the prompt"
    assert _ids_of(decoded) == _ids_of(expected)
    assert _values_of(decoded) == pytest.approx(_values_of(expected), abs=1e-4)


def test_a_stop_token_that_p_has_sampled_ends_the_answer(engines: tuple[LLM, LLM, LLM]) -> None:
    p, d, alone = engines
    prompt = prompt_of(50)
    greedy = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    (whole,) = alone.generate([prompt], greedy)
    sampling = msgspec.structs.replace(greedy, stop_token_ids=(whole.token_ids[0],))
    decoded = hand_over(p, d, prompt, sampling)
    assert (decoded.token_ids, decoded.finish_reason) == (whole.token_ids[:1], "stop")
    assert decoded.num_cached_tokens == len(prompt)


def test_a_proxy_that_changes_the_prefill_leg_costs_a_position_and_no_token(
    engines: tuple[LLM, LLM, LLM],
) -> None:
    p, d, alone = engines
    prompt = prompt_of(60)
    sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=2)
    decoded = hand_over(p, d, prompt, sampling, logprobs=None)
    (expected,) = alone.generate([prompt], sampling)
    assert decoded.token_ids == expected.token_ids
    assert _ids_of(decoded) == _ids_of(expected)
    assert decoded.num_cached_tokens == len(prompt) - 1


def test_prompt_logprobs_are_computed_without_the_load_and_the_loan_ends_at_once(
    engines: tuple[LLM, LLM, LLM],
) -> None:
    p, d, alone = engines
    prompt = prompt_of(70, 41)
    sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, prompt_logprobs=1)
    decoded = hand_over(p, d, prompt, sampling, prompt_logprobs=None)
    (expected,) = alone.generate([prompt], sampling)
    assert decoded.token_ids == expected.token_ids
    assert (decoded.num_cached_tokens, decoded.num_transferred_tokens) == (0, 0)
    assert decoded.prompt_logprobs is not None
    assert expected.prompt_logprobs is not None
    of_d, of_one = (raw.rows(0, len(raw)) for raw in (decoded.prompt_logprobs, expected.prompt_logprobs))
    assert [entry.chosen.token_id for entry in of_d] == prompt[1:]
    assert [e.chosen.logprob for e in of_d] == pytest.approx([e.chosen.logprob for e in of_one], abs=1e-4)
    for engine in (p, d):  # The loan's own deadline is much later.
        engine.settle(SETTLE_S)
        assert engine.core.scheduler.remote.num_held == 0


def _ids_of(completion: Completion) -> list[list[int]]:
    return [[entry.chosen.token_id, *(t.token_id for t in entry.top)] for entry in completion.logprobs or ()]


def _values_of(completion: Completion) -> list[float]:
    return [value.logprob for entry in completion.logprobs or () for value in (entry.chosen, *entry.top)]
