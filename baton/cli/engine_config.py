"""Converts settings to `EngineConfig`: reads the checkpoint's configuration, selects the device, sizes the
cache.
"""

import logging
from pathlib import Path
from typing import Literal

from msgspec import structs

from baton.checkpoints.checkpoint import load_model_config
from baton.cli.serve_settings import Resolved
from baton.core.config import (
    BLOCK_SIZE_MAX,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from baton.core.errors import ConfigError
from baton.core.kv_groups import num_places
from baton.core.states import state_bytes
from baton.engine.runner.hybrid import settle_groups
from baton.server.settings import ServeSettings, parse_bytes

logger = logging.getLogger(__name__)

CONNECTOR_FACTORY = "baton.assemble:connector_factory"
_NVIDIA_DRIVER = Path("/dev/nvidiactl")
_BLOCK_SIZE = CacheConfig().block_size


def engine_config(resolved: Resolved) -> EngineConfig:
    """Make the configuration. Raises UserError that names the setting."""
    settings = resolved.settings
    if settings.model is None:
        raise ConfigError("name the checkpoint's folder: baton serve MODEL", field="model")
    model = load_model_config(
        settings.model,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        served_model_name=settings.served_model_name,
        kv_cache_dtype=settings.kv_cache_dtype,
        weights_version=settings.weights_version or "",
    )
    tp = settings.tensor_parallel_size
    config = EngineConfig(
        model_config=model,
        cache_config=resolved.values.make(
            CacheConfig,
            block_size=default_block_size(model, tp) if settings.block_size is None else settings.block_size,
        ),
        scheduler_config=resolved.values.make(SchedulerConfig),
        parallel_config=resolved.values.make(
            ParallelConfig, tensor_parallel_size=tp, executor=settings.ranks_executor
        ),
        device_config=resolved.values.make(
            DeviceConfig, device=_device(settings), num_threads=settings.threads
        ),
        kv_transfer_config=settings.kv_transfer_config,
        kv_events_config=settings.kv_events_config,
        cluster_secret=resolved.secret,
        insecure_no_secret=settings.insecure_no_secret,
        seed=settings.seed,
        step_timeout_s=settings.step_timeout_s,
    )
    config = settle_groups(config, CONNECTOR_FACTORY if settings.moves_kv else None)
    sized = structs.replace(config.cache_config, num_gpu_blocks=_num_blocks(settings, config))
    return _fit_length(
        structs.replace(config, cache_config=sized), is_asked=settings.max_model_len is not None
    )


def _fit_length(config: EngineConfig, *, is_asked: bool) -> EngineConfig:
    """Limit `max_model_len` to what the pool holds for one request. Raises ConfigError if that was asked for.

    vLLM does the same: a length that does not fit is refused, and `max_model_len: -1` fits it.
    """
    model, cache = config.model_config, config.cache_config
    longest = config.num_tokens_max
    if longest == model.max_model_len:
        return config
    pool = f"{cache.num_gpu_blocks} blocks of {cache.block_size} tokens"
    if longest < 2:
        raise ConfigError(f"{pool} cannot hold one request; the engine needs more", field="num_blocks")
    if is_asked:
        raise ConfigError(
            f"is {model.max_model_len}; {pool} hold one request of at most {longest}: ask for at most that, "
            "or set a larger num_blocks or kv_cache_memory",
            field="max_model_len",
        )
    logger.warning(
        "max_model_len is %d, not the model's %d: %s hold no longer request; num_blocks and kv_cache_memory "
        "set their number",
        longest,
        model.max_model_len,
        pool,
    )
    return structs.replace(config, model_config=structs.replace(model, max_model_len=longest))


def default_block_size(model: ModelConfig, tp: int) -> int:
    """Tokens of a block: 16, or as many as have the size of a state if layers of both kinds share the pool.

    Then neither kind leaves much of its blocks unused (vLLM, `platforms/interface.py`).
    """
    of_state = state_bytes(model.state_parts, tp_rank=0, tp_size=tp)
    if len(model.state_layers) == model.num_hidden_layers:
        return _BLOCK_SIZE
    of_tokens = block_bytes(model, block_size=_BLOCK_SIZE, tp=tp, num_layers=1)
    return min(_BLOCK_SIZE * max(1, -(-of_state // of_tokens)), BLOCK_SIZE_MAX)


def block_bytes(model: ModelConfig, *, block_size: int, tp: int, num_layers: int) -> int:
    """Return the bytes of one block of the pool on one rank: KV of all layers, or of one group of them."""
    heads = max(1, model.num_kv_heads // tp)
    of_tokens = heads * block_size * model.token_bytes
    if len(model.state_layers) == model.num_hidden_layers:
        of_tokens = 0
    return num_layers * max(of_tokens, state_bytes(model.state_parts, tp_rank=0, tp_size=tp))


def _num_blocks(settings: ServeSettings, config: EngineConfig) -> int:
    if settings.num_blocks is not None:
        return settings.num_blocks
    if settings.kv_cache_memory is None:
        return CacheConfig().num_gpu_blocks
    wanted = parse_bytes(settings.kv_cache_memory, field="kv_cache_memory")
    one = block_bytes(
        config.model_config,
        block_size=config.cache_config.block_size,
        tp=settings.tensor_parallel_size,
        num_layers=num_places(config.kv_cache_groups),
    )
    if wanted < 2 * one:
        raise ConfigError(
            f"holds less than two blocks; one of {config.cache_config.block_size} tokens takes {one} bytes "
            "on each rank",
            field="kv_cache_memory",
        )
    return wanted // one


def _device(settings: ServeSettings) -> Literal["cpu", "cuda"]:
    if settings.device != "auto":
        return settings.device
    if not _NVIDIA_DRIVER.exists():
        return "cpu"  # Torch need not be imported if there is no driver.
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
