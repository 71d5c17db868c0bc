"""`BatonHiddenStatesConnector` for vLLM. `forwarding` has what all our connectors share.

    vllm serve MODEL --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 14]}}}'
      --kv-transfer-config '{"kv_connector": "BatonHiddenStatesConnector", "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "/data/states"}}'

vLLM gives access to hidden states only by that speculative method, which drafts nothing. Its "draft model" is
one more layer of the KV cache, which stores the states of the named layers:

    forward --> layer's pages [block, named layer, slot, hidden size] --> a request's rows, when it has ended

A prefix-cache hit includes that layer, so cached tokens have their states. vLLM numbers layers as
transformers does, but takes the last layer's states before the final norm.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from baton.connectors.extra_config import FIELD, parse_extra
from baton.connectors.hidden_states.halves import (
    HiddenStatesMetadata,
    HiddenStatesSchedulerHalf,
    HiddenStatesStats,
    HiddenStatesWorkerHalf,
)
from baton.connectors.hidden_states.settings import HiddenStatesSettings
from baton.contract import KVConnectorSchedulerHalf, KVConnectorWorkerHalf, host
from baton.core.errors import BadTransferParams, ConfigError
from baton.vllm_plugin.forwarding import ForwardingConnector
from baton.vllm_plugin.stores import refuse_split_blocks

if TYPE_CHECKING:
    import torch

METHOD = "extract_hidden_states"
SPECULATIVE = "speculative_config"
EXAMPLE = (
    '{"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": '
    '{"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 14]}}}'
)

logger = logging.getLogger(__name__)


class VllmHiddenStatesSchedulerHalf(HiddenStatesSchedulerHalf):
    def on_new_request(self, request: host.Request) -> None:
        """Log bad params instead of raising: vLLM cannot refuse the request here, so only its file is
        lost.
        """
        try:
            super().on_new_request(request)
        except BadTransferParams as error:
            logger.warning("no hidden states of request %s are saved: %s", request.request_id, error)


class VllmHiddenStatesWorkerHalf(HiddenStatesWorkerHalf):
    """Reads the states from a layer of vLLM's cache, without a copy of its own."""

    def __init__(
        self,
        settings: HiddenStatesSettings,
        layers: tuple[int, ...],
        block_tokens: int,
        *,
        layer_name: str,
        is_first_rank: bool,
    ) -> None:
        super().__init__(settings, layers, block_tokens, is_first_rank=is_first_rank)
        self._layer_name = layer_name
        self._pages: torch.Tensor | None = None  # [blocks, layers, block tokens, hidden size].

    @property
    def final_norm(self) -> str:
        return "not applied"

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises ConfigError if the cache does not have the shape of the configured layers."""
        pages = kv_caches[self._layer_name]
        wanted = (len(self._layers), self._block_tokens)
        if pages.dim() != 4 or tuple(pages.shape[1:3]) != wanted:
            raise ConfigError(
                f"has the shape {tuple(pages.shape)}, where {wanted[0]} layers and blocks of {wanted[1]} "
                "tokens were expected; Baton does not support this version of vLLM",
                field=f"kv_caches.{self._layer_name}",
            )
        self._pages = pages

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def states_of(self, block_ids: tuple[int, ...], num_tokens: int) -> torch.Tensor | None:
        if self._pages is None:
            return None
        pages = self._pages[list(block_ids)].to("cpu")
        return pages.transpose(1, 2).flatten(0, 1)[:num_tokens].contiguous()


class BatonHiddenStatesConnector(ForwardingConnector):
    _cache_hit_source = "external_unspecified"
    _empty_metadata = HiddenStatesMetadata()
    _stats_kind = HiddenStatesStats
    _stands_alone: ClassVar[bool] = True

    @classmethod
    def find_group(cls, kv_cache_config: Any) -> int:
        """Return the group of the states' layer; the model's own groups are not used. Raises ConfigError."""
        groups = kv_cache_config.kv_cache_groups
        if len(groups) == 1:
            return 0  # For the scheduler, a mixed group has the spec of its first layer.
        return states_layer_of(kv_cache_config).group

    @classmethod
    def make_scheduler_half(
        cls, vllm_config: Any, kv_cache_config: Any, settings: dict[str, Any]
    ) -> KVConnectorSchedulerHalf:
        parsed = parse_extra(HiddenStatesSettings, settings)
        layers_of(vllm_config, parsed)
        return VllmHiddenStatesSchedulerHalf(parsed)

    @classmethod
    def make_worker_half(
        cls, vllm_config: Any, kv_cache_config: Any, settings: dict[str, Any]
    ) -> KVConnectorWorkerHalf:
        parsed = parse_extra(HiddenStatesSettings, settings)
        refuse_split_blocks(vllm_config.parallel_config, "hidden-state saving")
        layer = states_layer_of(kv_cache_config)
        return VllmHiddenStatesWorkerHalf(
            parsed,
            layers_of(vllm_config, parsed),
            layer.block_tokens,
            layer_name=layer.name,
            is_first_rank=int(vllm_config.parallel_config.rank) == 0,
        )


@dataclass(frozen=True, slots=True)
class StatesLayer:
    """The layer of the cache that holds hidden states."""

    group: int
    name: str
    block_tokens: int


def states_layer_of(kv_cache_config: Any) -> StatesLayer:
    """Return the states' layer. Raises ConfigError if vLLM is not configured to extract hidden states."""
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        # With layers that all keep whole prompts it shares a group, where each layer has its own spec.
        of_layers = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(group.layer_names, spec)
        for name, of_layer in of_layers.items():
            if "HiddenStateCacheSpec" in {kind.__name__ for kind in type(of_layer).__mro__}:
                return StatesLayer(index, name, int(of_layer.block_size))
    raise _not_configured()


def _not_configured() -> ConfigError:
    return ConfigError(
        f"is needed to extract hidden states: start vLLM with --speculative-config '{EXAMPLE}'",
        field=SPECULATIVE,
    )


def layers_of(vllm_config: Any, settings: HiddenStatesSettings) -> tuple[int, ...]:
    """Return the layers that vLLM is configured to extract, sorted. Raises ConfigError."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != METHOD:
        raise _not_configured()
    name = "eagle_aux_hidden_state_layer_ids"
    config = speculative.draft_model_config.hf_config
    named = [int(layer) for layer in getattr(config, name, None) or ()]
    num_layers = int(vllm_config.model_config.get_total_num_hidden_layers())
    if not named or len(set(named)) < len(named) or not all(0 <= layer <= num_layers for layer in named):
        raise ConfigError(
            f"must be different layer numbers in [0, {num_layers}]; are {named}",
            field=f"{SPECULATIVE}.draft_model_config.hf_config.{name}",
        )
    if settings.layer_ids is not None and sorted(settings.layer_ids) != sorted(named):
        raise ConfigError(
            f"is set by {SPECULATIVE} in vLLM, where {name} is {named}; remove it here",
            field=f"{FIELD}.layer_ids",
        )
    return tuple(sorted(named))  # As vLLM sorts them.
