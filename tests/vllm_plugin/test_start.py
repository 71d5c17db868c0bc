"""Start-up in vLLM: the identity made from vLLM's configuration, and the configurations that are refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.checkpoints.checkpoint import load_model_config
from baton.connectors.host_view import HostView
from baton.connectors.pull import EngineIdentity
from baton.connectors.pull.settings import PullSettings
from baton.connectors.push import PushIdentity
from baton.connectors.storage.memory.identity import OffloadIdentity
from baton.connectors.storage.stores.identity import StorageIdentity
from baton.core.config import CacheConfig, ClusterSecret, EngineConfig, KVTransferConfig
from baton.core.errors import ConfigError
from baton.core.identity import KVIdentity
from baton.hosts.vllm.identity import find_folder, kv_identity_of
from baton.hosts.vllm.settings import PluginSettings
from baton.hosts.vllm.versions import Start, decide_start, is_listed, name_some

SECRET = "0123456789abcdef"


pytestmark = pytest.mark.usefixtures("plugin")


class FakeModelConfig(SimpleNamespace):
    """Has its settings as attributes, and what vLLM derives from them as methods."""

    use_mla = False

    def get_total_num_hidden_layers(self) -> int:
        return int(self.hf_config.to_dict()["num_hidden_layers"])

    def get_total_num_kv_heads(self) -> int:
        return int(self.hf_config.to_dict()["num_key_value_heads"])

    def get_head_size(self) -> int:
        return int(self.hf_config.to_dict()["head_dim"])


def model_config(folder: Path, *, config: Mapping[str, Any] | None = None, **changes: Any) -> Any:
    """`config`: changes of config.json, as vLLM applies its overrides."""
    effective = {**json.loads((folder / "config.json").read_text()), **(config or {})}
    fields: dict[str, Any] = {
        "model": str(folder),
        "revision": None,
        "seed": 0,
        "dtype": "torch.float32",
        "hf_overrides": {},
        "quantization": None,
        "max_model_len": 512,
        "hf_config": SimpleNamespace(to_dict=lambda: effective),
    }
    return FakeModelConfig(**fields | changes)


def vllm_config(folder: Path, extra: dict[str, Any] | None = None, **changes: Any) -> Any:
    parallel = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "rank": 3,
        "data_parallel_index": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
    } | changes.pop("parallel", {})
    return SimpleNamespace(
        **{
            "model_config": model_config(folder),
            "load_config": SimpleNamespace(load_format="auto", download_dir=None),
            "cache_config": SimpleNamespace(block_size=128, cache_dtype="auto"),
            "scheduler_config": SimpleNamespace(async_scheduling=True),
            "speculative_config": None,
            "parallel_config": SimpleNamespace(**parallel),
            "kv_transfer_config": SimpleNamespace(
                engine_id="e",
                is_kv_producer=True,
                is_kv_consumer=False,
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=extra or {},
                enable_permute_local_kv=False,
            ),
            **changes,
        }
    )


def identify(config: Any, *, is_worker: bool = False, environment: dict[str, str] | None = None) -> Any:
    if environment is None:
        is_insecure = "insecure_no_secret" in config.kv_transfer_config.kv_connector_extra_config
        environment = {} if is_insecure else {"BATON_SECRET": SECRET}
    from baton.hosts.vllm.view import view_of  # Imports vllm.

    cache = groups(FullAttentionSpec())
    return view_of(PushIdentity, config, cache, is_worker=is_worker, environment=environment)


# --- Identity ----------------------------------------------------------------------------------------


def test_the_identity_equals_that_of_the_embedded_engine(folder: Path) -> None:
    config = load_model_config(folder, dtype="float32")
    ours = config.kv_identity("baton-1")
    assert identify(vllm_config(folder)).kv_identity == ours


def test_the_identity_of_an_engine(folder: Path) -> None:
    identity = identify(vllm_config(folder, {"port": 14600, "data_port": 14700, "stream": "layer"}))
    assert (identity.engine_id, identity.tp_size, identity.pp_size) == ("e", 2, 2)
    assert (identity.block_tokens, identity.settings.port, identity.settings.data_port) == (128, 14601, 14704)
    assert identity.is_producer
    assert not identity.is_consumer
    assert identity.recomputes_failed_loads
    assert not identity.raises_user_errors, "an exception of a hook would end vLLM"
    assert identity.schedules_ahead


OF_VLLM = {
    "cache_specs": "dtypes are those of the registered tensors",
    "groups": "layers of a single group are not counted",
    "lends_memory": "so far",
    "names": "adapters are named; unknown inputs are looked for",
    "policy": "see HostPolicy",
    "raises_user_errors": "an exception of a hook ends vLLM",
    "schedules_ahead": "it does, by default",
    "state_alignment": "parts of a state adjoin",
    "step_timeout_s": "there is none",
    "takes_back_tokens": "it does not",
}
"""Fields of a view in which vLLM is not the embedded engine, for one configuration and model."""


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        (EngineIdentity, {"port": 14600}),
        (PushIdentity, {"stream": "layer"}),
        (StorageIdentity, {"path": "/kv"}),
        (OffloadIdentity, {"cpu_gib": 1}),
    ],
)
def test_both_hosts_are_seen_alike(folder: Path, kind: type[HostView], extra: dict[str, Any]) -> None:
    from baton.hosts.vllm.view import view_of  # Imports vllm.

    model = load_model_config(folder, dtype="float32")
    block_bytes = 128 * model.num_kv_heads * model.token_bytes
    spec = FullAttentionSpec()
    spec.page_size_bytes = block_bytes  # type: ignore[attr-defined]
    cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["0", "1"])])
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "rank": 0, "data_parallel_index": 0}
    config = vllm_config(folder, extra, parallel=parallel)
    theirs = view_of(kind, config, cache, is_worker=False, environment={"BATON_SECRET": SECRET})
    ours = kind.of_engine(
        EngineConfig(
            model_config=model,
            cache_config=CacheConfig(block_size=128),
            kv_transfer_config=KVTransferConfig(
                kv_connector="C", kv_role="kv_producer", engine_id="e", kv_connector_extra_config=extra
            ),
            cluster_secret=ClusterSecret(SECRET.encode()),
        )
    )
    fields = set(kind.__struct_fields__) - {"current"}
    unlike = {name for name in fields if getattr(ours, name) != getattr(theirs, name)}
    assert unlike <= OF_VLLM.keys()
    assert (ours.kv_identity == theirs.kv_identity) == kind.shares_kv(extra)


@pytest.mark.parametrize(
    ("name", "extra", "message"),
    [
        ("BatonSharedStorageConnector", {"path": "/kv", "layerwise": True}, r"layerwise: is not for vLLM"),
        ("BatonTieredConnector", {"tiers": [{"type": "host", "cpu_gib": 1}]}, r"tiers\[0\]\.type: is 'host'"),
    ],
)
def test_what_only_the_embedded_engine_does_is_refused(
    plugin: Any, folder: Path, name: str, extra: dict[str, Any], message: str
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "rank": 0}
    config = vllm_config(folder, extra | {"insecure_no_secret": True}, parallel=parallel)
    with pytest.raises(ConfigError, match=message):
        getattr(plugin, name)(config, KVConnectorRole.SCHEDULER, groups(FullAttentionSpec()))


def test_a_worker_is_one_rank_and_digests_no_weights(folder: Path) -> None:
    identity = identify(vllm_config(folder), is_worker=True)
    assert (identity.tp_rank, identity.pp_rank, identity.rank) == (1, 1, 3)
    assert identity.kv_identity.weights == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization": "fp8"},
        {"config": {"rope_theta": 7.0}},
        {"config": {"is_causal": False}},
        {"config": {"dual_chunk_attention_config": {"chunk_size": 256}}},
        {"config": {"llama_4_scaling": {"beta": 0.1}}},
        {"config": {"layer_types": ["full_attention", "sliding_attention"]}},
        {"config": {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}},
        {"config": {"of_a_new_release": None}},
        {"of_a_new_release": 1},
        {"dtype": "torch.bfloat16"},
    ],
)
def test_changes_of_the_model_change_its_identity(folder: Path, changes: dict[str, Any]) -> None:
    assert of_model(model_config(folder, **changes)) != of_model(model_config(folder))


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 7},
        {"max_model_len": 77},
        {"config": {"layer_types": ["full_attention", "full_attention"]}},
        {"config": {"max_position_embeddings": 77, "transformers_version": "9"}},
        {"hf_overrides": print},  # vLLM has applied it to the config.
    ],
)
def test_some_changes_change_no_number(folder: Path, changes: dict[str, Any]) -> None:
    assert of_model(model_config(folder, **changes)) == of_model(model_config(folder))


def of_model(model: Any) -> KVIdentity:
    return kv_identity_of(model, "auto", None, revision="r")


LONG = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


def test_the_length_is_compared_where_layers_may_read_it(folder: Path) -> None:
    def differ(**config: Any) -> bool:
        short, long = (
            of_model(model_config(folder, config=config, max_model_len=length)) for length in (512, 2048)
        )
        assert short.model == long.model
        return short.host != long.host

    assert not differ()
    assert differ(rope_parameters=LONG)
    assert differ(rope_parameters={"full_attention": {"rope_type": "default"}, "sliding_attention": LONG})
    assert differ(rope_scaling={"type": "dynamic", "factor": 2.0})
    assert differ(architectures=["Strange"])
    assert not differ(architectures=["Gemma2ForCausalLM"])
    lowered = [model_config(folder, max_model_len=n, config={"rope_scaling": LONG}) for n in (512, 256)]
    for model in lowered:
        model.original_max_model_len = -1
    assert of_model(lowered[0]) == of_model(lowered[1]), (
        "vLLM lowered it to fit memory, after the layers read it"
    )


@pytest.mark.parametrize(
    ("changes", "is_compared"),
    [
        ({"additional_config": {"any": 1}}, True),
        ({"of_a_new_release": 1}, True),
        ({"attention_config": SimpleNamespace(of_a_new_release=1)}, True),
        ({"lora_config": SimpleNamespace(lora_dtype="float16")}, True),
        ({"lora_config": SimpleNamespace(lora_dtype="float32")}, False),
        ({"quant_config": object()}, False),
        ({"parallel": {"worker_cls": "mine.Worker"}}, True),
        ({"parallel": {"worker_cls": "vllm.v1.worker.gpu_worker.Worker"}}, False),
        ({"parallel": {"tensor_parallel_size": 4}}, False),
    ],
)
def test_settings_beside_the_model(folder: Path, changes: dict[str, Any], *, is_compared: bool) -> None:
    identity = identify(vllm_config(folder, **changes)).kv_identity
    plain = identify(vllm_config(folder)).kv_identity
    assert (identity.model, plain.host) == (plain.model, "")
    assert (identity.host != "") == is_compared


def test_variables_that_vllm_reads_are_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_PORT", "VLLM_PREFILL_SERVICE_HOST"):  # Kubernetes sets the latter.
        monkeypatch.setenv(name, "1")
    assert identify(vllm_config(folder)).kv_identity.host == ""
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    assert identify(vllm_config(folder)).kv_identity.host != ""


def test_what_is_compared_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        of_model(model_config(folder, quantization="fp8"))
    assert "model_config.quantization='fp8'" in caplog.text


@pytest.mark.parametrize(
    ("file", "flags"),
    [
        ("hf_quant_config.json", {}),
        ("preprocessor_config.json", {"multimodal_config": SimpleNamespace()}),
        ("modeling_strange.py", {"trust_remote_code": True}),
    ],
)
def test_other_files_of_a_checkpoint_are_compared(
    folder: Path, tmp_path: Path, file: str, flags: dict[str, Any]
) -> None:
    def host() -> str:
        return kv_identity_of(model_config(folder, **flags), "auto", tmp_path, revision="r").host

    (tmp_path / "README.md").write_text("of no concern")
    assert host() == ""
    (tmp_path / file).write_text("one")
    one = host()
    (tmp_path / file).write_text("two")
    assert "" != one != host()


def test_an_unknown_family_only_has_to_be_equal(folder: Path) -> None:
    strange = {"architectures": ["Strange"]}
    digests = [
        of_model(model_config(folder, config=strange | noise)).model
        for noise in ({"transformers_version": "1"}, {"transformers_version": "2"}, {"hidden_size": 33})
    ]
    assert digests[0] == digests[1] != digests[2]


def test_weights_are_named_or_digested_or_refused(folder: Path, tmp_path: Path) -> None:
    model = model_config(folder)

    def revision(folder: Path | None, **how: Any) -> str:
        return kv_identity_of(model, "auto", folder, **({"revision": None} | how)).weights

    assert revision(None, revision="mine") == "named mine"
    assert revision(folder, load_format="dummy") == "dummy weights of seed 0"
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    assert revision(tmp_path).startswith("files ")
    with pytest.raises(ConfigError, match="not on this machine"):
        revision(None)
    with pytest.raises(ConfigError, match="no weight files"):
        revision(tmp_path.parent / "nothing")


def test_scales_beside_a_cache_are_part_of_its_dtype(folder: Path) -> None:
    assert kv_identity_of(model_config(folder), "fp8", folder, revision="r").dtype == "fp8"


def test_a_missing_model_has_no_folder(folder: Path) -> None:
    load = SimpleNamespace(download_dir=None)
    assert find_folder(SimpleNamespace(model=str(folder), revision=None), load) == folder


# --- Refusals at start -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "extra", "field"),
    [
        ({"decode_context_parallel_size": 2}, {}, "decode_context_parallel_size"),
        ({"prefill_context_parallel_size": 2}, {}, "prefill_context_parallel_size"),
        ({}, {"no such key": 1}, "no such key"),
        ({}, {"revision": ""}, "revision"),
        ({}, {"allow_untested_vllm": "yes"}, "allow_untested_vllm"),
        ({}, {"host": "0.0.0.0", "advertise_host": "10.0.0.1", "insecure_no_secret": True}, "host"),
        ({}, {"secret_file": "/nowhere/at/all"}, "secret_file"),
    ],
)
def test_configurations_that_cannot_work_are_refused(
    folder: Path, parallel: dict[str, Any], extra: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError, match=field):
        identify(vllm_config(folder, extra, parallel=parallel))


class FullAttentionSpec:
    """Has the name of vLLM's class, by which it is recognised."""


def groups(*specs: Any) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=spec, layer_names=[f"l{index}"]) for index, spec in enumerate(specs)
        ]
    )


LACKS = ("Pool.touch: recorded (self), found missing",)


@pytest.mark.parametrize("has_self_test", [True, False])
@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.32.0+cpu", "0.33.1"])
def test_listed_versions_start_at_once(version: str, has_self_test: bool) -> None:
    start = decide_start(version, (), has_self_test=has_self_test, allow_untested=False)
    assert start is Start.AT_ONCE
    assert is_listed(version)


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "1.0", "dev", "0.320.1"])
@pytest.mark.parametrize("allow_untested", [True, False])
def test_other_versions_that_fit_a_record_start_after_the_self_test(
    version: str, allow_untested: bool
) -> None:
    start = decide_start(version, (), has_self_test=True, allow_untested=allow_untested)
    assert start is Start.AFTER_SELF_TEST
    assert not is_listed(version)


@pytest.mark.parametrize(
    ("version", "misfits", "has_self_test"),
    [("0.34.0", (), False), ("0.34.0", LACKS, True), ("0.34.0", LACKS, False), ("0.32.9", LACKS, True)],
)
def test_versions_that_fit_no_record_or_cannot_be_tested_start_only_if_allowed(
    version: str, misfits: tuple[str, ...], has_self_test: bool
) -> None:
    with pytest.raises(ConfigError, match="allow_untested_vllm") as refused:
        decide_start(version, misfits, has_self_test=has_self_test, allow_untested=False)
    for named in (version, "0.31, 0.32 and 0.33", *misfits):
        assert named in str(refused.value)
    start = decide_start(version, misfits, has_self_test=has_self_test, allow_untested=True)
    assert start is (Start.AFTER_SELF_TEST if has_self_test else Start.UNTESTED)


def test_a_refusal_names_a_few_differences() -> None:
    assert name_some(["a", "b"]) == "a; b"
    assert name_some(list("abcdefg")) == "a; b; c; d; e; and 2 more"


# --- The secret --------------------------------------------------------------------------------------


def test_the_secret_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("another secret of the file\n")
    environment = {"BATON_SECRET": SECRET}
    from_file = PluginSettings(secret_file=str(file)).find_secret(environment)
    assert from_file is not None
    assert from_file.key == b"another secret of the file"
    from_environment = PluginSettings().find_secret(environment)
    assert from_environment is not None
    assert from_environment.key == SECRET.encode()
    assert PluginSettings(insecure_no_secret=True).find_secret({}) is None
    generated = PluginSettings().find_secret({"HOME": str(tmp_path)})
    assert generated is not None
    assert generated == PluginSettings().find_secret({"HOME": str(tmp_path)})


@pytest.mark.parametrize("content", ["short", "x" * 70_000])
def test_a_secret_file_is_checked(tmp_path: Path, content: str) -> None:
    file = tmp_path / "secret"
    file.write_text(content)
    with pytest.raises(ConfigError, match="bytes"):
        PluginSettings(secret_file=str(file)).find_secret({})


def test_other_settings_are_passed_to_the_connector() -> None:
    ours, theirs = PluginSettings.split({"port": 5, "revision": "r", "transports": ["tcp"]})
    assert ours == PluginSettings(revision="r")
    assert PullSettings.parse(theirs, None).port == 5
