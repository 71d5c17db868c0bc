"""Kit's vLLM site for connectors that save hidden states: vLLM speculates, so its cache has one more layer.

    one group        model's layers + states' layer       one block table
    several groups   model's groups + states' group       block table of the layers without a window

vLLM allocates blocks of their own to the states' group; for a connector that reads them by block table this
makes no difference. No model runs, so the layer always holds the same values.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import SpeculativeConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, KVCacheGroupSpec, UniformTypeKVCacheSpecs

from baton.core.config import EngineConfig
from baton.core.kv_groups import is_hybrid
from baton.testing.contract.case import ConnectorCase, find_class
from baton.vllm_kit.site import VllmHMAScheduler, VllmSite
from baton.vllm_plugin.hidden_states import METHOD, BatonHiddenStatesConnector

LAYERS = (0, 2)  # Needs a model of at least two layers.
STATES = "cache_only_layers.states"


def make_vllm_site(case: ConnectorCase) -> VllmSite:
    """Return a site that provides what the connector needs."""
    saves_states = issubclass(find_class(case.path), BatonHiddenStatesConnector)
    return (StatesSite if saves_states else VllmSite)(case)


class StatesSite(VllmSite):
    """Site for connectors that save hidden states; they support several groups."""

    def make_scheduler_half(self, config: EngineConfig) -> Any:
        connector = self.make_connector(config, KVConnectorRole.SCHEDULER, 0)
        groups = config.kv_cache_groups
        whole = next(index for index, group in enumerate(groups) if group.window is None)
        return _Scheduler(connector, whole if is_hybrid(groups) else None)

    def make_worker_half(self, config: EngineConfig, rank: int) -> Any:
        connector = self.make_connector(config, KVConnectorRole.WORKER, rank)
        cache = config.cache_config
        pages = torch.zeros(
            cache.num_gpu_blocks, len(LAYERS), cache.block_size, config.model_config.hidden_size
        )
        return _Worker(connector, pages)

    def describe_engine(self, folder: str) -> Any:
        config = super().describe_engine(folder)
        config.speculative_config = SpeculativeConfig(
            method=METHOD,
            num_speculative_tokens=1,
            draft_model_config={"hf_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}},
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
        return config

    def describe_cache(self, config: EngineConfig, role: Any) -> Any:
        described = super().describe_cache(config, role)
        groups = described.kv_cache_groups
        spec = HiddenStateCacheSpec(
            block_size=config.cache_config.block_size,
            num_kv_heads=len(LAYERS),
            head_size=config.model_config.hidden_size,
            dtype=torch.float32,
        )
        if len(groups) > 1:
            groups.append(KVCacheGroupSpec([STATES], spec))
            return described
        (group,) = groups
        specs = {**dict.fromkeys(group.layer_names, group.kv_cache_spec), STATES: spec}
        group.layer_names = list(specs)
        if role is KVConnectorRole.WORKER:  # vLLM gives its scheduler the spec of the first layer.
            group.kv_cache_spec = UniformTypeKVCacheSpecs(
                block_size=config.cache_config.block_size, kv_cache_specs=specs
            )
        return described


class _Scheduler(VllmHMAScheduler):
    def __init__(self, connector: Any, whole: int | None) -> None:
        """`whole`: the group whose block table the states' group shares; None if there is only one group."""
        super().__init__(connector)
        self._whole = whole

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        tables = block_ids if self._whole is None else (*block_ids, block_ids[self._whole])
        return super().request_finished_all_groups(request, tables)


class _Worker:
    """The connector, to which the states' layer is registered with the others."""

    def __init__(self, connector: Any, pages: torch.Tensor) -> None:
        """`pages`: the states' layer, `[num_blocks, layers, block tokens, hidden size]`."""
        self._connector = connector
        self._pages = pages

    def __getattr__(self, name: str) -> Any:
        if name == "_connector":  # While it is being copied or unpickled.
            raise AttributeError(name)
        return getattr(self._connector, name)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._connector.register_kv_caches({**kv_caches, STATES: self._pages})
