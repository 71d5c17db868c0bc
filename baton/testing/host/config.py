"""Configuration of a toy model, with the sizes of the host's memory and the tokens of its model."""

from typing import Any

from baton.core.config import ModelConfig
from baton.testing.host.model import EOS_IDS, HEAD_DIM, VOCAB


def model_config(**changes: Any) -> ModelConfig:
    """Return two layers with full attention and four KV heads, but for `changes`."""
    fields: dict[str, Any] = {
        "model": "folder",
        "served_model_name": "toy",
        "dtype": "float32",
        "max_model_len": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_kv_heads": 4,
        "head_dim": HEAD_DIM,
        "hidden_size": 8,
        "vocab_size": VOCAB,
        "eos_token_ids": EOS_IDS,
        "bos_token_id": None,
        "architecture_digest": "architecture",
        "weights_digest": "weights",
        "hf_config": {},
    }
    return ModelConfig(**{**fields, **changes})
