"""Small models whose layers have windows, and the size of their transfers."""

from collections.abc import Callable

import pytest

from baton.core.config import EngineConfig, ModelConfig
from tests.connectors.engine_world import BLOCK, WINDOW, windowed_model

_ITEM_BYTES = 4

ModelOf = Callable[[str], ModelConfig]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    """Models by family; each is written once."""
    made: dict[str, ModelConfig] = {}

    def make(family: str) -> ModelConfig:
        if family not in made:
            made[family] = windowed_model(tmp_path_factory.mktemp(family), family)
        return made[family]

    return make


def bytes_moved(config: EngineConfig, num_tokens: int, *, first_token: int = 0) -> int:
    """Bytes of a prompt's transfer: from `first_token` on, and only within windows."""
    model, last = config.model_config, -(-num_tokens // BLOCK)
    firsts = {None: 0, WINDOW: (num_tokens - WINDOW) // BLOCK}
    blocks_of_layer = {window: last - max(first, first_token // BLOCK) for window, first in firsts.items()}
    num_blocks = sum(len(group.layers) * blocks_of_layer[group.window] for group in config.kv_cache_groups)
    return num_blocks * BLOCK * model.num_kv_heads * 2 * model.head_dim * _ITEM_BYTES
