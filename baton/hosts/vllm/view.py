"""`HostView` of a vLLM engine. The only module that reads vLLM's configuration for the halves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from baton.connectors.host_view import HostPolicy, V, bytes_of_places
from baton.core.errors import ConfigError
from baton.core.identity import CurrentIdentity
from baton.core.ids import EngineId
from baton.hosts.vllm.drafts import draft_layers
from baton.hosts.vllm.groups import (
    FIELD,
    WAY_OUT,
    cache_specs_of,
    groups_of,
    is_state,
    refuse_overwritten_states,
    specs_of,
    tables_by_position,
)
from baton.hosts.vllm.host_policy import vllm_policy
from baton.hosts.vllm.identity import draft_digest, find_kv_identity
from baton.hosts.vllm.packing import find_packing
from baton.hosts.vllm.requests import names_of
from baton.hosts.vllm.settings import PluginSettings
from baton.hosts.vllm.states import parts_of
from baton.hosts.vllm.traces import open_traces

_CONTEXT = ("prefill_context_parallel_size", "decode_context_parallel_size")


def view_of(
    kind: type[V],
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    is_worker: bool,
    environment: Mapping[str, str] = os.environ,
) -> V:
    """What a connector's halves see of vLLM. Raises ConfigError for a configuration that cannot work."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    _refuse_unsupported(kind, vllm_config, kv_cache_config)
    plugin, extra = PluginSettings.split(transfer.kv_connector_extra_config)
    shares_kv = kind.shares_kv(extra)
    secret = plugin.find_secret(environment) if shares_kv else None
    settings = kind.parse(_with_port_of_rank(extra, parallel), secret)
    tp_size, pp_size = int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)
    rank, block_tokens = int(parallel.rank) if is_worker else 0, int(vllm_config.cache_config.block_size)
    events = getattr(vllm_config, "kv_events_config", None)
    publishes_events = events is not None and bool(events.enable_kv_cache_events)
    # A worker has no peers, and one digest of the weights per engine is enough.
    is_named = shares_kv and not is_worker
    current = CurrentIdentity(find_kv_identity(vllm_config, plugin.revision, is_named=is_named))
    return kind(
        settings=settings,
        engine_id=EngineId(transfer.engine_id),
        current=current,
        tp_size=tp_size,
        tp_rank=rank % tp_size,
        pp_size=pp_size,
        pp_rank=rank // tp_size,
        block_tokens=block_tokens,
        block_bytes=_block_bytes(kv_cache_config) if kind.measures_blocks else 0,
        is_producer=bool(transfer.is_kv_producer),
        is_consumer=bool(transfer.is_kv_consumer),
        secret=secret,
        groups=groups_of(kv_cache_config, block_tokens),
        cache_specs=cache_specs_of(kv_cache_config, current.value.num_kv_heads) if kind.has_peers else {},
        state_parts=parts_of(vllm_config, kv_cache_config),
        state_alignment=1,  # vLLM leaves no gaps between the parts.
        draft=draft_digest(vllm_config, plugin.revision) if kind.has_peers else "",
        names=names_of(vllm_config, with_adapters=kind.has_peers and not is_worker),
        publishes_events=publishes_events,
        schedules_ahead=bool(vllm_config.scheduler_config.async_scheduling) or pp_size > 1,
        recomputes_failed_loads=transfer.kv_load_failure_policy == "recompute",
        # What a hook raises ends vLLM's engine, so `raises_user_errors` stays False.
        policy=_policy_of(kind, vllm_config, kv_cache_config, publishes_events, is_worker=is_worker),
    )


def _policy_of(
    kind: type[V], vllm_config: Any, kv_cache_config: Any, publishes_events: bool, *, is_worker: bool
) -> HostPolicy:
    block_tokens = int(vllm_config.cache_config.block_size)
    if is_worker:
        return vllm_policy(
            find_packing=partial(find_packing, vllm_config), find_drafts=partial(draft_layers, vllm_config)
        )
    if kind.has_peers:
        expand_tables = tables_by_position(kv_cache_config, block_tokens)
        return vllm_policy(expand_tables=expand_tables, traces=open_traces(vllm_config))
    if not publishes_events:
        return vllm_policy()
    from baton.hosts.vllm.block_events import names_in_vllm

    name_blocks, event_groups = names_in_vllm(kv_cache_config, block_tokens)
    return vllm_policy(name_blocks=name_blocks, event_groups=event_groups)


def _block_bytes(kv_cache_config: Any) -> int:
    """Return the bytes of one block on one rank, over all layers of its group.

    Raises ConfigError for groups whose layers have different page sizes.
    """
    groups = kv_cache_config.kv_cache_groups
    pages = {int(spec.page_size_bytes) for group in groups for spec in specs_of(group)}
    if len(groups) > 1 and len(pages) > 1:
        raise ConfigError(
            f"has KV-cache groups whose layers have pages of {sorted(pages)} bytes; offload supports one "
            f"size; {WAY_OUT}",
            field=FIELD,
        )
    return bytes_of_places(map(_layer_bytes, groups))


def _layer_bytes(group: Any) -> list[int]:
    """A block's bytes of each layer; of a page that is filled up for a state, the state's."""
    of_layers = [
        int(spec.state_content_size_bytes if is_state(spec) else spec.page_size_bytes)
        for spec in specs_of(group)
    ]
    return of_layers if hasattr(group.kv_cache_spec, "kv_cache_specs") else of_layers * len(group.layer_names)


def _with_port_of_rank(extra: Mapping[str, Any], parallel: Any) -> dict[str, Any]:
    """Data-parallel engine i has control port + i, and its ranks have the i-th range of data ports."""
    index = int(parallel.data_parallel_index)
    num_ranks = int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)
    strides = {
        "port": 1,
        "advertise_port": 1,
        "data_port": num_ranks,
        "data_advertise_port": num_ranks,
    }
    moved = {
        key: port + index * stride
        for key, stride in strides.items()
        if isinstance(port := extra.get(key, 0), int) and port
    }
    return {**extra, **moved}


def _refuse_unsupported(kind: type[V], vllm_config: Any, kv_cache_config: Any) -> None:
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    if not kind.has_peers:
        for name in ("pipeline_parallel_size", *_CONTEXT):
            if int(getattr(parallel, name, 1)) > 1:
                raise ConfigError(
                    f"above 1 gives ranks different parts of a block, which {kind.title} does not support; "
                    "set it to 1",
                    field=f"parallel_config.{name}",
                )
        refuse_overwritten_states(kv_cache_config)
        return
    for name in _CONTEXT:
        if int(getattr(parallel, name, 1)) > 1:
            raise ConfigError(
                "above 1 deals the tokens of a block out to ranks, which Baton's plans do not describe",
                field=f"parallel_config.{name}",
            )
    if getattr(transfer, "enable_permute_local_kv", False):
        raise ConfigError(
            "is not needed: Baton's plans read either order of heads and tokens",
            field="kv_transfer_config.enable_permute_local_kv",
        )
    if vllm_config.model_config is None:
        raise ConfigError("is required", field="kv_transfer_config.model_config")
