"""Blocks that hold all layers: moved as one run, and compatible with engines that have separate layers.

`test_topologies` shows that every number arrives at its place for any two layouts, `test_recorded_steps` that
recorded steps find it there, `test_push_of_groups` that pushed ones do.
"""

import dataclasses
from typing import Any

import pytest
import torch

from baton.connectors.pull import EngineIdentity, PullWorkerHalf
from baton.connectors.pull.metadata import ReadBlocks
from baton.contract import KVConnectorBase_V1, KVConnectorRole, NullWorkerHalf, TwoHalves
from baton.core.config import (
    ModelConfig,
)
from baton.core.errors import ConfigError
from baton.core.ids import Address
from baton.engine.attention.kv_memory import KVCacheLayout, allocate_kv_cache, cross_layer_cache
from baton.engine.models import SingleRank
from baton.engine.runner.cache_setup import allocate_for, register
from baton.testing.host.config import model_config
from baton.transport.base.interface import Transport
from baton.transport.memory import MemoryNetwork, MemoryTransport
from tests.connectors.pull_world import engine_config
from tests.connectors.topology_world import Engine, Memory, Reader, Shape

# --- Reads - ----------------------------------------------------------------------------------------


def descriptors(theirs: Shape, ours: Shape) -> int:
    """Number of copies in a read of four blocks that are not adjacent."""
    network = Memory()
    p, d = Engine("p", theirs, network), Reader("d", ours, network)
    d.meet(p)
    d.order(ReadBlocks(1, p.address, d.pairs(p), 0, 16, (1, 3, 5, 7), (2, 4, 6, 8)))
    ends = d.take_ended()
    assert all(end.ok for end in ends), ends
    p.close()
    d.close()
    return sum(end.num_descriptors for end in ends)


def test_a_block_of_all_layers_is_one_run_if_both_sides_have_it() -> None:
    apart = Shape()
    together = dataclasses.replace(apart, has_cross_layer_blocks=True)
    assert descriptors(together, together) == 4
    for theirs, ours in ((apart, apart), (together, apart), (apart, together)):
        assert descriptors(theirs, ours) == 4 * apart.num_layers
    # Half of our heads from each of two ranks: one run per layer again.
    assert descriptors(dataclasses.replace(together, tp=2), together) == 2 * 4 * apart.num_layers


# --- Registration - ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC"])
def test_layers_are_views_of_one_contiguous_tensor(layout: KVCacheLayout) -> None:
    config = engine_config("e")
    model, cache = config.model_config, config.cache_config
    caches = allocate_kv_cache(model, cache, 0, 1, "cpu", layout=layout)
    whole = cross_layer_cache(caches)
    assert whole.shape[:2] == (cache.num_gpu_blocks, model.num_hidden_layers)
    assert (whole if layout == "BLHNC" else whole.transpose(2, 3)).is_contiguous()
    assert whole.untyped_storage().nbytes() == whole.numel() * whole.element_size()
    for index, layer in enumerate(caches.values()):
        layer.fill_(index + 1)
        assert (whole[:, index] == index + 1).all()


class Wishing(TwoHalves):
    """Registers any cache, in any layout that it requires."""

    layout: str | None = None
    prefers = False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return cls.layout

    @classmethod
    def make_scheduler_half(cls, vllm_config: Any, kv_cache_config: Any) -> Any:
        raise AssertionError("not called")

    @classmethod
    def make_worker_half(cls, vllm_config: Any, kv_cache_config: Any) -> "WishingHalf":
        return WishingHalf(cls.prefers)


class WishingHalf(NullWorkerHalf):
    def __init__(self, prefers: bool) -> None:
        self.prefer_cross_layer_blocks = prefers
        self.layers: dict[str, torch.Tensor] | None = None
        self.whole: tuple[torch.Tensor, Any] | None = None
        self.copy_operation: Any = None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.layers = kv_caches

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        self.whole = kv_cache, attn_backend

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        self.copy_operation = copy_operation


def given(layout: str | None, *, prefers: bool = False, model: ModelConfig | None = None) -> WishingHalf:
    config = engine_config("e", connector="Wishing", model=model)
    kind = type("Wishing", (Wishing,), {"layout": layout, "prefers": prefers})
    connector: KVConnectorBase_V1 = kind(config, KVConnectorRole.WORKER, None)
    caches = allocate_for(connector, config, SingleRank(), torch.device("cpu"), num_scratch_blocks=1)
    register(connector, caches, config.cache_config.num_gpu_blocks)
    half = connector.worker_half  # type: ignore[attr-defined]
    assert isinstance(half, WishingHalf)
    return half


@pytest.mark.parametrize("layout", [None, "HND", "NHD", "LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_the_connector_gets_a_supported_layout(layout: str | None) -> None:
    """The shape is the same, as in vLLM; the strides show the layout."""
    half = given(layout)
    assert half.whole is None
    assert half.layers is not None
    config = engine_config("e")
    model, cache_config = config.model_config, config.cache_config
    shape = (model.num_kv_heads, cache_config.block_size, 2 * model.head_dim)
    for cache in half.layers.values():
        assert cache.shape == (cache_config.num_gpu_blocks, *shape), (
            "the scratch block must not be registered"
        )
        in_memory = cache.transpose(1, 2) if layout in ("NHD", "LBNHC", "BLNHC") else cache
        assert in_memory[0].is_contiguous()
        assert in_memory.is_contiguous() is (layout not in ("BLHNC", "BLNHC"))


@pytest.mark.parametrize("layout", [None, "HND", "NHD", "BLHNC", "BLNHC"])
def test_a_half_that_prefers_cross_layer_blocks_gets_one_tensor_and_the_names_of_its_layers(
    layout: str | None,
) -> None:
    half = given(layout, prefers=True)
    assert half.layers is None
    assert half.whole is not None
    whole, backend = half.whole
    assert (whole.transpose(2, 3) if layout in ("NHD", "BLNHC") else whole).is_contiguous()
    assert whole.shape[:2] == (engine_config("e").cache_config.num_gpu_blocks, len(backend.layer_names))
    assert backend.layer_names[0] == "model.layers.0.self_attn.attn"


def test_layers_of_several_groups_are_registered_separately() -> None:
    """Two groups of two layers share the memory of two layers."""
    windows = (8, None, 8, None)
    half = given(None, prefers=True, model=model_config(num_hidden_layers=4, windows=windows))
    assert half.whole is None
    assert half.layers is not None
    first, second, third, fourth = half.layers.values()
    assert (first.data_ptr(), third.data_ptr()) == (second.data_ptr(), fourth.data_ptr())
    assert third.data_ptr() - first.data_ptr() == first[0].nbytes, "one after the other in a block"
    assert first.stride(0) == 2 * first[0].numel()


@pytest.mark.parametrize(
    ("layout", "prefers", "mend"),
    [
        ("LHBNC", False, "this engine has HND .*NHD .*another connector, or run this one in vLLM"),
        ("nhd", False, "this engine has HND .*NHD "),
        ("LBNHC", True, "must require BLNHC"),
        ("LBHNC", True, "must require BLHNC"),
    ],
)
def test_an_unsupported_layout_is_refused_with_a_remedy(layout: str, prefers: bool, mend: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"Wishing requires the KV cache layout '?{layout}'?.*{mend}"
    ) as at:
        given(layout, prefers=prefers)
    assert at.value.field == "kv_transfer_config.kv_connector"


def test_the_pull_connector_describes_both_kinds_to_its_peers() -> None:
    def network(address: Address) -> dict[str, Transport]:
        return {"memory": MemoryTransport(address, MemoryNetwork())}

    for is_together in (False, True):
        config = engine_config("e", extra={"cross_layer_blocks": is_together})
        half = PullWorkerHalf(EngineIdentity.of_engine(config), transports=network)
        caches = allocate_for(half, config, SingleRank(), torch.device("cpu"))
        register(half, caches, config.cache_config.num_gpu_blocks)
        handshake: Any = half.get_handshake_metadata()
        layout = handshake.card.layout
        (region,) = layout.regions
        for layer, cache in zip(layout.layers, caches.values(), strict=True):
            in_block = layer.offset + 3 * layer.block_stride + 1 * layer.head_stride
            assert region.address + in_block == cache[3, 1].data_ptr()
            assert (layer.token_stride, layer.head_bytes) == (0, cache[3, 1].nbytes)
        half.shutdown()
