import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoints.checkpoint import load_model_config
from baton.checkpoints.random_model import write_checkpoint
from baton.core.config import CacheConfig, EngineConfig, ModelConfig

# Makes `engine_core_fakes` importable by name, here and in the processes that we start.
sys.path.insert(0, str(Path(__file__).parent))

ConfigMaker = Callable[..., EngineConfig]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, hidden=64, layers=2, heads=4, kv_heads=2, vocab=512)
    return load_model_config(folder, max_model_len=256)


@pytest.fixture(scope="session")
def make_config(model: ModelConfig) -> ConfigMaker:
    def make(num_blocks: int = 128, **fields: Any) -> EngineConfig:
        fields.setdefault("cache_config", CacheConfig(num_gpu_blocks=num_blocks, block_size=4))
        return EngineConfig(model_config=model, **fields)

    return make
