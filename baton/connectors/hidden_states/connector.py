"""BatonHiddenStatesConnector: saves the hidden states of prompts, to train draft models and probes.

{"kv_connector": "BatonHiddenStatesConnector", "kv_role": "kv_producer",
 "kv_connector_extra_config": {"shared_storage_path": "/data/states", "layer_ids": [2, 14, 28]}}

Every answer names its file: {"hidden_states_path": "..."} in `kv_transfer_params`. The file appears a little
later, complete (`load_hidden_states` waits for it). A request may set options:

    {"include_output_tokens": true, "hidden_states_path": "run-7/one.safetensors"}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from baton.connectors.extra_config import parse_extra
from baton.connectors.hidden_states.halves import (
    HiddenStatesSchedulerHalf,
    HiddenStatesStats,
    HiddenStatesWorkerHalf,
)
from baton.connectors.hidden_states.settings import PATH_KEY, HiddenStatesSettings, includes_output
from baton.connectors.observed import ObservedConnector
from baton.contract import KVConnectorSchedulerHalf, KVConnectorWorkerHalf, host
from baton.core.config import EngineConfig
from baton.core.kv_groups import KVCacheGroup, has_states
from baton.core.transfer_params import parse_transfer_params


class BatonHiddenStatesConnector(ObservedConnector):
    stats_kind = HiddenStatesStats
    answered_params: ClassVar[frozenset[str]] = frozenset({PATH_KEY})
    stands_alone: ClassVar[bool] = True

    @classmethod
    def make_scheduler_half(
        cls, vllm_config: host.HostConfig, kv_cache_config: Any
    ) -> KVConnectorSchedulerHalf:
        return HiddenStatesSchedulerHalf(_settings_of(vllm_config))

    @classmethod
    def make_worker_half(cls, vllm_config: host.HostConfig, kv_cache_config: Any) -> KVConnectorWorkerHalf:
        assert isinstance(vllm_config, EngineConfig), "vLLM uses its own connector"
        settings = _settings_of(vllm_config)
        return HiddenStatesWorkerHalf(
            settings,
            settings.layers_of(vllm_config.model_config.num_hidden_layers),
            vllm_config.cache_config.block_size,
            is_first_rank=vllm_config.parallel_config.rank == 0,
        )

    @classmethod
    def make_door(cls, config: EngineConfig) -> Callable[[Mapping[str, Any] | None], None]:
        settings = _settings_of(config)
        settings.layers_of(config.model_config.num_hidden_layers)

        def check(raw: Mapping[str, Any] | None) -> None:
            parse_transfer_params(raw)
            includes_output(raw)
            settings.path_for("", raw)

        return check

    @classmethod
    def supports_groups(
        cls, kv_transfer_config: host.KVTransferConfigLike, groups: Sequence[KVCacheGroup]
    ) -> bool:
        """States of tokens before a window would be lost with their slots."""
        return groups[0].window is None and not has_states(groups)  # Full-attention groups come first.

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True


def _settings_of(vllm_config: host.HostConfig) -> HiddenStatesSettings:
    return parse_extra(HiddenStatesSettings, vllm_config.kv_transfer_config.kv_connector_extra_config)
