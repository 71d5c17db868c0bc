"""Replayed decode steps: the tokens are those of eager steps, with any connector."""

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.checkpoints.checkpoint import load_model_config
from baton.core.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    KVTransferConfig,
    ParallelConfig,
    SchedulerConfig,
)
from baton.core.errors import ConfigError
from baton.engine.api import SamplingParams
from baton.engine.attention.cuda import why_unavailable
from baton.engine.attention.kv_memory import KVCacheLayout, allocate_kv_cache
from baton.engine.forward_context import ForwardContext, build_attention_metadata
from baton.engine.graphs import DecodeGraphs, GraphMode, bucket_sizes, choose_mode, decode_graphs
from baton.engine.llm import LLM
from baton.engine.models import build_model, compiled_rows, decoder, load_weights
from tests.engine_models import asserting_connector
from tests.engine_models.asserting_connector import AssertingConnector
from tests.engine_models.paged import CheckpointOf, prompt_of
from tests.engine_models.tape import TapeRecorder, TorchKernelBackend

NUM_LAYERS, BLOCK_SIZE, MAX_SEQS = 4, 8, 5
FACTORY = "baton.assemble:connector_factory"
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
MODES = ("full", "piecewise")

ConfigOf = Callable[..., EngineConfig]

# More prompts than run at once, so that buckets of all sizes are used.
PROMPTS = [prompt_of(seed, length) for seed, length in enumerate((3, 40, 17, 8, 25, 33, 1))]


@pytest.fixture
def config_of(checkpoint_of: CheckpointOf) -> ConfigOf:
    def make(
        mode: str = "off",
        *,
        family: str = "llama",
        connector: str | None = None,
        executor: str = "inprocess",
        **device: Any,
    ) -> EngineConfig:
        transfer = None
        if connector is not None:
            transfer = KVTransferConfig(
                kv_connector=connector,
                kv_role="kv_both",
                kv_connector_module_path=asserting_connector.__name__,
            )
        return EngineConfig(
            model_config=load_model_config(checkpoint_of(family), max_model_len=128),
            cache_config=CacheConfig(num_gpu_blocks=64, block_size=BLOCK_SIZE, enable_prefix_caching=False),
            scheduler_config=SchedulerConfig(max_num_seqs=MAX_SEQS, max_num_batched_tokens=32),
            parallel_config=ParallelConfig(
                tensor_parallel_size=1 if executor == "inprocess" else 2,
                executor=executor,  # type: ignore[arg-type]
            ),
            device_config=DeviceConfig(graph_mode=mode, **device),  # type: ignore[arg-type]
            kv_transfer_config=transfer,
        )

    return make


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of requests of each replayed step of this process."""
    made: list[int] = []
    run = DecodeGraphs.run

    def counted(self: DecodeGraphs, token_ids: Any, step: ForwardContext) -> torch.Tensor:
        made.append(len(token_ids))
        return run(self, token_ids, step)

    monkeypatch.setattr(DecodeGraphs, "run", counted)
    return made


def check_tokens_equal(config_of: ConfigOf, prompts: list[list[int]], **how: Any) -> list[list[int]]:
    with LLM(config_of(**{**how, "mode": "off"})) as llm:
        expected = [completion.token_ids for completion in llm.generate(prompts, GREEDY)]
    with LLM(config_of(**how)) as llm:
        assert [completion.token_ids for completion in llm.generate(prompts, GREEDY)] == expected
    return expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "mode", "family"),
    [
        ("cpu", "full", "llama"),
        ("cpu", "full", "mistral"),
        ("cpu", "piecewise", "qwen3"),
        ("cpu", "piecewise", "gemma3"),
        *(
            pytest.param("cuda", mode, family, marks=pytest.mark.gpu)
            for mode in MODES
            for family in ("llama", "mistral", "qwen3", "gemma3")
        ),
    ],
)
def test_the_tokens_are_those_of_eager_steps(
    config_of: ConfigOf, replays: list[int], mode: str, family: str, device: str
) -> None:
    if device == "cuda" and (reason := why_unavailable()) is not None:
        pytest.skip(reason)
    check_tokens_equal(config_of, PROMPTS, mode=mode, family=family, device=device)
    assert replays
    assert max(replays) > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "family"),
    [("piecewise", "llama"), ("piecewise", "mistral"), ("full", "qwen3"), ("full", "gemma3")],
)
def test_a_replay_runs_no_python(
    monkeypatch: pytest.MonkeyPatch, config_of: ConfigOf, replays: list[int], mode: str, family: str
) -> None:
    """The operations of a GPU: graphs are tapes, and the GPU's kernel is written in torch."""
    monkeypatch.setattr(decoder, "build_backend", TorchKernelBackend)
    monkeypatch.setattr(decode_graphs, "recorder_for", lambda device: TapeRecorder())
    monkeypatch.setattr(compiled_rows, "_functions", lambda: None)  # A tape records torch's operations only.
    check_tokens_equal(config_of, PROMPTS, mode=mode, family=family)
    assert max(replays) > 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_recording_and_padding_write_only_to_the_scratch_block(
    config_of: ConfigOf, mode: str, layout: KVCacheLayout
) -> None:
    config = config_of(mode, graph_buckets=(1, 4))
    num_blocks = config.cache_config.num_gpu_blocks
    model = build_model(config.model_config)
    load_weights(model, config.model_config.model)
    caches = allocate_kv_cache(
        config.model_config,
        config.cache_config,
        0,
        1,
        "cpu",
        layout=layout,
        num_scratch_blocks=1,
    )
    for cache in caches.values():
        cache.fill_(torch.nan)
    graphs = DecodeGraphs(config, model, caches, GraphMode(mode), torch.device("cpu"))
    with torch.inference_mode():
        graphs.record()
        for cache in caches.values():
            assert cache[:num_blocks].isnan().all()
            assert not cache[num_blocks, :, 0].isnan().any()
        # Each at the first token of its first block, so that no query attends to an unwritten slot.
        metadata = build_attention_metadata([0, 0, 0], [1, 1, 1], [[5], [0], [23]], BLOCK_SIZE)
        assert graphs.can_run(metadata)
        hidden = graphs.run(np.array([7, 8, 9]), ForwardContext(metadata, caches)).clone()
    assert hidden.shape[0] == 3
    assert not hidden.isnan().any()
    for cache in caches.values():
        written = ~cache[:num_blocks].isnan().all(dim=-1).all(dim=1)  # [blocks, slots]
        assert written.nonzero().tolist() == [[0, 0], [5, 0], [23, 0]]


def test_only_decode_steps_of_recorded_sizes_are_replayed(config_of: ConfigOf) -> None:
    config = config_of("full", graph_buckets=(2,))
    model = build_model(config.model_config)
    caches = allocate_kv_cache(config.model_config, config.cache_config, 0, 1, "cpu", num_scratch_blocks=1)
    graphs = DecodeGraphs(config, model, caches, GraphMode.FULL, torch.device("cpu"))
    num_blocks_max = config.model_config.max_model_len // BLOCK_SIZE + 1

    def can_run(computed: list[int], scheduled: list[int]) -> bool:
        tables = [list(range(num_blocks_max + 1))] * len(computed)
        return graphs.can_run(build_attention_metadata(computed, scheduled, tables, BLOCK_SIZE))

    assert can_run([3], [1])
    assert can_run([3, 15], [1, 1])
    assert not can_run([3, 3, 3], [1, 1, 1]), "more requests than the largest bucket"
    assert not can_run([3, 3], [1, 2]), "a prefill"
    assert not can_run([num_blocks_max * BLOCK_SIZE], [1]), "more blocks than a plan has room for"


@given(most=st.integers(1, 70), asked=st.lists(st.integers(1, 80), max_size=4))
def test_buckets_hold_all_concurrent_requests_by_default(most: int, asked: list[int]) -> None:
    config: Any = msgspec.defstruct("Config", ["scheduler_config", "device_config"])(
        SchedulerConfig(max_num_seqs=most), DeviceConfig(graph_buckets=tuple(asked))
    )
    sizes = bucket_sizes(config)
    assert list(sizes) == sorted(set(sizes))
    assert all(1 <= size <= most for size in sizes)
    if not asked:
        for num_reqs in range(1, most + 1):
            size = next(size for size in sizes if size >= num_reqs)
            assert size == most or size < 2 * num_reqs


def test_a_bucket_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device_config\.graph_buckets"):
        DeviceConfig(graph_buckets=(4, 0))


# --- Connectors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "device", "connector", "expected"),
    [
        ("auto", "cpu", None, GraphMode.OFF),
        ("auto", "cuda", None, GraphMode.FULL),
        ("auto", "cuda", "AssertingConnector", GraphMode.FULL),
        ("auto", "cuda", "NeedsHooks", GraphMode.PIECEWISE),
        ("auto", "cuda", "Capturable", GraphMode.FULL),
        ("off", "cuda", "Capturable", GraphMode.OFF),
        ("piecewise", "cuda", "Capturable", GraphMode.PIECEWISE),
        ("full", "cpu", "NeedsHooks", GraphMode.PIECEWISE),
        ("full", "cpu", "AssertingConnector", GraphMode.FULL),
    ],
)
def test_the_connector_decides_what_can_be_recorded(
    config_of: ConfigOf, mode: str, device: str, connector: str | None, expected: GraphMode
) -> None:
    from baton.assemble import connector_factory

    config = config_of(mode, connector=connector, device=device)
    assert choose_mode(config, connector_factory.worker_half(config, 0)) is expected


def expected_counts(connector: str, mode: str, *, ranks: int, num_buckets: int) -> dict[str, int]:
    """Calls for one prompt that is computed in one step, with one step for each GREEDY token."""
    num_steps = GREEDY.max_tokens
    hooked = 1 if connector == "AssertingConnector" and mode == "full" else num_steps
    counts = {
        "bind": num_steps,
        "clear": num_steps - 1,  # The last clear comes after the last report.
        "start_load": num_steps,
        "wait_for_save": num_steps,
        "wait_layer": hooked * NUM_LAYERS,
        "save_layer": hooked * NUM_LAYERS,
    }
    if connector == "Capturable" and mode == "full":
        hooks = num_buckets * NUM_LAYERS
        counts |= {"bind, empty": 1, "clear, empty": 1, "reset": 1}
        counts |= {"wait_layer, empty": hooks, "save_layer, empty": hooks}
    return {name: ranks * count for name, count in counts.items()}


def check_hooks(
    config: EngineConfig, connector: str, mode: str, prompt: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), LLM(config, FACTORY) as llm:
        (completion,) = llm.generate([prompt], GREEDY)
        assert len(completion.token_ids) == GREEDY.max_tokens
        scheduler = AssertingConnector.scheduler
        assert scheduler is not None
        seen = scheduler.seen
    assert caplog.records == []
    ranks = config.parallel_config.tensor_parallel_size
    assert seen == expected_counts(connector, mode, ranks=ranks, num_buckets=len(bucket_sizes(config)))


@pytest.mark.parametrize("mode", ["off", *MODES])
@pytest.mark.parametrize("connector", ["AssertingConnector", "NeedsHooks", "Capturable"])
def test_a_connector_that_insists_on_its_metadata_passes_start_and_has_its_hooks(
    config_of: ConfigOf, caplog: pytest.LogCaptureFixture, connector: str, mode: str
) -> None:
    check_hooks(config_of(mode, connector=connector), connector, mode, prompt_of(1, 20), caplog)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("forked_programs")
def test_the_hooks_are_called_in_every_rank(config_of: ConfigOf, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of("full", connector="Capturable", executor="multiprocess")
    check_hooks(config, "Capturable", "full", prompt_of(1, 20), caplog)


def test_a_replay_runs_the_operations_of_captured_hooks_and_no_python(
    monkeypatch: pytest.MonkeyPatch, config_of: ConfigOf
) -> None:
    monkeypatch.setattr(decoder, "build_backend", TorchKernelBackend)
    monkeypatch.setattr(decode_graphs, "recorder_for", lambda device: TapeRecorder())
    monkeypatch.setattr(compiled_rows, "_functions", lambda: None)  # A tape records torch's operations only.
    config = config_of("full", connector="CountsOnDevice")
    with LLM(config, FACTORY) as llm:
        half: Any = llm.core.executor.only_half()
        before = int(half.num_saved)  # Layers that were saved while steps were recorded.
        assert before == len(bucket_sizes(config)) * NUM_LAYERS
        llm.generate([prompt_of(1, 20)], GREEDY)
        assert int(half.num_saved) - before == GREEDY.max_tokens * NUM_LAYERS
        scheduler = AssertingConnector.scheduler
        assert scheduler is not None
        assert scheduler.seen["save_layer"] == NUM_LAYERS, "of the prefill, which is not replayed"


def test_the_last_token_of_a_prompt_is_not_replayed(config_of: ConfigOf, replays: list[int]) -> None:
    """The rest is in the prefix cache. A connector that saves prompts layer by layer saves this token too."""
    config = config_of("full", connector="AssertingConnector")
    cached = msgspec.structs.replace(config.cache_config, enable_prefix_caching=True)
    with LLM(msgspec.structs.replace(config, cache_config=cached), FACTORY) as llm:
        for _ in range(2):
            llm.generate([prompt_of(1, 2 * BLOCK_SIZE + 1)], GREEDY)
        scheduler = AssertingConnector.scheduler
        assert scheduler is not None
        assert scheduler.seen["save_layer"] == 2 * NUM_LAYERS
    assert len(replays) == 2 * (GREEDY.max_tokens - 1)
