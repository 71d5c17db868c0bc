"""Conversion of settings and a checkpoint to the engine's configuration."""

from pathlib import Path
from typing import Any

import pytest

from baton.checkpoints.random_model import write_checkpoint
from baton.cli.engine_config import engine_config
from baton.cli.serve_settings import resolve
from baton.core.config import EngineConfig
from baton.core.errors import UserError

# Two layers, two KV heads of 8: K and V of a token take 2 * 2 * 2 * 8 * 4 bytes in float32.
TOKEN_BYTES = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "toy"
    return write_checkpoint(folder, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, vocab=512)


def configured(model: Path, **given: Any) -> EngineConfig:
    return engine_config(
        resolve({"model": str(model), "device": "cpu", **given}, environment={"BATON_SECRET": "x" * 16})
    )


def test_the_cache_is_as_large_as_the_memory_that_it_may_take(model: Path) -> None:
    assert configured(model, kv_cache_memory="1MiB").cache_config.num_gpu_blocks == (1 << 20) // (
        16 * TOKEN_BYTES
    )
    half = configured(model, kv_cache_memory="1MiB", dtype="bfloat16", block_size=32)
    assert half.cache_config.num_gpu_blocks == (1 << 20) // (32 * TOKEN_BYTES // 2)


def test_ranks_share_the_heads_and_run_in_their_own_processes(model: Path) -> None:
    config = configured(model, kv_cache_memory="1MiB", tensor_parallel_size=2)
    assert config.cache_config.num_gpu_blocks == 2 * (1 << 20) // (16 * TOKEN_BYTES)
    assert config.parallel_config.executor == "multiprocess"
    assert configured(model).parallel_config.executor == "inprocess"


def test_every_setting_arrives(model: Path) -> None:
    config = configured(
        model,
        served_model_name="name",
        max_model_len=128,
        seed=3,
        num_blocks=9,
        enable_prefix_caching=False,
        max_num_batched_tokens=200,
        max_num_seqs=4,
        scheduling_policy="priority",
        enable_chunked_prefill=False,
        threads=2,
        graph_mode="piecewise",
        kv_transfer_config='{"kv_connector": "X", "kv_role": "kv_both", "engine_id": "e"}',
    )
    assert (config.model_config.served_model_name, config.model_config.max_model_len) == ("name", 128)
    assert (config.cache_config.num_gpu_blocks, config.cache_config.enable_prefix_caching) == (9, False)
    scheduler = config.scheduler_config
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (200, 4)
    assert (scheduler.policy, scheduler.enable_chunked_prefill) == ("priority", False)
    assert (config.device_config.num_threads, config.seed) == (2, 3)
    assert config.device_config.graph_mode == "piecewise"
    assert config.kv_transfer_config is not None
    assert config.kv_transfer_config.engine_id == "e"


@pytest.mark.parametrize(("num_blocks", "longest"), [(2, 33), (255, 4081), (256, 4096), (999, 4096)])
def test_the_length_is_what_the_pool_holds_for_one_request(
    model: Path, caplog: pytest.LogCaptureFixture, num_blocks: int, longest: int
) -> None:
    """The pool holds a token for each slot, and the last one of the answer, which needs no slot."""
    config = configured(model, num_blocks=num_blocks)
    assert config.model_config.max_model_len == config.num_tokens_max == longest
    assert (f"max_model_len is {longest}, not the model's 4096" in caplog.text) == (longest < 4096)
    assert configured(model, num_blocks=num_blocks, max_model_len=longest) == config


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"num_blocks": 15, "max_model_len": 242}, "max_model_len"),
        ({"kv_cache_memory": "1KiB"}, "kv_cache_memory"),
        ({"tensor_parallel_size": 3}, "parallel_config.tensor_parallel_size"),
        ({"block_size": 0}, "cache_config.block_size"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
            "scheduler_config.max_num_batched_tokens",
        ),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(
    model: Path, given: dict[str, Any], field: str
) -> None:
    with pytest.raises(UserError) as refused:
        configured(model, **given)
    assert refused.value.field == field
