"""Worker half of push: that of pull, which also reports computed layers if it is asked to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from baton.connectors.extra_config import FIELD
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.reads.links import RunInBackground
from baton.connectors.pull.worker import FindPacking, PullWorkerHalf
from baton.connectors.push.layer_reports import LayerReporter
from baton.connectors.push.metadata import PushMetadata
from baton.contract import KVConnectorMetadata
from baton.core.errors import ConfigError
from baton.core.ids import Address, Epoch
from baton.transport.base import Transport

if TYPE_CHECKING:
    import torch


class PushWorkerHalf(PullWorkerHalf):
    """Worker half of BatonPushConnector. `reporter` makes what reports layers; the rest is as in pull."""

    def __init__(
        self,
        identity: EngineIdentity,
        *,
        epoch: Epoch | None = None,
        transports: Callable[[Address], Mapping[str, Transport]] | None = None,
        run_in_background: RunInBackground | None = None,
        clock: Callable[[], float] = time.monotonic,
        find_packing: FindPacking | None = None,
        empty_step_wait_s: float = 0.0,
        reporter: Callable[[int], LayerReporter] = LayerReporter,
    ) -> None:
        super().__init__(
            identity,
            epoch=epoch,
            transports=transports,
            run_in_background=run_in_background,
            clock=clock,
            find_packing=find_packing,
            empty_step_wait_s=empty_step_wait_s,
        )
        self._layer_index: dict[str, int] = {}
        self._reporter = reporter(identity.tp_rank)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        settings = self._identity.settings
        if self._identity.has_host_mirror and getattr(settings, "stream", "off") == "layer":
            raise ConfigError(
                "layer cannot go with kv_buffer_device cpu: what a step computes is there at its end",
                field=f"{FIELD}.stream",
            )
        super().register_kv_caches(kv_caches)
        self._layer_index = {name: index for index, name in enumerate(kv_caches)}

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        reports = None
        if isinstance(connector_metadata, PushMetadata):
            reports = connector_metadata.layer_reports
        self._reporter.begin(reports)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._reporter.layer_computed(self._layer_index[layer_name], kv_layer)

    def clear_connector_metadata(self) -> None:
        self._reporter.begin(None)
        super().clear_connector_metadata()

    def shutdown(self) -> None:
        self._reporter.close(self._identity.settings.shutdown_timeout_s)
        super().shutdown()
