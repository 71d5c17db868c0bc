"""Engines of every kind of cache give the tokens of their model, regardless of the scheduler's decisions.

The model alone computes each prompt in one step. tests/engine_models/test_decoder.py compares it with
transformers.
"""

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from baton.checkpoints.checkpoint import load_model_config
from baton.checkpoints.random_model import write_checkpoint
from baton.contract import KVConnectorSchedulerHalf, KVConnectorWorkerHalf, NullSchedulerHalf, NullWorkerHalf
from baton.core.config import (
    CacheConfig,
    EngineConfig,
    KVTransferConfig,
    ParallelConfig,
    SchedulerConfig,
)
from baton.core.errors import ConfigError
from baton.core.kv_groups import KVCacheGroup, is_hybrid
from baton.engine.api import SamplingParams
from baton.engine.attention.kv_memory import allocate_kv_cache
from baton.engine.llm import LLM
from baton.engine.runner.cache_description import StateSpec, UniformTypeKVCacheSpecs, describe_cache
from baton.engine.runner.hybrid import settle_groups
from tests.engine_core.test_llm import count_preemptions, prompts_of, tokens_of
from tests.engine_models.conftest import FAMILIES, SMALL
from tests.engine_models.paged import BLOCK_SIZE, SHUFFLED_BLOCKS, PagedModel

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
_LONG = [5 + 7 * index % 300 for index in range(90)]
# Around the ends of blocks: a state can be used again only at its own length.
PROMPTS = [*prompts_of(4), *(_LONG[:length] for length in (1, 7, 8, 9, 17, 24, 25, 90))]
HYBRID = ["gemma3", "gpt_oss", "mistral"]
LATENT = ["deepseek_v2", "deepseek_v3", "deepseek_v32"]
STATES = ["mamba2", "granite_hybrid", "qwen3_next", "nemotron_h"]


@pytest.fixture(scope="module", params=[*HYBRID, *LATENT, *STATES])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def config(family: str, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    fields: dict[str, Any] = {**SMALL, **FAMILIES[family]}
    return EngineConfig(
        model_config=load_model_config(write_checkpoint(tmp_path_factory.mktemp("model"), **fields)),
        cache_config=CacheConfig(num_gpu_blocks=300, block_size=BLOCK_SIZE),
    )


@pytest.fixture(scope="module")
def expected(config: EngineConfig) -> list[list[int]]:
    model = PagedModel(config.model_config)
    tables = [SHUFFLED_BLOCKS[first : first + 13] for first in range(0, 52, 13)]
    batches = [PROMPTS[first : first + 4] for first in range(0, len(PROMPTS), 4)]
    return [answer for batch in batches for answer in model.greedy_of_each(batch, GREEDY.max_tokens, tables)]


def changed(config: EngineConfig, **fields: Any) -> EngineConfig:
    """`config` with these fields of its parts."""
    parts = {
        part: msgspec.structs.replace(getattr(config, part), **values) for part, values in fields.items()
    }
    return msgspec.structs.replace(config, **parts)


def test_tokens_are_those_of_the_model(config: EngineConfig, expected: list[list[int]], family: str) -> None:
    """Chunks of prompts, replayed decode steps, and prefix hits: at the ends of windows and at states."""
    assert is_hybrid(config.kv_cache_groups) == (family not in LATENT)
    device = {"graph_mode": "off" if family in STATES else "full"}
    chunks = changed(config, scheduler_config={"max_num_batched_tokens": 7}, device_config=device)
    with LLM(chunks) as llm:
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected
        again = llm.generate(PROMPTS, GREEDY)
        assert tokens_of(again) == expected
        assert again[-1].num_cached_tokens == (len(_LONG) - 1) // BLOCK_SIZE * BLOCK_SIZE
        llm.core.scheduler.kv_cache.assert_empty()


def test_tokens_survive_preemption(config: EngineConfig, expected: list[list[int]], family: str) -> None:
    # The longest prompt with its answer takes 13 blocks in each table. Gemma 3 has four tables, Mistral one.
    num_blocks = {"gemma3": 60, "mistral": 20}.get(family, 20 if family in LATENT else 45)
    with LLM(changed(config, cache_config={"num_gpu_blocks": num_blocks})) as llm:
        preempted = count_preemptions(llm)
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected
        assert preempted or family == "mamba2", "the pool is too large: nothing was preempted"


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"], indirect=True)
def test_without_a_prefix_cache_no_state_is_used_again(
    config: EngineConfig, expected: list[list[int]]
) -> None:
    small = SchedulerConfig(max_num_batched_tokens=3)
    uncached = changed(config, cache_config={"enable_prefix_caching": False})
    with LLM(msgspec.structs.replace(uncached, scheduler_config=small)) as llm:
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected
        (again,) = llm.generate([_LONG], GREEDY)
        assert (again.token_ids, again.num_cached_tokens) == (expected[-1], 0)


@pytest.mark.processes
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"], indirect=True)
def test_tokens_are_the_same_with_steps_in_flight_on_two_ranks(
    config: EngineConfig, expected: list[list[int]]
) -> None:
    scored = msgspec.structs.replace(GREEDY, prompt_logprobs=0)
    busy = msgspec.structs.replace(
        changed(config, cache_config={"num_gpu_blocks": 60}),
        parallel_config=ParallelConfig(
            tensor_parallel_size=2, executor="multiprocess", max_concurrent_batches=3
        ),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=4),
    )
    some = PROMPTS[-6:]
    with LLM(busy) as llm:
        assert tokens_of(llm.generate(some, GREEDY)) == expected[-6:]
        of_two = [one.prompt_logprobs for one in llm.generate(some[-2:], scored)]
        llm.core.scheduler.kv_cache.assert_empty()
    with LLM(config) as llm:
        of_one = [one.prompt_logprobs for one in llm.generate(some[-2:], scored)]
    for one, two, prompt in zip(of_one, of_two, some[-2:], strict=True):
        assert one is not None
        assert two is not None
        assert len(two) == len(prompt) - 1
        values = [[e.chosen.logprob for e in raw.rows(0, len(raw))] for raw in (one, two)]
        assert values[1] == pytest.approx(values[0], abs=1e-4)


# --- Caches as connectors see them ---------------------------------------------------------------------


@pytest.mark.parametrize("family", HYBRID, indirect=True)
def test_the_layers_share_memory(config: EngineConfig) -> None:
    def num_bytes(groups: Sequence[KVCacheGroup] | None) -> int:
        caches = allocate_kv_cache(config.model_config, config.cache_config, 0, 1, "cpu", groups=groups)
        storages = {s.data_ptr(): s.nbytes() for s in (c.untyped_storage() for c in caches.values())}
        return sum(storages.values())

    assert num_bytes(config.kv_cache_groups) * len(config.kv_cache_groups) == num_bytes(None)


class OneTableFactory:
    """Factory of a connector without support for groups."""

    def scheduler_half(self, config: EngineConfig) -> KVConnectorSchedulerHalf:
        assert config.cache_config.hybrid_kv_cache == "off"
        return NullSchedulerHalf()

    def worker_half(self, config: EngineConfig, tp_rank: int) -> KVConnectorWorkerHalf:
        assert config.cache_config.hybrid_kv_cache == "off"
        return NullWorkerHalf()


one_table_factory = OneTableFactory()


@pytest.mark.parametrize("family", HYBRID, indirect=True)
def test_a_connector_that_knows_no_groups_is_shown_one_table(
    config: EngineConfig, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), LLM(config, f"{__name__}:one_table_factory") as llm:
        assert not llm.core.scheduler.kv_cache.is_hybrid
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected
    assert "share one block table" in caplog.text


@pytest.mark.parametrize("family", LATENT, indirect=True)
def test_connectors_see_one_head_of_latents(config: EngineConfig) -> None:
    """vLLM describes such caches in the same way: the head size is the slot's, and a page has it once."""
    (group,) = describe_cache(config, 0).kv_cache_groups
    spec, of_index = group.kv_cache_spec, None
    if isinstance(spec, UniformTypeKVCacheSpecs):
        assert list(spec.kv_cache_specs) == group.layer_names
        spec, of_index = list(spec.kv_cache_specs.values())[:2]
    slots = 4 * BLOCK_SIZE  # Bytes of one number in each slot.
    assert (spec.num_kv_heads, spec.head_size, spec.page_size_bytes) == (1, 32 + 8, slots * (32 + 8))
    assert (of_index is not None) == (config.model_config.index_size > 0)
    if of_index is not None:
        assert (of_index.num_kv_heads, of_index.head_size, of_index.page_size_bytes) == (1, 16, slots * 16)


@pytest.mark.parametrize("family", STATES, indirect=True)
def test_connectors_see_the_parts_of_a_state(config: EngineConfig) -> None:
    groups = describe_cache(config, 0).kv_cache_groups
    specs = [group.kv_cache_spec for group in groups if isinstance(group.kv_cache_spec, StateSpec)]
    model = config.model_config
    assert sum(len(g.layer_names) for g in groups if g.kv_cache_spec in specs) == len(model.state_layers)
    for spec in specs:
        assert [shape[1:] for shape in spec.shapes] == [part.unit_shape for part in model.state_parts]
        assert spec.dtypes == (torch.float32,) * len(spec.shapes)


@pytest.mark.parametrize("family", STATES, indirect=True)
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
