"""Configuration of an engine, and the state that its restarts keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from baton.connectors.storage.memory.settings import OffloadSettings
from baton.core.config import (
    CacheConfig,
    ClusterSecret,
    EngineConfig,
    KVTransferConfig,
    LoadFailurePolicy,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from baton.core.ids import EngineId
from baton.core.kv_groups import KVCacheGroup, is_hybrid
from baton.core.states import StatePart
from baton.core.timers import Timers
from baton.testing.host.config import model_config
from baton.testing.host.model import CONTENT, STATE, Windows

if TYPE_CHECKING:
    from lab.sim.host.cluster import Cluster

MAX_MODEL_LEN = 96
SECRET = ClusterSecret(b"the cluster's own secret, known to no other cluster")
TURNS = {"ttl_s": 6.0, "min_tokens": 4, "pool_share_max": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """A host, as restarts of its engine find it."""

    name: str
    url: str
    is_producer: bool
    is_consumer: bool
    num_ranks: int
    block_tokens: int
    num_blocks: int
    num_tokens_max: int  # Budget of a step.
    num_seqs_max: int
    chunk_max: int
    policy: LoadFailurePolicy
    order: str
    step_mean_s: float
    rate: float
    skew_s: float
    is_block_major: bool
    is_slow: bool
    caches_prefixes: bool
    stream: str  # Streams in push: "off", "chunk", "layer".
    keeps_turns: bool
    timers: Timers
    offload: OffloadSettings | None = None  # Otherwise a Multi has both connectors,
    is_offload_first: bool = False  # in this order.
    num_slots: int = 0  # Slots of host memory.
    knows_groups: bool = True  # Else all layers share one table, and windows are masks.
    deals_layers_out: bool = False  # 0 3 | 1 4 where others have 0 1 | 3 4, as vLLM does.


def engine_config(spec: HostSpec, cluster: Cluster, engine_id: EngineId) -> EngineConfig:
    model = cluster.model
    if spec.is_producer and spec.is_consumer:
        role = "kv_both"
    else:
        role = "kv_producer" if spec.is_producer else "kv_consumer"
    extra: dict[str, Any] = {"transports": ["memory"], "timers": msgspec.to_builtins(spec.timers)}
    if cluster.mode == "push":
        extra["stream"] = spec.stream
    if spec.keeps_turns:
        extra["turns"] = TURNS
    kind = _DealtOut if spec.deals_layers_out else EngineConfig
    return kind(
        model_config=_model_config(
            model.num_kv_heads, model.windows, *cluster.updates.named(cluster.updates.at_boot)
        ),
        cache_config=CacheConfig(
            block_size=spec.block_tokens,
            num_gpu_blocks=spec.num_blocks,
            enable_prefix_caching=spec.caches_prefixes,
            hybrid_kv_cache="auto" if spec.knows_groups else "off",
        ),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=spec.num_tokens_max,
            max_num_seqs=spec.num_seqs_max,
            long_prefill_token_threshold=spec.chunk_max,
            policy=spec.order,  # type: ignore[arg-type]
        ),
        parallel_config=ParallelConfig(
            tensor_parallel_size=spec.num_ranks,
            executor="multiprocess" if spec.num_ranks > 1 else "inprocess",
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector=f"Baton{cluster.mode.title()}Connector",
            kv_role=role,  # type: ignore[arg-type]
            engine_id=engine_id,
            kv_connector_extra_config=extra,
            kv_load_failure_policy=spec.policy,
        ),
        cluster_secret=SECRET,
    )


class _DealtOut(EngineConfig, frozen=True, kw_only=True):
    """Layers of one kind dealt out to its groups in turn."""

    @property
    def kv_cache_groups(self) -> tuple[KVCacheGroup, ...]:
        groups = super().kv_cache_groups
        if not is_hybrid(groups):
            return groups
        dealt: list[KVCacheGroup] = []
        for kind in dict.fromkeys((group.window, group.is_state) for group in groups):
            alike = [group for group in groups if (group.window, group.is_state) == kind]
            layers = sorted(layer for group in alike for layer in group.layers)
            dealt += [KVCacheGroup(tuple(layers[i :: len(alike)]), *kind) for i in range(len(alike))]
        return tuple(dealt[::-1])


def state_parts(num_kv_heads: int) -> tuple[StatePart, ...]:
    """A layer's state: the words of one token."""
    return (StatePart("words", num_kv_heads, (CONTENT,), "float32"),)


def _model_config(num_kv_heads: int, windows: Windows, digest: str, version: str) -> ModelConfig:
    return model_config(
        max_model_len=MAX_MODEL_LEN,
        num_hidden_layers=len(windows),
        windows=tuple(None if window == STATE else window for window in windows),
        state_parts=state_parts(num_kv_heads),
        state_layers=tuple(layer for layer, window in enumerate(windows) if window == STATE),
        num_kv_heads=num_kv_heads,
        weights_digest=digest,
        weights_version=version,
    )
