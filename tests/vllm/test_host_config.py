"""Every field of vLLM's configurations is in the identity of KV, or a list says why it cannot change KV."""

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig
from vllm.engine.arg_utils import EngineArgs

from baton.core.errors import UserError
from baton.engine.checkpoints.families import parse_architecture
from baton.vllm_plugin.host_config import (
    CONFIGS,
    EXCLUDED,
    LENGTHS,
    NEUTRAL,
    describe_host,
    digest_host,
)
from tests.vllm.engines import Server, Site, VllmPlan, transfer
from tests.vllm.prompts import prompts

PARTS = sorted({*EXCLUDED, *NEUTRAL} - {"hf_config", "vllm_config", "model_config"})
COMPARED_ELSEWHERE = {"hf_config", "hf_text_config", "multimodal_config"}
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2", "phi3", "mixtral"),
    *("qwen3_moe", "deepseek_v3", "gpt_oss", "granite", "falcon_h1", "llama4_text", "cohere2"),
)


@pytest.fixture(scope="module")
def config(model: Path) -> Any:
    engine = EngineArgs(model=str(model), dtype="float32", enforce_eager=True, enable_lora=True)
    return engine.create_engine_config()


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((model / "config.json").read_text())
    return read


def other(value: Any) -> Any:
    """Another value; of the same type where that is easy."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return [*value, "other"] if isinstance(value, list) else "another value"


def varied(config: Any, part: str, name: str) -> Any:
    """A copy of the configuration in which one field of one part has another value."""
    changed = copy.copy(config)
    inner = changed if part == "vllm_config" else copy.copy(getattr(config, part))
    object.__setattr__(inner, name, other(getattr(inner, name, None)))
    if part != "vllm_config":
        object.__setattr__(changed, part, inner)
    return changed


def test_a_plain_model_is_computed_as_its_config_says(config: Any, checkpoint: dict[str, Any]) -> None:
    assert describe_host(config, checkpoint) == {}


@pytest.mark.parametrize("part", ["model_config", *PARTS])
def test_every_field_is_in_the_digest_or_excluded(config: Any, checkpoint: dict[str, Any], part: str) -> None:
    if getattr(config, part, None) is None:
        pytest.skip(f"this model has no {part}")
    plain = describe_host(config, checkpoint)
    for field in dataclasses.fields(getattr(config, part)):
        if field.name in COMPARED_ELSEWHERE | {*LENGTHS}:
            continue
        if field.name == "dtype":  # An adapter's was made from it.
            continue
        is_alike = describe_host(varied(config, part, field.name), checkpoint) == plain
        is_excluded = field.name in EXCLUDED[part] and field.name not in ("cache_dtype", "hf_overrides")
        assert is_alike == (is_excluded or field.name == "hf_overrides"), f"{part}.{field.name}"


def test_every_part_is_in_the_digest_or_excluded(config: Any, checkpoint: dict[str, Any]) -> None:
    for field in dataclasses.fields(config):
        if field.name in EXCLUDED:
            continue
        is_alike = describe_host(varied(config, "vllm_config", field.name), checkpoint) == {}
        assert is_alike == (field.name in CONFIGS), field.name


def test_the_lists_have_every_name_of_this_release(config: Any) -> None:
    """A name that fails here is in the digest: list it, or leave it there and engines differ by it."""
    for part in ("model_config", *PARTS):
        if (found := getattr(config, part, None)) is not None:
            names = {field.name for field in dataclasses.fields(found)}
            assert names - {*EXCLUDED.get(part, ()), *NEUTRAL.get(part, ())} <= {*LENGTHS}, part
    names = {field.name for field in dataclasses.fields(config)}
    assert names - {*CONFIGS, *EXCLUDED, *NEUTRAL["vllm_config"]} == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_a_models_config_is_in_an_identity_or_excluded(config: Any, family: str) -> None:
    keys = AutoConfig.for_model(family).to_dict()
    keys["architectures"] = [AutoConfig.for_model(family).__class__.__name__]
    for known in ("llama", "mistral", "qwen2", "qwen3"):
        if family == known:
            keys["architectures"] = [f"{known.capitalize()}ForCausalLM"]

    def identity(given: dict[str, Any]) -> tuple[str, str]:
        changed, model = copy.copy(config), copy.copy(config.model_config)
        object.__setattr__(model, "hf_config", SimpleNamespace(to_dict=lambda: given))
        object.__setattr__(changed, "model_config", model)
        try:
            architecture = parse_architecture(given).digest
        except UserError:
            architecture = "of no family that is known"
        return architecture, digest_host(describe_host(changed, given))

    plain = identity(keys)
    unknown = {"a_new_key": True, "dual_chunk_attention_config": {"chunk_size": 8}, "is_causal": False}
    for name, value in {**keys, **unknown}.items():
        if name in EXCLUDED["hf_config"] or name in LENGTHS:
            continue
        if name == "max_window_layers" and not keys.get("use_sliding_window"):
            continue  # Read with windows only.
        new = value if name in unknown else other(value)
        given = {**keys, name: ["AnotherForCausalLM"] if name == "architectures" else new}
        assert identity(given) != plain, name


@pytest.mark.parametrize(
    ("rope", "is_alike"),
    [
        ({"rope_type": "default"}, True),
        ({"rope_type": "yarn", "factor": 2.0}, True),
        ({"rope_type": "dynamic", "factor": 2.0}, False),
        ({"rope_type": "longrope"}, False),
        ({"rope_type": "a_new_one"}, False),
        ({"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "longrope"}}, False),
    ],
)
def test_the_length_counts_where_the_rotary_embedding_may_read_it(
    config: Any, checkpoint: dict[str, Any], rope: dict[str, Any], is_alike: bool
) -> None:
    def digest(length: int) -> str:
        changed, model = copy.copy(config), copy.copy(config.model_config)
        keys = {**checkpoint, "rope_parameters": rope}
        keys.pop("rope_theta")
        object.__setattr__(model, "hf_config", SimpleNamespace(to_dict=lambda: keys))
        object.__setattr__(model, "max_model_len", length)
        object.__setattr__(changed, "model_config", model)
        return digest_host(describe_host(changed, checkpoint))

    assert (digest(512) == digest(2048)) == is_alike


LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 16,
        "long_factor": [4.0] * 16,
        "original_max_position_embeddings": 1024,
    }
}


def test_a_restart_with_another_length_finds_no_kv_of_other_factors(site: Site, tmp_path: Path) -> None:
    asked = [prompt for prompt in prompts() if len(prompt) in (300, 384, 500)]

    def engine(name: str, length: int) -> Server:
        extra = ("--hf-overrides", json.dumps(LONGROPE), "--max-model-len", str(length))
        config = transfer("BatonSharedStorageConnector", "kv_both", name, extra={"path": str(tmp_path)})
        return site.cast(name, VllmPlan(name, config, extra=extra))[name]

    first = engine("short", 512)
    answers = [first.tokens(prompt) for prompt in asked]
    assert [first.tokens(prompt) for prompt in asked] == answers
    again = engine("long", 2048)
    loaded = [again.tokens(prompt) for prompt in asked]
    assert loaded == [again.tokens(prompt, cache_salt="computed here") for prompt in asked]
    assert loaded != answers, "the lengths compute other KV"
    assert again.metric("baton:storage_loaded_chunks_total") == 0
