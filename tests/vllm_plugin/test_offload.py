"""Offload in vLLM: what it reads from vLLM's configuration, and that no request waits for ever."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.connectors.storage.memory.metadata import LoadBlocks, OffloadMetadata, OffloadReport
from baton.core.errors import ConfigError
from tests.connectors.pull_world import FakeBlocks, FakeRequest
from tests.vllm_plugin.test_connector import PARALLEL, roles
from tests.vllm_plugin.test_groups import MambaSpec
from tests.vllm_plugin.test_start import FullAttentionSpec, vllm_config

MIB = 1 << 20
SPEC = FullAttentionSpec()
SPEC.page_size_bytes = MIB  # type: ignore[attr-defined]
CACHE = SimpleNamespace(
    kv_cache_groups=[SimpleNamespace(kv_cache_spec=SPEC, layer_names=["a", "b"])], num_blocks=8
)


def make(
    plugin: Any, folder: Path, role: str = "SCHEDULER", extra: dict[str, Any] | None = None, **changes: Any
) -> Any:
    parallel = PARALLEL | changes.pop("parallel", {})
    config = vllm_config(folder, extra or {"cpu_gib": 0.25}, parallel=parallel, **changes)
    config.kv_transfer_config.is_kv_consumer = True
    return plugin.BatonOffloadConnector(config, roles()[role], changes.get("cache", CACHE))


def test_blocks_are_counted_from_what_vllm_allocates(plugin: Any, folder: Path) -> None:
    half = make(plugin, folder).scheduler_half
    assert half._index.num_slots == 256 // 2
    shared = make(plugin, folder, parallel={"tensor_parallel_size": 4}).scheduler_half
    assert shared._index.num_slots == 256 // 2 // 4
    layers = {"a": SPEC, "b": SPEC, "c": SPEC}
    unlike = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=[*"abc"])]
    )
    unlike.kv_cache_groups[0].kv_cache_spec.kv_cache_specs = layers
    assert make(plugin, folder, cache=unlike).scheduler_half._index.num_slots == 256 // 3


def test_states_take_their_own_bytes_where_no_attention_shares_their_page(plugin: Any, folder: Path) -> None:
    """Three layers with a state, one of which shares its memory with attention; the pages have one size."""
    spec = MambaSpec(mamba_cache_mode="align", block_size=128)
    config = SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=SPEC, layer_names=["l3"]),
            SimpleNamespace(kv_cache_spec=spec, layer_names=["l0", "l1", "l2"]),
        ]
    )
    from baton.hosts.vllm.view import _block_bytes

    assert _block_bytes(config) == MIB + 2 * spec.state_content_size_bytes
    with pytest.raises(ConfigError, match=r"mamba_cache_mode: is 'none'"):
        make(
            plugin,
            folder,
            cache=SimpleNamespace(
                kv_cache_groups=[SimpleNamespace(kv_cache_spec=MambaSpec(), layer_names=["l0"])]
            ),
        )


def test_unsupported_configurations_are_refused_at_start(plugin: Any, folder: Path) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size"):
        make(plugin, folder, parallel={"pipeline_parallel_size": 2})
    with pytest.raises(ConfigError, match=r"cpu_gib: is required"):
        make(plugin, folder, extra={"eviction": "lru"})
    with pytest.raises(ConfigError, match=r"stream: is not known"):
        make(plugin, folder, extra={"cpu_gib": 1, "stream": "layer"})
    with pytest.raises(ConfigError, match=r"lend: works in Baton's own engine"):
        make(plugin, folder, extra={"cpu_gib": 1, "lend": {}})
    make(plugin, folder, extra={"cpu_gib": 1, "allow_untested_vllm": True})


def test_objects_sent_between_processes_have_vllms_base_classes(plugin: Any, folder: Path) -> None:
    import vllm.distributed.kv_transfer.kv_connector.v1.base as base

    connector = make(plugin, folder)
    assert issubclass(OffloadMetadata, base.KVConnectorMetadata)
    assert issubclass(OffloadReport, base.KVConnectorWorkerMetadata)
    assert not connector.requires_kv_delivery
    [(source, count)] = connector.get_external_cache_hit_sources(None, 7).items()
    assert (source.value, count) == ("host", 7)
    assert connector.get_kv_connector_stats() is None


def test_a_load_that_cannot_start_is_reported_as_failed(plugin: Any, folder: Path) -> None:
    connector = make(plugin, folder)
    request = FakeRequest("r", list(range(300)), None)
    # vLLM expects a hit that is not there.
    connector.update_state_after_alloc(request, FakeBlocks([4, 5]), 128)
    empty = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    metadata = connector.build_connector_meta(
        SimpleNamespace(
            preempted_req_ids=None,
            kv_connector_block_state=None,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=empty,
            num_scheduled_tokens={},
        )
    )
    assert metadata.loads == (LoadBlocks(1, "r", (4,), ()),)
    connector.shutdown()
