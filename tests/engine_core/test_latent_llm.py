"""Engines with latent caches give the tokens of transformers, regardless of the scheduler's decisions."""

from pathlib import Path

import msgspec
import pytest

from baton.checkpoints.checkpoint import load_model_config
from baton.checkpoints.random_model import write_checkpoint
from baton.core.config import CacheConfig, EngineConfig, SchedulerConfig
from baton.engine.api import SamplingParams
from baton.engine.llm import LLM
from baton.engine.runner.cache_description import UniformTypeKVCacheSpecs, describe_cache
from tests.engine_core.test_llm import count_preemptions, prompts_of, tokens_of
from tests.engine_models.paged import assert_greedy, load_reference

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [*prompts_of(8), [5 + index % 300 for index in range(90)]]


@pytest.fixture(scope="module", params=["deepseek_v2", "deepseek_v3", "deepseek_v32"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = write_checkpoint(
        tmp_path_factory.mktemp("model"),
        family=request.param,
        hidden=64,
        layers=3,
        heads=4,
        vocab=512,
        max_position=256,
        rope_scaling="yarn",
    )
    return EngineConfig(
        model_config=load_model_config(folder), cache_config=CacheConfig(num_gpu_blocks=200, block_size=4)
    )


@pytest.fixture(scope="module")
def expected(config: EngineConfig) -> list[list[int]]:
    """Greedy answers of an engine that computes each prompt in one step, proven by transformers."""
    with LLM(config) as llm:
        answers = tokens_of(llm.generate(PROMPTS, GREEDY))
    assert_greedy(load_reference(Path(config.model_config.model)), PROMPTS, answers)
    return answers


@pytest.mark.parametrize("chunk", [2048, 7])
@pytest.mark.parametrize("graph_mode", ["off", "full"])
def test_tokens_are_those_of_transformers(
    config: EngineConfig, expected: list[list[int]], chunk: int, graph_mode: str
) -> None:
    device = msgspec.structs.replace(config.device_config, graph_mode=graph_mode)
    limits = SchedulerConfig(max_num_batched_tokens=chunk)
    with LLM(msgspec.structs.replace(config, scheduler_config=limits, device_config=device)) as llm:
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected
        again = llm.generate(PROMPTS, GREEDY)
        assert tokens_of(again) == expected
        assert any(completion.num_cached_tokens for completion in again)


def test_tokens_survive_preemption(config: EngineConfig, expected: list[list[int]]) -> None:
    cache = msgspec.structs.replace(config.cache_config, num_gpu_blocks=35)
    with LLM(msgspec.structs.replace(config, cache_config=cache)) as llm:
        preempted = count_preemptions(llm)
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected
        assert preempted, "the pool is too large: nothing was preempted"


def test_connectors_see_one_head_of_latents(config: EngineConfig) -> None:
    """vLLM describes such caches in the same way: the head size is the slot's, and a page has it once."""
    (group,) = describe_cache(config, 0).kv_cache_groups
    spec, of_index = group.kv_cache_spec, None
    if isinstance(spec, UniformTypeKVCacheSpecs):
        assert list(spec.kv_cache_specs) == group.layer_names
        spec, of_index = list(spec.kv_cache_specs.values())[:2]
    assert (spec.num_kv_heads, spec.head_size, spec.page_size_bytes) == (1, 32 + 8, 4 * (32 + 8) * 4)
    assert (of_index is not None) == (config.model_config.index_size > 0)
    if of_index is not None:
        assert (of_index.num_kv_heads, of_index.head_size, of_index.page_size_bytes) == (1, 16, 4 * 16 * 4)
