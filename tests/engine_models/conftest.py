"""Small checkpoints, written once, and models that read them."""

import json
from pathlib import Path

import pytest

from baton.checkpoints.checkpoint import load_model_config
from baton.checkpoints.random_model import write_checkpoint
from tests.engine_models.paged import VOCAB, CheckpointOf, PagedModel, PagedModelOf

# Two KV heads of four query heads, and a window shorter than the prompts of the tests.
SMALL = {"hidden": 64, "layers": 4, "heads": 4, "kv_heads": 2, "vocab": VOCAB, "max_position": 512}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"family": "llama", "rope_scaling": "llama3"},
    "mistral": {"family": "mistral", "sliding_window": 24},
    "mixtral": {"family": "mixtral", "sliding_window": 24},
    "qwen2": {"family": "qwen2", "sliding_window": 24, "tie_word_embeddings": True},
    "qwen3": {"family": "qwen3", "head_dim": 24, "rope_scaling": "linear"},
    "qwen3_moe": {"family": "qwen3_moe", "head_dim": 24},
    "qwen3_moe, shares not normalised": {"family": "qwen3_moe"},
    "gemma3": {"family": "gemma3", "sliding_window": 24, "tie_word_embeddings": True},
    "gpt_oss": {"family": "gpt_oss", "sliding_window": 24, "rope_scaling": "yarn"},
    "deepseek_v2": {"family": "deepseek_v2"},
    "deepseek_v2, as Lite": {
        "family": "deepseek_v2",
        "rope_scaling": "yarn",
        "fields": {"q_lora_rank": None, "topk_method": "greedy", "first_k_dense_replace": 0},
    },
    "deepseek_v3": {"family": "deepseek_v3", "rope_scaling": "yarn"},
    "deepseek_v3, halves rotated": {
        "family": "deepseek_v3",
        "fields": {"rope_interleave": False, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    },
    "deepseek_v32": {"family": "deepseek_v32", "rope_scaling": "yarn"},
    "mamba2": {"family": "mamba2"},
    "granite_hybrid": {"family": "granite_hybrid"},
    "qwen3_next": {"family": "qwen3_next", "head_dim": 24},
    "qwen3_5": {"family": "qwen3_5", "head_dim": 24},
    "qwen3_5_moe": {"family": "qwen3_5_moe", "head_dim": 24},
    "nemotron_h": {"family": "nemotron_h"},
}


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> CheckpointOf:
    root = tmp_path_factory.mktemp("checkpoints")

    def make(name: str) -> Path:
        if not (root / name).exists():
            write_checkpoint(root / name, seed=len(name), **{**SMALL, **FAMILIES[name]})  # type: ignore[arg-type]
            if name.endswith("not normalised"):
                config = root / name / "config.json"
                config.write_text(json.dumps({**json.loads(config.read_text()), "norm_topk_prob": False}))
        return root / name

    return make


@pytest.fixture(scope="session")
def paged_model_of(checkpoint_of: CheckpointOf) -> PagedModelOf:
    made: dict[str, PagedModel] = {}

    def make(name: str) -> PagedModel:
        if name not in made:
            made[name] = PagedModel(load_model_config(checkpoint_of(name)))
        return made[name]

    return make
