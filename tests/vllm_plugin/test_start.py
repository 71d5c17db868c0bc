"""Start-up in vLLM: the identity made from vLLM's configuration, and the configurations that are refused."""

import json
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.connectors.pull.settings import PullSettings
from baton.connectors.push.settings import PushSettings
from baton.core.errors import ConfigError
from baton.engine.checkpoints.checkpoint import load_model_config
from baton.vllm_plugin.fingerprint import kv_identity_of
from baton.vllm_plugin.host_config import CONFIGS, EXCLUDED, NEUTRAL
from baton.vllm_plugin.identity import find_folder, identity_of
from baton.vllm_plugin.settings import PluginSettings
from baton.vllm_plugin.versions import Start, decide_start, is_listed, name_some

SECRET = "0123456789abcdef"


def model_config(folder: Path, **changes: Any) -> Any:
    config = load_model_config(folder)
    return as_vllms(
        "model_config",
        **{
            "model": str(folder),
            "revision": None,
            "seed": 0,
            "dtype": "torch.float32",
            "use_mla": False,
            "hf_overrides": {},
            "quantization": None,
            "hf_config": SimpleNamespace(to_dict=lambda: json.loads((folder / "config.json").read_text())),
            "get_total_num_hidden_layers": lambda: config.num_hidden_layers,
            "get_total_num_kv_heads": lambda: config.num_kv_heads,
            "get_head_size": lambda: config.head_dim,
            **changes,
        },
    )


def as_vllms(name: str, **fields: Any) -> Any:
    """An object with these attributes. As in vLLM the fields of its class are those without code."""
    shown = [field for field, value in fields.items() if field in LISTED[name] and not callable(value)]
    made = make_dataclass(name, shown)(**{field: fields[field] for field in shown})
    vars(made).update(fields)
    return made


LISTED = {part: {*EXCLUDED.get(part, ()), *NEUTRAL.get(part, ())} for part in {*EXCLUDED, *NEUTRAL}}
LISTED["model_config"] |= {"max_model_len"}
LISTED["vllm_config"] |= {*EXCLUDED, *CONFIGS}


def vllm_config(folder: Path, extra: dict[str, Any] | None = None, **changes: Any) -> Any:
    parallel = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "rank": 3,
        "data_parallel_index": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
    } | changes.pop("parallel", {})
    return as_vllms(
        "vllm_config",
        **{
            "model_config": model_config(folder),
            "load_config": SimpleNamespace(load_format="auto", download_dir=None),
            "cache_config": as_vllms("cache_config", block_size=128, cache_dtype="auto"),
            "scheduler_config": SimpleNamespace(async_scheduling=True),
            "speculative_config": None,
            "parallel_config": as_vllms("parallel_config", **parallel),
            "kv_transfer_config": SimpleNamespace(
                engine_id="e",
                is_kv_producer=True,
                is_kv_consumer=False,
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=extra or {},
                enable_permute_local_kv=False,
            ),
            **changes,
        },
    )


def identify(config: Any, *, is_worker: bool = False, environment: dict[str, str] | None = None) -> Any:
    if environment is None:
        is_insecure = "insecure_no_secret" in config.kv_transfer_config.kv_connector_extra_config
        environment = {} if is_insecure else {"BATON_SECRET": SECRET}
    return identity_of(config, PushSettings, environment, does_push=True, is_worker=is_worker)


# --- Identity ----------------------------------------------------------------------------------------


def test_the_fingerprint_equals_that_of_the_embedded_engine(folder: Path) -> None:
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


def test_a_worker_is_one_rank_and_digests_no_weights(folder: Path) -> None:
    identity = identify(vllm_config(folder), is_worker=True)
    assert (identity.tp_rank, identity.pp_rank, identity.rank) == (1, 1, 3)
    assert identity.kv_identity.weights == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization": "fp8"},
        {"hf_overrides": {"rope_theta": 7.0}},
        {"hf_overrides": print},
        {"dtype": "torch.bfloat16"},
    ],
)
def test_changes_of_the_model_change_the_fingerprint(folder: Path, changes: dict[str, Any]) -> None:
    plain = kv_identity_of(model_config(folder), "auto", folder, revision=None)
    assert kv_identity_of(model_config(folder, **changes), "auto", folder, revision=None) != plain


def test_an_unknown_family_only_has_to_be_equal(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["Strange"]}
    digests = []
    for noise in ({"transformers_version": "1"}, {"transformers_version": "2"}, {"hidden_size": 33}):
        (tmp_path / "config.json").write_text(json.dumps(config | noise))
        digests.append(kv_identity_of(model_config(folder), "auto", tmp_path, revision="r").model)
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
