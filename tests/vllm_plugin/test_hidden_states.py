"""Hidden states in vLLM: a layer of its cache, found in any group."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.connectors.hidden_states import load_hidden_states
from baton.core.errors import ConfigError
from tests.connectors.pull_world import FakeRequest, Status
from tests.vllm_plugin.test_connector import PARALLEL, roles
from tests.vllm_plugin.test_start import FullAttentionSpec, vllm_config

LAYER = "cache_only_layers.2"
BLOCK_TOKENS, HIDDEN = 4, 8


class HiddenStateCacheSpec(FullAttentionSpec):
    block_size = BLOCK_TOKENS


class SlidingWindowSpec:
    block_size = 128


def _together(role: str) -> list[Any]:
    """A model without windows: one group, and its scheduler gets only the first spec."""
    specs = {"model.layers.0": FullAttentionSpec(), LAYER: HiddenStateCacheSpec()}
    spec = FullAttentionSpec() if role == "SCHEDULER" else SimpleNamespace(kv_cache_specs=specs)
    return [SimpleNamespace(layer_names=list(specs), kv_cache_spec=spec)]


def _apart(role: str) -> list[Any]:
    return [
        SimpleNamespace(layer_names=["model.layers.0"], kv_cache_spec=SlidingWindowSpec()),
        SimpleNamespace(layer_names=[LAYER], kv_cache_spec=HiddenStateCacheSpec()),
    ]


def config_of(folder: Path, path: Path, named: Any = (2, 0), **extra: Any) -> Any:
    draft = SimpleNamespace(hf_config=SimpleNamespace(eagle_aux_hidden_state_layer_ids=named))
    return vllm_config(
        folder,
        {"shared_storage_path": str(path), **extra},
        parallel=PARALLEL,
        speculative_config=SimpleNamespace(method="extract_hidden_states", draft_model_config=draft),
    )


def make(plugin: Any, config: Any, role: str, groups: list[Any]) -> Any:
    kind = plugin.BatonHiddenStatesConnector
    return kind(config, getattr(roles(), role), SimpleNamespace(kv_cache_groups=groups))


@pytest.mark.parametrize("groups", [_together, _apart])
def test_the_rows_of_a_request_that_has_ended_are_saved(
    plugin: Any, folder: Path, tmp_path: Path, groups: Callable[[str], list[Any]]
) -> None:
    config = config_of(folder, tmp_path)
    scheduler = make(plugin, config, "SCHEDULER", groups("SCHEDULER"))
    worker = make(plugin, config, "WORKER", groups("WORKER"))
    pages = torch.randn(6, 2, BLOCK_TOKENS, HIDDEN)
    worker.register_kv_caches({"model.layers.0": torch.zeros(6, 1, 128, 2), LAYER: pages})
    request = FakeRequest("r", list(range(7)), {}, num_computed_tokens=9)
    scheduler.on_new_request(request)
    request.status = Status.FINISHED_LENGTH_CAPPED
    tables = ([9, 9], [5, 2])[-len(groups("WORKER")) :]  # Per group; a foreign group's first.
    delay_free, params = scheduler.request_finished_all_groups(request, tuple(tables))
    assert not delay_free
    assert scheduler.has_pending_push_work(), "otherwise the engine would not step to save them"
    metadata = scheduler.build_connector_meta(None)
    worker.handle_preemptions(metadata)
    expected = torch.cat([pages[5], pages[2]], dim=1).transpose(0, 1)[:7].clone()
    pages.zero_()  # As the step does that gets the blocks.
    saved = load_hidden_states(params["hidden_states_path"])
    assert torch.equal(saved["hidden_states"], expected)
    assert saved["token_ids"].tolist() == list(range(7))
    for half in (scheduler, worker):
        half.shutdown()


@pytest.mark.parametrize("wish", [{"include_output_tokens": 7}, {"hidden_states_path": "mine.safetensors"}])
def test_bad_params_cost_only_the_file(plugin: Any, folder: Path, tmp_path: Path, wish: Any) -> None:
    scheduler = make(plugin, config_of(folder, tmp_path), "SCHEDULER", _together("SCHEDULER"))
    request = FakeRequest("r", [1, 2], wish, num_computed_tokens=3)
    scheduler.on_new_request(request)
    request.status = Status.FINISHED_LENGTH_CAPPED
    assert scheduler.request_finished_all_groups(request, ([1],)) == (False, None)
    assert scheduler.get_kv_connector_stats() is None, "no failure may be counted"
    scheduler.shutdown()


def test_a_vllm_without_the_speculative_method_does_not_start(
    plugin: Any, folder: Path, tmp_path: Path
) -> None:
    group = SimpleNamespace(layer_names=["model.layers.0"], kv_cache_spec=FullAttentionSpec())
    config = config_of(folder, tmp_path)
    for speculative in (None, SimpleNamespace(method="ngram")):
        config.speculative_config = speculative
        for role in ("SCHEDULER", "WORKER"):
            with pytest.raises(ConfigError, match=r"speculative_config: .*extract_hidden_states"):
                make(plugin, config, role, [group])


@pytest.mark.parametrize(
    ("named", "extra", "message"),
    [
        ((), {}, r"must be different layer numbers in \[0, 2\]"),
        ((1, 1), {}, r"must be different layer numbers in \[0, 2\]"),
        ((3,), {}, r"must be different layer numbers in \[0, 2\]"),
        ((0, 2), {"layer_ids": [1]}, r"layer_ids: is set by speculative_config in vLLM"),
    ],
)
def test_wrong_layers_are_refused(
    plugin: Any, folder: Path, tmp_path: Path, named: Any, extra: dict[str, Any], message: str
) -> None:
    for role in ("SCHEDULER", "WORKER"):
        with pytest.raises(ConfigError, match=message):
            make(plugin, config_of(folder, tmp_path, named, **extra), role, _together(role))


def test_equal_layers_in_both_settings_start(plugin: Any, folder: Path, tmp_path: Path) -> None:
    make(
        plugin, config_of(folder, tmp_path, layer_ids=[0, 2]), "SCHEDULER", _together("SCHEDULER")
    ).shutdown()


def test_a_cache_of_another_shape_is_refused(plugin: Any, folder: Path, tmp_path: Path) -> None:
    worker = make(plugin, config_of(folder, tmp_path), "WORKER", _together("WORKER"))
    with pytest.raises(ConfigError, match="2 layers and blocks of 4"):
        worker.register_kv_caches({LAYER: torch.zeros(6, 3, BLOCK_TOKENS, HIDDEN)})
    worker.shutdown()


@pytest.mark.parametrize("name", ["BatonDecodeBenchConnector", "BatonHiddenStatesConnector"])
def test_a_connector_that_must_be_alone_is_refused_as_a_child(
    plugin: Any, folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.config

    config = config_of(folder, tmp_path)
    config.kv_transfer_config.kv_connector = name
    if name == "BatonDecodeBenchConnector":
        config.kv_transfer_config.kv_connector_extra_config = {}
    main = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="MultiConnector"))
    groups = SimpleNamespace(kv_cache_groups=_together("WORKER"))
    monkeypatch.setattr(vllm.config, "_current_vllm_config", main)
    with pytest.raises(ConfigError, match=rf"{name} cannot be combined"):
        getattr(plugin, name)(config, roles().WORKER, groups)


def test_others_may_be_children(plugin: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.config

    main = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="MultiConnector"))
    monkeypatch.setattr(vllm.config, "_current_vllm_config", main)
    config = vllm_config(folder, parallel=PARALLEL)
    config.kv_transfer_config.kv_connector = "BatonPullConnector"
    group = SimpleNamespace(layer_names=["l"], kv_cache_spec=FullAttentionSpec())
    plugin.BatonPullConnector(config, roles().WORKER, SimpleNamespace(kv_cache_groups=[group])).shutdown()
