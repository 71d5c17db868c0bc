"""A request's tokens do not depend on the scheduler's decisions or on other requests."""

import random

import pytest

from baton.core.config import CacheConfig, EngineConfig, KVTransferConfig, SchedulerConfig
from baton.core.errors import ConfigError
from baton.engine.api import SamplingParams
from baton.engine.llm import LLM, Completion

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SETTLE_S = 30.0  # Only reached when something is wrong.


def prompts_of(num_prompts: int, seed: int = 0) -> list[list[int]]:
    """Prompts of all lengths around block borders. Every second one continues the previous one."""
    draw = random.Random(seed)
    prompts: list[list[int]] = []
    for index in range(num_prompts):
        fresh = [draw.randrange(3, 500) for _ in range(draw.randrange(1, 40))]
        prompts.append(prompts[-1] + fresh if index % 2 and len(prompts[-1]) < 60 else fresh)
    return prompts


PROMPTS = prompts_of(12)


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    assert all(completion.error is None for completion in completions)
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def alone(make_config) -> list[list[int]]:
    """The reference: one request at a time, in one chunk, nothing cached."""
    config = make_config(
        cache_config=CacheConfig(num_gpu_blocks=128, block_size=4, enable_prefix_caching=False)
    )
    with LLM(config) as llm:
        return [tokens_of(llm.generate([prompt], GREEDY))[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("scheduler_config", "prefix_caching"),
    [
        (SchedulerConfig(), True),
        (SchedulerConfig(), False),
        (SchedulerConfig(max_num_batched_tokens=7), True),
        (SchedulerConfig(max_num_batched_tokens=7), False),
        (SchedulerConfig(max_num_batched_tokens=1), True),
        (SchedulerConfig(max_num_batched_tokens=64, long_prefill_token_threshold=5), True),
        (SchedulerConfig(max_num_batched_tokens=256, enable_chunked_prefill=False), True),
        (SchedulerConfig(max_num_seqs=3), True),
    ],
)
def test_tokens_do_not_depend_on_how_prompts_are_batched(
    make_config, alone, scheduler_config: SchedulerConfig, prefix_caching: bool
) -> None:
    cache = CacheConfig(num_gpu_blocks=400, block_size=4, enable_prefix_caching=prefix_caching)
    with LLM(make_config(scheduler_config=scheduler_config, cache_config=cache)) as llm:
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == alone
        again = llm.generate(PROMPTS, GREEDY)
        assert tokens_of(again) == alone
        assert any(completion.num_cached_tokens for completion in again) == prefix_caching


def test_tokens_survive_preemption_in_a_tiny_pool(make_config, alone) -> None:
    with LLM(make_config(num_blocks=30)) as llm:
        preempted = count_preemptions(llm)
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == alone
        assert preempted, "the pool is too large: nothing was preempted"


def count_preemptions(llm: LLM) -> list[int]:
    counts: list[int] = []
    step = llm.core.step

    def counting_step():
        outputs = step()
        if outputs.stats is not None and outputs.stats.num_preempted:
            counts.append(outputs.stats.num_preempted)
        return outputs

    llm.core.step = counting_step  # type: ignore[method-assign]
    return counts


SAMPLED = [
    SamplingParams(seed=1, max_tokens=12, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=12, temperature=1.5, top_p=0.8, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=12, top_k=20, min_p=0.01, ignore_eos=True),
    SamplingParams(seed=4, max_tokens=12, frequency_penalty=1.0, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=12, presence_penalty=1.5, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=12, min_tokens=8, logit_bias={7: 2.0}),
]


def test_seeded_and_penalised_tokens_do_not_depend_on_other_requests(make_config: EngineConfig) -> None:
    params = [SAMPLED[index % len(SAMPLED)] for index in range(len(PROMPTS))]
    with LLM(make_config()) as llm:
        reference = [tokens_of(llm.generate([p], s))[0] for p, s in zip(PROMPTS, params, strict=True)]
    for num_blocks in (400, 30):
        with LLM(make_config(num_blocks=num_blocks)) as llm:
            assert tokens_of(llm.generate(PROMPTS, params)) == reference


def test_an_impossible_request_is_refused_and_the_others_continue(make_config, alone) -> None:
    with LLM(make_config()) as llm:
        refused, served = llm.generate([[10**6], PROMPTS[0]], GREEDY)
    assert refused.finish_reason == "error"
    assert "vocabulary" in str(refused.error)
    assert served.token_ids == alone[0]


def test_a_connector_that_the_configuration_names_is_made_or_refused(make_config) -> None:
    unknown = KVTransferConfig(kv_connector="NoSuchConnector", kv_role="kv_both")
    with pytest.raises(ConfigError, match="NoSuchConnector"):
        LLM(make_config(kv_transfer_config=unknown))
    filling = KVTransferConfig(
        kv_connector="DecodeBenchConnector",
        kv_connector_module_path="examples.decode_bench",
        kv_role="kv_both",
    )
    with LLM(make_config(kv_transfer_config=filling)) as llm:
        [completion] = llm.generate([list(range(5, 45))], GREEDY)
    assert completion.num_transferred_tokens > 0
