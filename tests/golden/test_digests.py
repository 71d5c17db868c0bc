"""Hashes, kv_identities and names of files: the same content has the same name in every release.

A change makes engines refuse each other, or find nothing of what others have stored.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from baton.checkpoints.checkpoint import weights_digest
from baton.checkpoints.families import parse_architecture
from baton.connectors.host_view import BATON_POLICY
from baton.connectors.pull.intent import transfer_of_request
from baton.connectors.storage.stores.identity import FORMAT, StorageIdentity, layout_digest
from baton.connectors.storage.stores.settings import StorageSettings
from baton.core.config import ClusterSecret
from baton.core.hashing import HASH_SEED, block_hash, extra_key, prompt_hash, root_hash
from baton.core.identity import CurrentIdentity, KVIdentity
from baton.core.kv_groups import KVCacheGroup
from baton.engine.api import SamplingParams
from baton.engine.prefilled import sampling_digest
from baton.hosts.vllm.identity import kv_identity_of
from baton.router.fleet.policies import EngineState, RoutedRequest, choose_prefix_affinity
from baton.router.values.dialects import CHAT, COMPLETIONS
from baton.router.values.legs import shape_of
from baton.stores.backends.whole_file import TEMPORARY_PREFIX
from baton.stores.base.chunk_name import ChunkName
from tests.golden.golden import check_values
from tests.golden.samples import HASH, MODEL, SECRET


def test_prompts() -> None:
    extra = extra_key(cache_salt="salt", adapter="adapter", media=["media"])
    first = block_hash(root_hash(), range(16))
    check_values(
        "digests_of_prompts",
        {
            "seed": HASH_SEED,
            "root": root_hash(),
            "extra": extra,
            "first block": first,
            "second block": block_hash(first, range(16), extra),
            "prompt": prompt_hash(range(20), 17),
            "prompt with extra": prompt_hash(range(20), 17, extra),
            "transfer that no router has named": transfer_of_request("cmpl-1f00d-0-9c41e7ab"),
            "transfer of a request with a strange id": transfer_of_request("ü-9c41e7ab"),
        },
    )


# --- Models ---------------------------------------------------------------------------------------

LLAMA_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"rope_scaling": LLAMA_ROPE},
    "MistralForCausalLM": {"sliding_window": 16},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Gemma3ForCausalLM": {"sliding_window": 16},
    "GptOssForCausalLM": {"sliding_window": 16, "num_local_experts": 4, "rope_scaling": GPT_OSS_ROPE},
}


def config_of(name: str) -> dict[str, Any]:
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
    }
    return {"architectures": [name], **sizes, **CONFIGS.get(name, {})}


class FakeModelConfig(SimpleNamespace):
    use_mla = False

    def get_total_num_hidden_layers(self) -> int:
        return 2

    def get_total_num_kv_heads(self) -> int:
        return 4

    def get_head_size(self) -> int:
        return 8


def in_vllm(
    name: str, *, load_format: str = "auto", folder: Path | None = None, **changes: Any
) -> KVIdentity:
    """KV identity in vLLM of a model whose files are in `folder`, or not on this machine."""
    fields = {
        "seed": 0,
        "dtype": "torch.bfloat16",
        "hf_config": SimpleNamespace(to_dict=lambda: config_of(name)),
        **changes,
    }
    revision = "r" if load_format == "auto" and folder is None else None
    return kv_identity_of(
        FakeModelConfig(**fields), "auto", folder, revision=revision, load_format=load_format
    )


def test_models(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (other := tmp_path / "other").mkdir()
    (other / "pytorch_model.bin").write_bytes(b"weights")
    check_values(
        "digests_of_models",
        {
            **{name: parse_architecture(config_of(name)).digest for name in CONFIGS},
            "weights": weights_digest(tmp_path),
            "another family, in vLLM": in_vllm("Strange").model,
            "another family, in vLLM, quantised": in_vllm("Strange", quantization="fp8").host,
            "weights in other files, in vLLM": in_vllm("Strange", folder=other).weights,
            "weights with a name, in vLLM": in_vllm("Strange").weights,
            "weights that are made up, in vLLM": in_vllm("Strange", load_format="dummy").weights,
        },
    )
    assert in_vllm("Qwen3ForCausalLM").model == parse_architecture(config_of("Qwen3ForCausalLM")).digest


# --- Files ----------------------------------------------------------------------------------------


def storage(**changes: Any) -> StorageIdentity:
    fields: dict[str, Any] = {
        "current": CurrentIdentity(MODEL),
        "engine_id": "e",
        "policy": BATON_POLICY,
        "tp_size": 2,
        "tp_rank": 0,
        "block_tokens": 16,
        "is_producer": True,
        "is_consumer": True,
        "secret": ClusterSecret(SECRET),
        "settings": StorageSettings(path="/kv"),
    }
    return StorageIdentity(**{**fields, **changes})


def test_stored_files() -> None:
    cache: Any = SimpleNamespace(shape=(64, 4, 16, 16), dtype="torch.bfloat16", dim=lambda: 4)
    layouts = {rank: layout_digest({"layer": cache}, 16) for rank in (0, 1)}
    windowed = storage(groups=(KVCacheGroup((0,)), KVCacheGroup((1,), 16)))
    versioned = CurrentIdentity(MODEL.updated(None, "step-7"))
    folder = Path("/kv")
    check_values(
        "digests_of_files",
        {
            "format": FORMAT,
            "signing key": storage().signing_keys[0],
            "layout": layouts[0],
            "namespace": storage().namespaces(layouts)[0],
            "namespace of a version": storage(current=versioned).namespaces(layouts)[0],
            "namespace without a secret": storage(secret=None).namespaces(layouts)[0],
            "namespace with windows": windowed.namespaces(layouts)[0],
            "file": ChunkName("namespace", HASH, 1).path_in(folder),
            "file of a window": ChunkName("namespace", HASH, 1, 16).path_in(folder),
            "file being written": TEMPORARY_PREFIX,
        },
    )


# --- Requests -------------------------------------------------------------------------------------


def test_requests() -> None:
    """Sampling parameters travel in tickets. Routers of one fleet send equal prefixes to one engine."""
    sampled = {
        "greedy": SamplingParams(temperature=0.0),
        "drawn": SamplingParams(temperature=0.5, top_p=0.9, seed=7, min_tokens=2, logit_bias={3: 0.5}),
    }
    bodies: dict[str, dict[str, Any]] = {
        "text": {"model": "m", "prompt": "Once upon a time"},
        "tokens": {"model": "m", "prompt": [1, 2, 3], "cache_salt": "salt"},
        "chat": {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
    }
    prefixes = {
        name: shape_of(body, CHAT if name == "chat" else COMPLETIONS).prefix_key
        for name, body in bodies.items()
    }
    engines = [EngineState(f"http://10.0.0.{number}:8100", is_eligible=True) for number in range(8)]
    check_values(
        "digests_of_requests",
        {
            **{f"sampling, {name}": sampling_digest(params, {2, 1}, 1) for name, params in sampled.items()},
            **{f"prefix, {name}": key for name, key in prefixes.items()},
            **{
                f"engine, {name}": choose_prefix_affinity(engines, RoutedRequest(0, key))
                for name, key in prefixes.items()
            },
        },
    )
