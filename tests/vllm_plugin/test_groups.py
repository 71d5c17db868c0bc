"""vLLM's KV-cache groups in our types, with fakes of vLLM's classes. tests/vllm uses the real ones."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.core.errors import ConfigError
from baton.core.kv_groups import KVCacheGroup
from baton.engine.request import RequestStatus
from baton.hosts.vllm.groups import cache_specs_of, groups_of, in_order, keep_one_token_more
from tests.connectors.pull_world import FakeRequest
from tests.vllm_plugin.test_connector import PARALLEL, roles
from tests.vllm_plugin.test_start import FullAttentionSpec, groups, vllm_config

BLOCK = 128
WHOLE = KVCacheGroup(())


class MLAAttentionSpec(FullAttentionSpec): ...


class RSWASpec(FullAttentionSpec): ...


class ChunkedLocalAttentionSpec: ...


@dataclass(frozen=True)
class MambaSpec:
    shapes: tuple[tuple[int, ...], ...] = ((6, 3), (2, 4, 5))
    dtypes: tuple[Any, ...] = (torch.bfloat16, torch.float32)
    mamba_cache_mode: str = "none"
    block_size: int = 4096
    page_size_bytes: int = 1 << 20

    @property
    def state_content_size_bytes(self) -> int:
        return 36 + 160


@dataclass(frozen=True)
class SlidingWindowSpec:
    sliding_window: int
    extra_retained_tokens: int = 0
    block_size: int = BLOCK
    page_size_bytes: int = 1 << 20


class SlidingWindowMLASpec(SlidingWindowSpec): ...


def of_layers(**specs: Any) -> Any:
    return SimpleNamespace(kv_cache_specs=specs)


def test_windows_are_read_in_vllms_order() -> None:
    config = groups(SlidingWindowSpec(300), SlidingWindowSpec(300), MLAAttentionSpec(), FullAttentionSpec())
    assert groups_of(config, BLOCK) == (
        KVCacheGroup((0,), 300),
        KVCacheGroup((1,), 300),
        KVCacheGroup((2,)),
        KVCacheGroup((3,)),
    )
    config = groups(of_layers(a=SlidingWindowSpec(300), b=SlidingWindowSpec(300)))
    assert groups_of(config, BLOCK) == (KVCacheGroup((), 300),)
    assert groups_of(groups(of_layers(a=FullAttentionSpec())), BLOCK) == (WHOLE,)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (ChunkedLocalAttentionSpec(), "neither the prompt nor a window"),
        (RSWASpec(), "neither the prompt nor a window"),
        (SlidingWindowMLASpec(300), "neither the prompt nor a window"),
        (of_layers(a=FullAttentionSpec(), b=MambaSpec()), "different windows"),
        (of_layers(a=SlidingWindowSpec(300), b=SlidingWindowSpec(200)), "different windows"),
        (SlidingWindowSpec(300, block_size=64), r"blocks of \[64\] tokens; .* = 128"),
    ],
)
def test_layers_without_a_cache_of_tokens_are_refused_with_advice(spec: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"{reason}.*--disable-hybrid-kv-cache-manager"):
        groups_of(groups(FullAttentionSpec(), spec), BLOCK)


@pytest.mark.usefixtures("plugin")
def test_latents_index_keys_and_scales_are_told_apart_by_the_spec() -> None:
    index, scaled, compressed = MLAAttentionSpec(), FullAttentionSpec(), MLAAttentionSpec()
    vars(index)["cache_role"] = SimpleNamespace(value="indexer")
    vars(scaled)["kv_quant_mode"] = SimpleNamespace(name="INT8_PER_TOKEN_HEAD")
    config = groups(FullAttentionSpec(), MLAAttentionSpec(), index, scaled, MambaSpec())
    found = [(spec.kind, spec.num_heads, spec.scales) for spec in cache_specs_of(config, 4).values()]
    assert found == [
        ("keys_and_values", 4, "none"),
        ("latent", 1, "none"),
        ("index_keys", 1, "inline"),
        ("keys_and_values", 4, "inline"),
    ]
    vars(compressed)["tokens_per_state"] = 4
    with pytest.raises(ConfigError, match=r"cache 4 tokens in one slot \(MLAAttentionSpec\)"):
        cache_specs_of(groups(compressed), 1)


@pytest.mark.parametrize("mark", [{"enable_kv_transfer": False}, {"host_resident": True}])
def test_groups_without_transfer_are_refused(mark: dict[str, bool]) -> None:
    config = groups(FullAttentionSpec(), MLAAttentionSpec())
    vars(config.kv_cache_groups[1]).update(mark)
    with pytest.raises(ConfigError, match="must not be transferred"):
        groups_of(config, BLOCK)


def test_a_model_that_caches_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="no layer with a KV cache"):
        groups_of(groups(), BLOCK)


def test_layers_are_ordered_as_the_model_computes_them() -> None:
    config = groups(SlidingWindowSpec(300), FullAttentionSpec())
    config.kv_cache_groups[0].layer_names = ["layers.10.attn", "layers.1.attn"]
    config.kv_cache_groups[1].layer_names = ["layers.2.attn", "layers.11.attn"]
    assert [group.layers for group in groups_of(config, BLOCK)] == [(0, 2), (1, 3)]
    caches = {f"layers.{layer}.attn": layer for layer in (10, 1, 11, 2)}
    assert [*in_order(caches, config).values()] == [1, 2, 10, 11]
    for different in (caches | {"layers.12.attn": 12}, {"layers.1.attn": 1}):
        with pytest.raises(ConfigError, match="or in vLLM's KV-cache groups"):
            in_order(different, config)
    shared = {"b": 1, "a": 1, "shares the cache of a": 1}
    assert [*in_order(shared, groups(FullAttentionSpec()))] == [*shared], "one group has every cache"


def test_a_window_keeps_one_more_token_for_the_last_token_of_a_prompt() -> None:
    config = groups(SlidingWindowSpec(300), FullAttentionSpec(), SlidingWindowSpec(300, 4))
    whole = config.kv_cache_groups[1].kv_cache_spec
    for _ in range(2):  # Two connectors may both ask for it.
        keep_one_token_more(config)
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        assert specs == [SlidingWindowSpec(300, 1), whole, SlidingWindowSpec(300, 4)]


def test_a_vllm_without_the_option_is_refused() -> None:
    older = type("SlidingWindowSpec", (), {"sliding_window": 300})()
    with pytest.raises(ConfigError, match="has no extra_retained_tokens"):
        keep_one_token_more(groups(older))


# --- The connectors ----------------------------------------------------------------------------------

HYBRID = [["l0", "l3"], ["l1", "l4"], ["l2", "l5"]]


def hybrid() -> Any:
    """Groups that vLLM makes of a small Gemma 3's layers: the third and the sixth have full attention."""
    config = groups(SlidingWindowSpec(300), SlidingWindowSpec(300), FullAttentionSpec())
    for group, names in zip(config.kv_cache_groups, HYBRID, strict=True):
        group.layer_names = names
    return config


def test_only_the_scheduler_keeps_one_more_token(plugin: Any, folder: Path) -> None:
    for role, kept in (("WORKER", 0), ("SCHEDULER", 1)):
        config = hybrid()
        connector = plugin.BatonPullConnector(vllm_config(folder, parallel=PARALLEL), roles()[role], config)
        assert config.kv_cache_groups[0].kv_cache_spec.extra_retained_tokens == kept
        connector.shutdown()


class Pool:
    """vLLM's request, as far as a loan needs it."""

    num_gpu_blocks = 16

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_id=i, ref_cnt=1) for i in range(16)]

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Any) -> None: ...
    def get_num_free_blocks(self) -> int:
        return 0


def test_layers_are_grouped_and_no_null_block_is_lent(
    plugin: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three layers, one of each group, share each place in memory."""
    kind, config = plugin.BatonPushConnector, vllm_config(folder, parallel=PARALLEL)
    monkeypatch.setattr("baton.hosts.vllm.view.find_packing", lambda config, caches: "slot")
    worker = kind(config, roles().WORKER, hybrid())
    places = torch.zeros(2, 16, 2, BLOCK, 16)
    worker.register_kv_caches({name: places[place] for names in HYBRID for place, name in enumerate(names)})
    handshake = worker.get_handshake_metadata()
    assert {layer.name: layer.group for layer in handshake.card.layout.layers} == {
        name: index for index, names in enumerate(HYBRID) for name in names
    }
    scheduler, pool = kind(config, roles().SCHEDULER, hybrid()), Pool()
    scheduler.bind_kv_cache_manager(SimpleNamespace(block_pool=pool))
    scheduler.set_xfer_handshake_metadata({0: handshake})
    assert scheduler.get_loaded_kv_cache_group_ids(None) == (0, 1, 2)
    request = FakeRequest("r", list(range(700)), {"do_remote_decode": True}, num_computed_tokens=700)
    scheduler.on_new_request(request)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    # 700 tokens are six blocks; a window of 300 needs the blocks from token 400 on, in the fourth.
    tables = ([0, 0, 0, 4, 5, 6], [0, 0, 0, 7, 8, 9], [10, 11, 12, 13, 14, 15])
    delay_free, params = scheduler.request_finished_all_groups(request, tables)
    assert not delay_free
    assert params["remote_block_ids"] == [[4, 5, 6], [7, 8, 9], [10, 11, 12, 13, 14, 15]]
    assert [block.ref_cnt for block in pool.blocks] == [1, 1, 1, 1, *[2] * 12]
    # The window has moved on: nothing is lent.
    assert scheduler.request_finished_all_groups(request, ([0] * 4 + [5, 6], *tables[1:])) == (False, None)
    for connector in (scheduler, worker):
        connector.shutdown()


def test_a_failed_load_of_several_tables_is_reported_as_the_requests(plugin: Any, folder: Path) -> None:
    """vLLM ends if bad blocks are reported and there are several groups."""
    from baton.connectors.pull.metadata import FailedLoad, PullMetadata

    for config, failed, invalid in ((hybrid(), {"r"}, set()), (groups(FullAttentionSpec()), set(), {3, 4})):
        worker = plugin.BatonPullConnector(vllm_config(folder, parallel=PARALLEL), roles().WORKER, config)
        worker.worker_half._links = object()
        worker.bind_connector_metadata(PullMetadata((FailedLoad("r", (3, 4)),)))
        results = worker.get_transfer_results(set())
        assert (results.finished_recving, results.failed_recving) == ({"r"}, failed)
        assert worker.get_block_ids_with_load_errors() == invalid
        worker.worker_half._links = None
        worker.shutdown()


def test_rows_of_offload_hold_a_block_of_each_group(plugin: Any, folder: Path) -> None:
    config = hybrid()
    for group in config.kv_cache_groups:
        group.kv_cache_spec = group.kv_cache_spec if group.layer_names[0] != "l2" else Whole()
    parallel = PARALLEL | {"world_size": 1}
    vllm = vllm_config(folder, {"cpu_gib": 0.25}, parallel=parallel)
    connector = plugin.BatonOffloadConnector(vllm, roles().SCHEDULER, config)
    assert connector.scheduler_half._index.num_slots == 256 // (2 * 3)
    config.kv_cache_groups[0].kv_cache_spec = SlidingWindowSpec(300, page_size_bytes=1 << 19)
    with pytest.raises(ConfigError, match="offload supports one"):
        plugin.BatonOffloadConnector(vllm, roles().SCHEDULER, config)


class Whole(FullAttentionSpec):
    page_size_bytes = 1 << 20
