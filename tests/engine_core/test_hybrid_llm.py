"""Models with windows: tokens with one block table per group equal those with one table for all layers."""

import logging
from collections.abc import Sequence

import msgspec
import pytest

from baton.checkpoints.checkpoint import load_model_config
from baton.checkpoints.random_model import write_checkpoint
from baton.contract import KVConnectorSchedulerHalf, KVConnectorWorkerHalf, NullSchedulerHalf, NullWorkerHalf
from baton.core.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
)
from baton.core.kv_groups import KVCacheGroup, is_hybrid
from baton.engine.api import SamplingParams
from baton.engine.attention.kv_memory import allocate_kv_cache
from baton.engine.llm import LLM
from tests.engine_core.test_llm import prompts_of, tokens_of

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [*prompts_of(8), [5 + index % 300 for index in range(90)]]
WINDOW = 10


@pytest.fixture(scope="module", params=["gemma3", "gpt_oss", "mistral"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = write_checkpoint(
        tmp_path_factory.mktemp("model"),
        family=request.param,
        hidden=32,
        layers=6,
        heads=4,
        vocab=512,
        max_position=256,
        sliding_window=WINDOW,
    )
    return EngineConfig(
        model_config=load_model_config(folder),
        cache_config=CacheConfig(num_gpu_blocks=200, block_size=4),
    )


def one_table(config: EngineConfig) -> EngineConfig:
    cache = msgspec.structs.replace(config.cache_config, hybrid_kv_cache="off", enable_prefix_caching=False)
    return msgspec.structs.replace(config, cache_config=cache)


@pytest.fixture(scope="module")
def expected(config: EngineConfig) -> list[list[int]]:
    with LLM(one_table(config)) as llm:
        return [tokens_of(llm.generate([prompt], GREEDY))[0] for prompt in PROMPTS]


@pytest.mark.parametrize(("chunk", "graph_mode"), [(2048, "off"), (7, "off"), (7, "full")])
def test_tokens_are_those_of_one_table(
    config: EngineConfig, expected: list[list[int]], chunk: int, graph_mode: str
) -> None:
    assert is_hybrid(config.kv_cache_groups)
    config = msgspec.structs.replace(
        config,
        scheduler_config=SchedulerConfig(max_num_batched_tokens=chunk),
        device_config=DeviceConfig(graph_mode=graph_mode),  # type: ignore[arg-type]
    )
    with LLM(config) as llm:
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected
        again = llm.generate(PROMPTS, GREEDY)  # Prefix hits, at the ends of windows.
        assert tokens_of(again) == expected
        assert any(completion.num_cached_tokens for completion in again)
        llm.core.scheduler.kv_cache.assert_empty()


def test_tokens_survive_preemption(config: EngineConfig, expected: list[list[int]]) -> None:
    cache = msgspec.structs.replace(config.cache_config, num_gpu_blocks=60)
    tight = msgspec.structs.replace(
        config, cache_config=cache, scheduler_config=SchedulerConfig(max_num_batched_tokens=16)
    )
    with LLM(tight) as llm:
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("config", ["gemma3"], indirect=True)
def test_tokens_are_the_same_with_steps_in_flight_on_two_ranks(
    config: EngineConfig, expected: list[list[int]]
) -> None:
    cache = msgspec.structs.replace(config.cache_config, num_gpu_blocks=60)
    scored = msgspec.structs.replace(GREEDY, prompt_logprobs=0)
    ranks = ParallelConfig(tensor_parallel_size=2, executor="multiprocess", max_concurrent_batches=3)
    busy = msgspec.structs.replace(
        config,
        cache_config=cache,
        parallel_config=ranks,
        scheduler_config=SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=2),
    )
    with LLM(busy) as llm:
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected
        of_two = [one.prompt_logprobs for one in llm.generate(PROMPTS[-4:], scored)]
        llm.core.scheduler.kv_cache.assert_empty()
    with LLM(config) as llm:
        of_one = [one.prompt_logprobs for one in llm.generate(PROMPTS[-4:], scored)]
    for one, two, prompt in zip(of_one, of_two, PROMPTS[-4:], strict=True):
        assert one is not None
        assert two is not None
        assert len(two) == len(prompt) - 1
        values = [[e.chosen.logprob for e in raw.rows(0, len(raw))] for raw in (one, two)]
        assert values[1] == pytest.approx(values[0], abs=1e-4)


def test_the_layers_share_memory(config: EngineConfig) -> None:
    groups = config.kv_cache_groups
    assert num_bytes(config, groups) * len(groups) == num_bytes(config, None)


def num_bytes(config: EngineConfig, groups: Sequence[KVCacheGroup] | None) -> int:
    caches = allocate_kv_cache(config.model_config, config.cache_config, 0, 1, "cpu", groups=groups)
    storages = {storage.data_ptr(): storage for storage in (c.untyped_storage() for c in caches.values())}
    return sum(storage.nbytes() for storage in storages.values())


class OneTableFactory:
    """Factory of a connector without support for groups."""

    def scheduler_half(self, config: EngineConfig) -> KVConnectorSchedulerHalf:
        assert config.cache_config.hybrid_kv_cache == "off"
        return NullSchedulerHalf()

    def worker_half(self, config: EngineConfig, tp_rank: int) -> KVConnectorWorkerHalf:
        assert config.cache_config.hybrid_kv_cache == "off"
        return NullWorkerHalf()


one_table_factory = OneTableFactory()


def test_a_connector_that_knows_no_groups_is_shown_one_table(
    config: EngineConfig, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), LLM(config, f"{__name__}:one_table_factory") as llm:
        assert not llm.core.scheduler.kv_cache.is_hybrid
        assert tokens_of(llm.generate(PROMPTS[:3], GREEDY)) == expected[:3]
    assert "share one block table" in caplog.text
