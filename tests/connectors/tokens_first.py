"""Connectors that require an order of tokens and heads in a block. Found by module path."""

from typing import Any

from baton.contract import KVConnectorSchedulerHalf, KVConnectorWorkerHalf, NullSchedulerHalf, NullWorkerHalf
from baton.contract.halves import TwoHalvesOfGroups
from tests.connectors.faulty_store import FaultyStore


class TokensFirstStore(FaultyStore):
    """Loads and saves through the registered tensors."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "NHD"


class TokensFirst(TwoHalvesOfGroups):
    """Moves nothing."""

    layout = "NHD"

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return cls.layout

    @classmethod
    def make_scheduler_half(cls, vllm_config: Any, kv_cache_config: Any) -> KVConnectorSchedulerHalf:
        return NullSchedulerHalf()

    @classmethod
    def make_worker_half(cls, vllm_config: Any, kv_cache_config: Any) -> KVConnectorWorkerHalf:
        return NullWorkerHalf()


class HeadsFirst(TokensFirst):
    layout = "HND"
