"""The kit on the connector classes for vLLM, with the stub of vLLM."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.core.config import EngineConfig
from baton.core.layout import SLOT
from baton.testing.contract import ConnectorCase
from baton.testing.contract.case import WINDOWS
from baton.testing.contract.ours import TIMERS, cut_files
from baton.testing.contract.site import ToySite
from tests.testing.enough import check_enough
from tests.vllm_plugin.test_connector import PARALLEL, roles
from tests.vllm_plugin.test_groups import SlidingWindowSpec
from tests.vllm_plugin.test_start import FullAttentionSpec, vllm_config


class VllmSite(ToySite):
    """Halves made as vLLM makes them: from its configuration, roles and cache groups."""

    def __init__(self, case: ConnectorCase, plugin: Any, folder: Path) -> None:
        super().__init__(case)
        self.windows = WINDOWS  # The plug-in learns of states from specs, which this host does not have.
        self._kind = getattr(plugin, case.path)
        self._folder = folder

    def make_scheduler_half(self, config: EngineConfig) -> Any:
        connector = self._make(config, "SCHEDULER", 0)
        if self.case.pairing == "push":  # Clients get it in a response, which the kit does not have.
            connector.introduction = connector.scheduler_half.introduction
        return connector

    def make_worker_half(self, config: EngineConfig, rank: int) -> Any:
        return self._make(config, "WORKER", rank)

    def _make(self, config: EngineConfig, role: str, rank: int) -> Any:
        transfer, tp = config.kv_transfer_config, config.parallel_config.tensor_parallel_size
        assert transfer is not None
        changed = vllm_config(
            self._folder,
            parallel=PARALLEL | {"tensor_parallel_size": tp, "world_size": tp, "rank": rank},
            kv_transfer_config=transfer,
            scheduler_config=SimpleNamespace(async_scheduling=False),
        )
        model = config.model_config
        changed.model_config.get_total_num_kv_heads = lambda: model.num_kv_heads
        changed.model_config.get_head_size = lambda: model.head_dim
        changed.cache_config.block_size = config.cache_config.block_size
        return self._kind(changed, roles()[role], _cache_of(config))


def _cache_of(config: EngineConfig) -> Any:
    """vLLM's `KVCacheConfig` for the kit's model, with the same groups."""
    model, block_tokens = config.model_config, config.cache_config.block_size
    heads = model.num_kv_heads // config.parallel_config.tensor_parallel_size
    page_bytes = heads * block_tokens * 2 * model.head_dim * 4
    groups = []
    for group in config.kv_cache_groups:
        if group.window is not None:
            spec: Any = SlidingWindowSpec(group.window, 0, block_tokens, page_bytes)
        else:
            spec = FullAttentionSpec()
            spec.block_size, spec.page_size_bytes = block_tokens, page_bytes
        names = [f"model.layers.{layer}.self_attn.attn" for layer in group.layers]
        groups.append(SimpleNamespace(kv_cache_spec=spec, layer_names=names))
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=config.cache_config.num_gpu_blocks)


@pytest.fixture
def cases(tmp_path: Path) -> dict[str, ConnectorCase]:
    stored = tmp_path / "kv"
    handoff = {"transports": ["memory"], "timers": TIMERS}
    return {
        case.path: case
        for case in (
            ConnectorCase(path="BatonPullConnector", pairing="pull", extra_config=handoff),
            ConnectorCase(path="BatonPushConnector", pairing="push", extra_config=handoff),
            ConnectorCase(path="BatonOffloadConnector", extra_config={"cpu_gib": 3e-5}),
            ConnectorCase(
                path="BatonSharedStorageConnector",
                extra_config={"path": str(stored), "chunk_tokens": 4, "fsync": False},
                break_store=lambda: cut_files(stored),
            ),
        )
    }


@pytest.mark.parametrize(
    "name",
    [f"Baton{kind}Connector" for kind in ("Pull", "Push", "Offload", "SharedStorage")],
)
def test_it_keeps_the_contract(
    name: str,
    cases: dict[str, ConnectorCase],
    plugin: Any,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # There is no attention backend to probe; the kit's blocks hold slots.
    monkeypatch.setattr("baton.hosts.vllm.view.find_packing", lambda config, caches: SLOT)
    check_enough(
        cases[name],
        {"steps": 20, "loads in the background": 0},
        examples=4,
        tries=20,
        make_site=lambda case: VllmSite(case, plugin, folder),
    )
