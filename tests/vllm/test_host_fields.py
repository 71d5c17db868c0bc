"""Everything in vLLM's configuration is compared, or a row says why it cannot change KV."""

import copy
import dataclasses
import enum
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import vllm.config
from transformers import AutoConfig
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.envs import environment_variables
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.models import registry

from baton.checkpoints.architecture import Family
from baton.checkpoints.families import parse_architecture
from baton.checkpoints.random_model import write_checkpoint
from baton.core.identity import KVIdentity
from baton.hosts.vllm import host_fields
from baton.hosts.vllm.host_fields import COMPARED, EXCLUDED, LENGTH_IS_A_LIMIT, NEUTRAL, ROPES
from baton.hosts.vllm.identity import find_kv_identity, kv_identity_of
from tests.vllm.engines import Server, Site, VllmPlan, transfer
from tests.vllm.prompts import prompts

ROWS = EXCLUDED.keys() | NEUTRAL.keys() | COMPARED.keys()
MODELS = Path(registry.__file__).parent


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[None]:
    """vLLM imports each model in a process of its own to look at it, for five seconds."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(registry, "_run_in_subprocess", lambda call: call())
        patches.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # The variable wins over the argument.
        yield


def configured(model: Path, **arguments: Any) -> VllmConfig:
    given = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "skip_tokenizer_init": True}
    return EngineArgs(model=str(model), **given | arguments).create_engine_config()


def identity_of(config: VllmConfig) -> KVIdentity:
    return find_kv_identity(config, "r", is_named=True)


@pytest.mark.parametrize("family", sorted(get_args(Family)))
def test_a_known_family_has_the_identity_of_the_embedded_engine(family: Family, tmp_path: Path) -> None:
    if family.startswith("qwen3_5"):
        pytest.importorskip("torchvision", reason="vLLM imports it for these models")
    rope = "yarn" if family == "gpt_oss" else "none"
    write_checkpoint(tmp_path, family=family, hidden=64, layers=2, heads=4, vocab=512, rope_scaling=rope)
    found = identity_of(configured(tmp_path))
    assert found.model == parse_architecture(json.loads((tmp_path / "config.json").read_text())).digest
    assert found.host == ""


# --- Rows ---------------------------------------------------------------------------------------------


def hints_of(config: type[Any]) -> dict[str, Any]:
    """Types of a class; of those that vLLM imports for type checkers only, nothing is known."""
    unknown: dict[str, Any] = {}
    while True:
        try:
            return get_type_hints(config, localns=unknown)
        except NameError as error:
            unknown[str(error.name)] = Any


def classes(config: type[Any], section: str) -> Iterator[tuple[str, type[Any]]]:
    """The classes of vLLM's configurations whose fields are compared one by one, by section."""
    yield section, config
    hints = hints_of(config)
    for field in dataclasses.fields(config):
        for kind in (hints[field.name], *get_args(hints[field.name])):
            if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
                continue
            if f"{section}.{field.name}" not in ROWS or field.name in ("lora_config", "multimodal_config"):
                yield from classes(kind, field.name)


SECTIONS = {
    **dict(classes(VllmConfig, "vllm_config")),
    "speculative_config": vllm.config.SpeculativeConfig,
}


def test_the_rows_have_every_name_of_this_release() -> None:
    """A name that fails here is compared, and engines differ by it. Give it a row with its reason."""
    assert {"model_config", "multimodal_config", "cache_config", "parallel_config"} <= SECTIONS.keys()
    names = {
        f"{section}.{field.name}"
        for section, config in SECTIONS.items()
        for field in dataclasses.fields(config)
        if not (section == "vllm_config" and field.name in SECTIONS)
    } | {f"environment.{name}" for name in environment_variables}
    assert names - ROWS == set()


def test_no_name_has_two_rows_and_each_has_a_reason() -> None:
    assert not EXCLUDED.keys() & (NEUTRAL.keys() | COMPARED.keys())
    assert all([*EXCLUDED.values(), *COMPARED.values(), *(row.reason for row in NEUTRAL.values())])


# --- Engine arguments ---------------------------------------------------------------------------------

# Values of arguments for which the type names no legal one, or none with an effect.
VALUES: Mapping[str, tuple[Any, ...]] = {
    "hf_overrides": ({"rope_theta": 7.0}, {"is_causal": False}),
    "max_model_len": (256,),
    "kv_cache_dtype": ("fp8",),
    "block_size": (32,),
    "max_num_batched_tokens": (1024,),
    "gpu_memory_utilization": (0.5,),
    "kv_cache_memory_bytes": (1 << 26,),
    "additional_config": ({"any": 1},),
    "model_class_overrides": ({"Qwen3ForCausalLM": "vllm.model_executor.models.qwen2:Qwen2ForCausalLM"},),
    "lora_dtype": ("bfloat16",),
    "max_cpu_loras": (8,),
    "default_mm_loras": ({"image": "/nowhere"},),
    "attention_backend": ("CPU_ATTN",),
    "quantization": ("fp8", "experts_int8", "bitsandbytes", "torchao", "gptq"),
    "quantization_config": ({"moe": {}},),
    "kv_transfer_config": ({"kv_connector": "BatonPullConnector", "kv_role": "kv_both"},),
    "kv_events_config": ({"enable_kv_cache_events": True, "publisher": "null"},),
    "speculative_config": ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2},),
    "reasoning_config": ({},),
    "pooler_config": ({"dimensions": 4},),
    "logging_config": ({},),
    "elastic_ep_max_dp_size": (4,),
}
ALONE = {"enforce_eager": False, "skip_tokenizer_init": False}  # What `configured` sets.
LORA = {"enable_lora": True, "max_loras": 3, "max_cpu_loras": 4}
NEEDS: Mapping[str, Mapping[str, Any]] = {
    "quantization": {"dtype": "bfloat16"},
    "enable_lora": {"max_loras": 1},
}


def others(hint: Any, value: Any) -> list[Any]:
    """Values of this type, most of which are legal, beside the argument's own."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return [one for one in inner if one != value][:3]
    if hint is bool:
        return [one for one in (True, False) if one is not value]
    if hint in (int, float):
        return [value + 1 if value is not None else 1, 2]
    if hint is str:
        return ["another"]
    if origin in (list, dict) or hint in (list, dict):
        return [["another"]] if (origin or hint) is list else [{"another": 1}]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return [one for one in hint if one != value][:2]
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and value is not None:
        now = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(hint) if field.init]
        return [{name: new[0]} for name, one in now if (new := others(type(one), one))]
    return [new for one in inner if one is not type(None) for new in others(one, value)]


def fields_of(config: Any, section: str = "vllm_config") -> dict[str, str]:
    """All fields of a configuration, as text, by the name of their row."""
    found: dict[str, str] = {}
    for field in dataclasses.fields(config):
        name, value = f"{section}.{field.name}", getattr(config, field.name, None)
        if name in ("model_config.hf_config", "model_config.hf_text_config"):
            found[name] = str(value.to_dict() if value is not None else None)
        elif dataclasses.is_dataclass(value) and name not in EXCLUDED:
            found |= fields_of(value, field.name if field.name.endswith("_config") else name)
        else:
            found[name] = re.sub(r" at 0x[0-9a-f]+", "", str(value))
    return found


HINTS = hints_of(EngineArgs)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, family="qwen3", hidden=64, layers=2, heads=4, vocab=512)
    return folder


Outcome = Literal["compared", "excluded", "no trace", "refused"]


def outcome_of(checkpoint: Path, name: str) -> Outcome:
    """Vary one engine argument. Fails if it changes a field that has no row, and the identity stays."""
    needs = NEEDS.get(name) or (LORA if "lora" in name else {})
    plain = configured(checkpoint, **needs)
    before, identity = fields_of(plain), identity_of(plain)
    outcomes: set[Outcome] = set()
    value = getattr(EngineArgs(model=str(checkpoint)), name)
    alone = [ALONE[name]] if name in ALONE else []
    for other in (*VALUES.get(name, ()), *others(HINTS[name], value), *alone):
        try:
            config = configured(checkpoint, **{**needs, name: other})
        except Exception as error:  # vLLM has many kinds of refusals.
            print(f"refused: {name}={other!r}: {str(error)[:150]!r}")
            continue
        after = fields_of(config)
        changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        if identity_of(config) != identity:
            outcomes.add("compared")
            continue
        assert not {key for key in changed if key not in EXCLUDED and key not in NEUTRAL}, f"{name}={other!r}"
        outcomes.add("excluded" if changed - VARIES else "no trace")
        print(f"same: {name}={other!r}: {sorted(changed - VARIES)}")
    in_order: tuple[Outcome, ...] = ("compared", "excluded", "no trace")
    return next((one for one in in_order if one in outcomes), "refused")


# Fields that differ between two equal configurations.
VARIES = frozenset({"vllm_config.instance_id"})


# Arguments of which vLLM refuses every value above: they need other hardware, models or arguments.
REFUSED = """
    _api_process_rank aux_output_config collect_detailed_traces config_format cpu_offload_params
    custom_histogram_buckets data_parallel_external_lb data_parallel_hybrid_lb data_parallel_rank
    decode_context_parallel_size default_mm_loras device_ids diffusion_config disable_cascade_attn
    ec_manager_config ec_transfer_config enable_cumem_allocator enable_elastic_ep enable_eplb
    enable_expert_parallel enable_fault_tolerance enable_mamba_cache_stochastic_rounding
    enable_return_routed_experts enable_sleep_mode enable_trace_replay engram_config
    fault_tolerance_config hf_config_path kv_cache_metrics_sample log_config_file mamba_ssu_algorithm
    media_io_kwargs model nnodes numa_bind_cpus numa_bind_nodes offload_backend offload_params
    per_request_spec_decode_metrics prefill_context_parallel_size ray_workers_use_nsight
    reasoning_parser return_sampling_mask show_hidden_metrics_for_version spec_method spec_model
    spec_tokens tokenizer use_replayssm watermark watermark_config weight_transfer_config
"""
# Arguments that leave the configuration of this model on a CPU as it was. Most concern media.
NO_TRACE = """
    aggregate_engine_logging cudagraph_capture_sizes data_parallel_address
    data_parallel_multi_port_external_lb data_parallel_size_local data_parallel_start_rank
    disable_custom_all_reduce disable_log_stats distributed_executor_backend elastic_ep_max_dp_size
    enable_batch_sharded_sampling enable_dbo enable_mm_embeds fail_on_environ_validation
    interleave_mm_strings language_model_only limit_mm_per_prompt logging_config
    mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype
    mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path
    mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb
    mm_processor_cache_type mm_processor_device mm_processor_kwargs mm_shm_cache_max_object_size_mb
    mm_tensor_ipc skip_mm_profiling tokens_only video_pruning_method video_pruning_rate
"""
# The same on CPUs with AVX512-BF16 only, where vLLM always makes float32 of it.
BY_CPU = {"mamba_ssm_cache_dtype"}
# The same since 0.33, for models without recurrent states.
BY_RELEASE = {"mamba_cache_mode"}


def test_an_engine_argument_is_compared_or_a_row_says_why_not(checkpoint: Path) -> None:
    found = {field.name: outcome_of(checkpoint, field.name) for field in dataclasses.fields(EngineArgs)}
    names = {one: {name for name, outcome in found.items() if outcome == one} for one in get_args(Outcome)}
    print(*(f"{one} {len(each)}: {' '.join(sorted(each))}" for one, each in names.items()), sep="\n")
    assert names["no trace"] - BY_CPU - BY_RELEASE == {*NO_TRACE.split()}
    assert names["refused"] == {*REFUSED.split()}


# --- Fields -------------------------------------------------------------------------------------------


def other_value(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case list():
            return [*value, "other"]
        case _:
            return "another"


@pytest.mark.parametrize("section", sorted(SECTIONS.keys() - {"vllm_config", "speculative_config"}))
def test_a_field_is_compared_or_a_row_says_why_not(checkpoint: Path, section: str) -> None:
    """Each field gets another value, also one that vLLM refuses today."""
    plain = configured(checkpoint, **LORA)
    if section == "multimodal_config":
        plain.model_config.multimodal_config = vllm.config.MultiModalConfig()
    identity = identity_of(plain)
    inner = plain.model_config if section == "multimodal_config" else plain
    for field in dataclasses.fields(SECTIONS[section]):
        if f"{section}.{field.name}" in EXCLUDED | {"model_config.multimodal_config": "a section"}:
            continue
        changed = copy.copy(config := getattr(inner, section))
        object.__setattr__(changed, field.name, other_value(getattr(config, field.name, None)))
        model = copy.copy(plain.model_config)
        whole = copy.copy(plain)
        if section == "model_config":
            model = changed
        elif section == "multimodal_config":
            model.multimodal_config = changed
        else:
            object.__setattr__(whole, section, changed)
        object.__setattr__(whole, "model_config", model)
        is_neutral = field.name in ("max_model_len", "mamba_ssm_cache_dtype")  # Both are neutral here.
        assert (identity_of(whole) == identity) == is_neutral, f"{section}.{field.name}"


# --- Keys of config.json ------------------------------------------------------------------------------

FAMILIES = {
    **{"llama": {}, "mistral": {}, "mixtral": {}, "qwen2": {}, "qwen3": {}, "qwen3_moe": {}, "gemma2": {}},
    **{"gemma3_text": {}, "olmo2": {}, "olmo3": {}, "cohere2": {}, "granite": {}, "glm4": {}, "stablelm": {}},
    **{"deepseek_v2": {}, "deepseek_v3": {}, "mamba2": {}, "falcon_h1": {}, "bamba": {}, "jamba": {}},
    **{"llama4_text": {}, "llama4": {}, "gemma3": {}, "qwen2_5_vl": {}, "minicpm3": {}, "gpt_oss": {}},
    "phi3": {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}},
}
NEW = {
    "of_a_new_release": None,
    "is_causal": False,
    "dual_chunk_attention_config": {"chunk_size": 8},
    "llama_4_scaling": {"beta": 0.1},
    "quantization_config": {"quant_method": "fp8"},
    "layer_types": ["chunked_attention"],
    "attn_logit_softcapping": 7.0,
    "attn_temperature_tuning": True,
}


def leaves(config: Mapping[str, Any], *parents: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in config.items():
        yield (*parents, key), value
        if isinstance(value, dict):
            yield from leaves(value, *parents, key)


def changed_at(config: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *rest = path
    return {**config, first: changed_at(config[first], tuple(rest), value) if rest else value}


def excluded_key(config: Any, path: tuple[str, ...]) -> bool:
    """Whether a row excludes the key or one that it is in, in a model or a part that is a model."""
    for index, key in enumerate(path):
        if (index == 0 or "model_type" in config) and f"hf_config.{key}" in EXCLUDED:
            return True
        config = config[key]
    return False


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_of_a_models_config_is_compared_or_a_row_says_why_not(checkpoint: Path, family: str) -> None:
    plain = configured(checkpoint)
    made = AutoConfig.for_model(family, **FAMILIES[family])
    name = {"gemma3_text": "Gemma3", "qwen3_moe": "Qwen3Moe", "gpt_oss": "GptOss"}.get(family)
    base = {**made.to_dict(), "architectures": [f"{name or type(made).__name__[:-6]}ForCausalLM"]}

    def identity(config: Mapping[str, Any]) -> KVIdentity:
        model = copy.copy(plain.model_config)
        model.hf_config = model.hf_text_config = SimpleNamespace(to_dict=lambda: config)
        return kv_identity_of(model, "auto", None, revision="r")

    same = identity(base)
    neutral: list[str] = []
    for path, value in leaves(base):
        if not excluded_key(base, path) and identity(changed_at(base, path, other_value(value))) == same:
            neutral.append(".".join(path))
    for key, value in NEW.items():
        if base.get(key) != value:
            assert identity({**base, key: value}) != same, key
    known = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "mamba2"}
    print(family, "host" if same.host else "", neutral)
    assert {f"hf_config.{key}" for key in neutral} <= NEUTRAL.keys()
    assert not neutral or family in known | {"deepseek_v2", "deepseek_v3"}


# --- Lengths ------------------------------------------------------------------------------------------

# The only mentions of the length in those classes and what they import: it sizes a buffer.
HARMLESS = re.compile(
    r"self\.max_model_len = vllm_config\.model_config\.max_model_len|^\s+self\.max_model_len,$"
)


def module_of(architecture: str) -> Path | None:
    found = registry.ModelRegistry.models.get(architecture)
    name = getattr(found, "module_name", None)
    spec = None if name is None else importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin)


def imported(module: Path) -> set[Path]:
    """The module, and the modules of models that it imports."""
    found, waiting = {module}, [module]
    while waiting:
        for name in re.findall(
            r"^from (?:\.|vllm\.model_executor\.models\.)(\w+) import", waiting.pop().read_text(), re.M
        ):
            path = MODELS / f"{name}.py"
            if path.exists() and path not in found and name not in ("utils", "interfaces", "config"):
                found.add(path)
                waiting.append(path)
    return found


@pytest.mark.parametrize("architecture", sorted(LENGTH_IS_A_LIMIT))
def test_no_class_for_which_the_length_is_a_limit_reads_it(architecture: str) -> None:
    module = module_of(architecture)
    if module is None:
        pytest.skip("this release has no such class")
    lines = [line for path in imported(module) for line in path.read_text().splitlines()]
    assert [line for line in lines if "max_model_len" in line and not HARMLESS.search(line)] == []


def test_no_rotary_embedding_of_a_known_kind_reads_the_length() -> None:
    folder = Path(rotary_embedding.__file__).parent
    reads = {path.stem for path in folder.glob("*.py") if "max_model_len" in path.read_text()}
    assert reads == {"phi3_long_rope_scaled_rope"}
    assert "longrope" not in ROPES


LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 16,
        "long_factor": [4.0] * 16,
        "original_max_position_embeddings": 1024,
    }
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def overrides(**config: object) -> tuple[str, ...]:
    return ("--max-model-len", "2048", "--hf-overrides", json.dumps(config))


LENGTH = ((*overrides(**LONGROPE)[2:], "--max-model-len", "512"), overrides(**LONGROPE))
BASE = overrides(rope_parameters=PLAIN)
# Options of P and of D, or of an engine before and after its restart.
PLAYED = {"length of longrope": LENGTH} | {
    name: (overrides(**{"rope_parameters": PLAIN, **config}), BASE)
    for name, config in {
        "rope_theta": {"rope_parameters": {**PLAIN, "rope_theta": 500.0}},
        "linear scaling": {"rope_parameters": {**PLAIN, "rope_type": "linear", "factor": 4.0}},
        "yarn": {
            "rope_parameters": {
                **PLAIN,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        },
        "rms_norm_eps": {"rms_norm_eps": 0.5},
    }.items()
}
SAMPLE = [*PLAYED] if os.environ.get("PLAY_ALL") else ["length of longrope"]


@pytest.mark.parametrize("change", SAMPLE)
def test_kv_of_another_configuration_is_computed_again(site: Site, tmp_path: Path, change: str) -> None:
    """KV goes through a handoff and a folder of chunks. PLAY_ALL=1 plays all changes, two minutes each."""
    asked = [prompt for prompt in prompts() if len(prompt) in (300, 384, 500)]
    assert asked
    before, after = PLAYED[change]
    files = transfer("BatonSharedStorageConnector", "kv_both", "files", extra={"path": str(tmp_path)})

    def engine(name: str, options: tuple[str, ...], config: Any) -> Server:
        return site.cast(f"{name} {change}", VllmPlan(name, config, extra=options))[name]

    stored = [engine("first", before, files).tokens(prompt) for prompt in asked]
    again = engine("again", after, files)
    answers = [again.tokens(prompt) for prompt in asked]
    assert answers == [again.tokens(prompt, cache_salt="computed here") for prompt in asked]
    assert answers != stored, "the configurations compute other KV"
    assert again.metric("baton:storage_loaded_chunks_total") == 0

    servers = site.cast(
        f"pair {change}",
        VllmPlan("p", transfer("BatonPullConnector", "kv_producer", "p"), extra=before),
        VllmPlan("d", transfer("BatonPullConnector", "kv_consumer", "d"), extra=after),
    )
    p, d = servers["p"], servers["d"]
    assert [d.tokens(prompt, p.prefill(prompt)) for prompt in asked] == answers
    assert d.metric("baton:kv_tickets_refused_total") == len(asked)


@pytest.mark.parametrize(
    ("dtype", "value", "is_alike"),
    [("float32", "auto", True), ("bfloat16", "auto", False), ("bfloat16", "float32", True)],
)
def test_states_have_one_name_on_every_cpu(dtype: str, value: str, is_alike: bool) -> None:
    """vLLM makes float32 of "auto" on CPUs with AVX512-BF16, and leaves it elsewhere."""
    name = "cache_config.mamba_ssm_cache_dtype"
    assert host_fields._is_neutral(name, value, host_fields._Model(dtype=dtype)) is is_alike
