"""Choice of the graph mode and of the batch sizes that are recorded."""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING

from baton.contract.base import KVConnectorBase_V1, KVConnectorWorkerHalf
from baton.contract.null import NullWorkerHalf

if TYPE_CHECKING:
    from baton.core.config import EngineConfig

logger = logging.getLogger(__name__)


class GraphMode(enum.Enum):
    """How decode steps are recorded: not at all, in pieces between attention layers, or as a whole."""

    OFF = "off"
    PIECEWISE = "piecewise"
    FULL = "full"


def choose_mode(config: EngineConfig, half: KVConnectorWorkerHalf) -> GraphMode:
    """The configured mode, as far as the connector allows it."""
    asked = config.device_config.graph_mode
    if half.hidden_states_wanted:
        return GraphMode.OFF  # They are passed on between layers, in Python.
    if asked == "auto":
        # On a CPU graphs gain nothing.
        asked = "full" if config.device_config.device == "cuda" else "off"
    if asked != "full":
        return GraphMode(asked)
    if not half.graph_capturable and needs_layer_hooks(config, half):
        if config.device_config.graph_mode == "full":
            logger.warning("%s needs its layer hooks: graphs are piecewise", type(half).__name__)
        return GraphMode.PIECEWISE
    return GraphMode.FULL


def needs_layer_hooks(config: EngineConfig, half: KVConnectorWorkerHalf) -> bool:
    """Whether decode steps need the layer hooks.

    The connector's class decides, as in vLLM; without one: True.
    """
    if isinstance(half, NullWorkerHalf):
        return False
    if isinstance(half, KVConnectorBase_V1) and config.kv_transfer_config is not None:
        extra = config.kv_transfer_config.kv_connector_extra_config
        return type(half).requires_piecewise_for_cudagraph(extra)
    return True


def bucket_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Recorded batch sizes, ascending: as configured, or powers of two up to the most concurrent requests."""
    most = config.scheduler_config.max_num_seqs
    sizes = config.device_config.graph_buckets
    if not sizes:
        sizes = (*(1 << power for power in range((most - 1).bit_length())), most)
    return tuple(sorted({min(size, most) for size in sizes}))
