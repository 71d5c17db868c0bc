"""Engines with recurrent states give the tokens of transformers, regardless of the scheduler's decisions."""

from pathlib import Path

import msgspec
import pytest
import torch

from baton.checkpoints.checkpoint import load_model_config
from baton.checkpoints.random_model import write_checkpoint
from baton.core.config import CacheConfig, EngineConfig, KVTransferConfig, ParallelConfig, SchedulerConfig
from baton.core.errors import ConfigError
from baton.core.kv_groups import layer_name
from baton.engine.api import SamplingParams
from baton.engine.llm import LLM
from baton.engine.runner.cache_description import StateSpec, describe_cache
from baton.engine.runner.hybrid import settle_groups
from tests.engine_core.test_llm import count_preemptions, prompts_of, tokens_of
from tests.engine_models.paged import assert_greedy, load_reference

pytestmark = pytest.mark.slow

BLOCK = 8
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
_LONG = [5 + 7 * index % 300 for index in range(90)]
# Around the ends of blocks: a state can be used again only at its own length.
PROMPTS = [*prompts_of(4), *(_LONG[:length] for length in (1, 2, 7, 8, 9, 15, 16, 17, 23, 24, 25, 90))]


@pytest.fixture(scope="module", params=["mamba2", "granite_hybrid", "qwen3_next", "nemotron_h"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = write_checkpoint(
        tmp_path_factory.mktemp("model"),
        family=request.param,
        hidden=64,
        layers=5,
        heads=4,
        vocab=512,
        max_position=256,
    )
    cache = CacheConfig(num_gpu_blocks=300, block_size=BLOCK)
    return EngineConfig(model_config=load_model_config(folder), cache_config=cache)


@pytest.fixture(scope="module")
def expected(config: EngineConfig) -> list[list[int]]:
    """Greedy answers of an engine that computes each prompt in one step, proven by transformers."""
    cache = msgspec.structs.replace(config.cache_config, enable_prefix_caching=False)
    with LLM(msgspec.structs.replace(config, cache_config=cache)) as llm:
        answers = tokens_of(llm.generate(PROMPTS, GREEDY))
    assert_greedy(load_reference(Path(config.model_config.model)), PROMPTS, answers)
    return answers


@pytest.mark.parametrize(("chunk", "caching"), [(2048, True), (11, True), (3, False)])
def test_tokens_are_those_of_transformers(
    config: EngineConfig, expected: list[list[int]], chunk: int, caching: bool
) -> None:
    limits = SchedulerConfig(max_num_batched_tokens=chunk)
    cache = msgspec.structs.replace(config.cache_config, enable_prefix_caching=caching)
    with LLM(msgspec.structs.replace(config, scheduler_config=limits, cache_config=cache)) as llm:
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected
        asked = slice(None) if caching else slice(-2, None)  # Uncached prompts would be the same work.
        again = llm.generate(PROMPTS[asked], GREEDY)
        assert tokens_of(again) == expected[asked]
        assert any(completion.num_cached_tokens for completion in again) is caching


def test_a_prompt_goes_on_from_the_last_state_that_is_cached(
    config: EngineConfig, expected: list[list[int]]
) -> None:
    with LLM(config) as llm:
        (one,) = llm.generate([_LONG], GREEDY)
        (two,) = llm.generate([_LONG], GREEDY)
        assert one.token_ids == two.token_ids == expected[-1]
        assert two.num_cached_tokens == (len(_LONG) - 1) // BLOCK * BLOCK


def test_tokens_survive_preemption(config: EngineConfig, expected: list[list[int]]) -> None:
    cache = msgspec.structs.replace(config.cache_config, num_gpu_blocks=45)
    with LLM(msgspec.structs.replace(config, cache_config=cache)) as llm:
        preempted = count_preemptions(llm)
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected
        if len(config.model_config.state_layers) < config.model_config.num_hidden_layers:
            assert preempted, "the pool is too large: nothing was preempted"


@pytest.mark.processes
@pytest.mark.usefixtures("forked_programs")
def test_tokens_of_two_ranks_with_steps_in_flight(config: EngineConfig, expected: list[list[int]]) -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, executor="multiprocess", max_concurrent_batches=2)
    with LLM(msgspec.structs.replace(config, parallel_config=parallel)) as llm:
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected


def test_states_matter(config: EngineConfig, expected: list[list[int]]) -> None:
    """Zeros in place of the states change the tokens, so the other tests would notice a wrong state."""
    with LLM(config) as llm:
        caches = llm.core.executor._worker._runner._kv_caches  # type: ignore[attr-defined]
        llm.generate([_LONG], GREEDY)
        for layer in config.model_config.state_layers:
            caches[layer_name(layer)].zero_()
        (after,) = llm.generate([_LONG], GREEDY)
        assert after.num_cached_tokens
        assert after.token_ids != expected[-1]


def test_connectors_see_the_parts_of_a_state(config: EngineConfig) -> None:
    groups = describe_cache(config, 0).kv_cache_groups
    specs = [group.kv_cache_spec for group in groups if isinstance(group.kv_cache_spec, StateSpec)]
    model = config.model_config
    assert sum(len(g.layer_names) for g in groups if g.kv_cache_spec in specs) == len(model.state_layers)
    for spec in specs:
        assert [shape[1:] for shape in spec.shapes] == [part.unit_shape for part in model.state_parts]
        assert spec.dtypes == (torch.float32,) * len(spec.shapes)


def test_a_connector_that_cannot_carry_states_is_refused(config: EngineConfig) -> None:
    transfer = KVTransferConfig(
        kv_connector="DecodeBenchConnector",
        kv_connector_module_path="examples.decode_bench",
        kv_role="kv_both",
    )
    with pytest.raises(ConfigError, match="DecodeBenchConnector cannot carry recurrent states"):
        settle_groups(
            msgspec.structs.replace(config, kv_transfer_config=transfer), "baton.assemble:connector_factory"
        )
