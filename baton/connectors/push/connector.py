"""BatonPushConnector: the consumer reads the prompt's KV while the producer still computes it.

The router sends both legs at once. D finds P by P's signed introduction, asks for the transfer, and reads
what P announces. When the prefill ends, P lends the blocks as in pull, and D reads the tail. It also does all
that BatonPullConnector does, so one pair of engines serves both kinds of routers.
"""

from __future__ import annotations

from typing import Any

from baton.connectors.pull.connector import BatonPullConnector
from baton.connectors.pull.identity import EngineIdentity
from baton.connectors.pull.scheduler import PullSchedulerHalf
from baton.connectors.push.announcer import PrefillAnnouncer
from baton.connectors.push.settings import PushSettings
from baton.connectors.push.worker import PushWorkerHalf
from baton.contract import KVConnectorSchedulerHalf, KVConnectorWorkerHalf, host
from baton.core.config import EngineConfig


class BatonPushConnector(BatonPullConnector):
    @classmethod
    def identity_of(cls, vllm_config: host.HostConfig) -> EngineIdentity:
        assert isinstance(vllm_config, EngineConfig), f"no way to read a {type(vllm_config).__name__}"
        return EngineIdentity.of_engine(vllm_config, PushSettings, does_push=True)

    @classmethod
    def make_scheduler_half(
        cls, vllm_config: host.HostConfig, kv_cache_config: Any
    ) -> KVConnectorSchedulerHalf:
        return PullSchedulerHalf(cls.identity_of(vllm_config), announcer=PrefillAnnouncer)

    @classmethod
    def make_worker_half(cls, vllm_config: host.HostConfig, kv_cache_config: Any) -> KVConnectorWorkerHalf:
        return PushWorkerHalf(cls.identity_of(vllm_config))

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return extra_config.get("stream") == "layer"  # Layers are reported from Python.
