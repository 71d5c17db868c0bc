"""`BatonTier` and the CPU's worker with vLLM's own classes, without an engine."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.config.lora import LoRAConfig
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    OffloadingWorker,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from baton.core.errors import ConfigError
from baton.hosts.vllm.settings import PluginSettings
from baton.hosts.vllm.tier import BatonTier
from baton.hosts.vllm.tier.cpu_spec import CpuTieringSpec, CpuWorker
from baton.hosts.vllm.tier.identity import find_vllm_config, naming_of
from baton.hosts.vllm.tier.rows import Naming
from baton.stores.backends.files import FileStore
from baton.stores.backends.sweep import ENDED_S, chunks_of
from baton.stores.base.chunk_name import Keep
from tests.vllm.test_shared_storage import files_in

ROW = 4096
NUM_ROWS = 4
NAMING = Naming(ROW, (("0123abcd", b"k" * 32),))
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(16)]
STEP = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
WAIT_S = 30.0
# vLLM 0.33 passes another argument to a worker.
EXPEDITED = (True,) if "expedited" in signature(OffloadingWorker.submit_load).parameters else ()


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s


@pytest.fixture(autouse=True)
def _own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.hosts.vllm.tier.tier.share_log", lambda: None)


class World:
    """vLLM's manager of host memory, with our tier under it."""

    def __init__(self, name: str, folder: Path, **config: Any) -> None:
        self.region = SharedOffloadRegion(name, NUM_ROWS, None, ROW, ROW)
        primary = CPUPrimaryTierOffloadingManager(NUM_ROWS, self.region, "lru", enable_events=True)
        spec = SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=True))
        self.tier = BatonTier(
            spec,
            primary.get_kv_memoryview(),
            "BatonTier",
            naming=NAMING,
            tiers=[{"type": "files", "path": str(folder), **config}],
            enable_kv_events=True,
            sweep_every_s=0.01,
        )
        self.manager = TieringOffloadingManager(primary, [self.tier])
        self.rows = np.frombuffer(self.region.mmap_obj, np.uint8).reshape(NUM_ROWS, ROW)

    def begin(self, request_id: str, **asked: Any) -> ReqContext:
        context = ReqContext(request_id, **asked)
        self.manager.on_new_request(context)
        return context

    def store(self, context: ReqContext, *keys: Any) -> None:
        """Stores blocks as if a worker had copied them; each byte is the key's first."""
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None
        for key, row in zip(prepared.keys_to_store, prepared.store_spec.block_ids, strict=True):
            self.rows[row] = key[0]
        self.manager.complete_store(keys, context)
        self.settle()

    def settle(self) -> None:
        """Steps until no job runs."""
        deadline_s = time.monotonic() + WAIT_S
        self.manager.on_schedule_end(STEP)
        while self.manager.has_pending_work():
            assert time.monotonic() < deadline_s
            self.manager.on_schedule_end(STEP)

    def look_up(self, key: Any, context: ReqContext) -> LookupResult:
        """Steps until the answer."""
        deadline_s = time.monotonic() + WAIT_S
        while (found := self.manager.lookup(key, context)) in (LookupResult.RETRY, LookupResult.HIT_PENDING):
            assert time.monotonic() < deadline_s
            self.manager.on_schedule_end(STEP)
        return found

    def close(self) -> None:
        del self.rows
        self.manager.shutdown()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(**config: Any) -> World:
        worlds.append(World(f"baton-test-{tmp_path.name}-{len(worlds)}", tmp_path / "kv", **config))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
        assert not Path(world.region.mmap_path).exists()


def test_chunks_are_found_by_another_engine_and_loaded_in_part(
    start: Callable[..., World], tmp_path: Path
) -> None:
    first = start()
    first.store(first.begin("a"), *KEYS[1:4])
    events = [event for event in first.manager.take_events() if event.medium.value == "STORAGE"]
    assert [sorted(event.keys) for event in events] == [KEYS[1:4]]
    damaged = next(path for path in files_in(tmp_path / "kv") if KEYS[2].hex() in path.name)
    damaged.write_bytes(damaged.read_bytes()[:-1])

    second = start()
    context = second.begin("b")
    found = [second.look_up(key, context) for key in KEYS[1:5]]
    assert found == [LookupResult.HIT, LookupResult.MISS, LookupResult.HIT, LookupResult.MISS]
    spec = second.manager.prepare_load([KEYS[1], KEYS[3]], context)
    assert [set(second.rows[row]) for row in spec.block_ids] == [{1}, {3}]
    second.manager.complete_load([KEYS[1], KEYS[3]], context)
    events = second.manager.take_events()  # vLLM 0.33 removes the room of failed loads from host memory.
    (removed,) = (event for event in events if event.removed and event.medium is second.tier.medium)
    assert removed.keys == [KEYS[2]]
    values = second.tier.get_stats().reduce()
    assert values == {"vllm:kv_offload_baton_failed_loads:('corrupt',)": 1}
    second.manager.on_request_finished(context)


def test_the_cache_is_reset_while_chunks_move(start: Callable[..., World], tmp_path: Path) -> None:
    """vLLM resets after a change of the weights."""
    first = start()
    context = first.begin("a")
    prepared = first.manager.prepare_store(KEYS[1:4], context)
    assert prepared is not None
    first.manager.complete_store(KEYS[1:4], context)
    first.manager.reset_cache()
    assert not first.manager.has_pending_work()
    fresh = first.begin("b")
    assert first.look_up(KEYS[1], fresh) is LookupResult.MISS, "this engine has other weights now"
    assert first.look_up(KEYS[1], context) is LookupResult.MISS
    num_files = len(files_in(tmp_path / "kv"))
    first.store(context, KEYS[4])
    assert len(files_in(tmp_path / "kv")) == num_files, "this request may have KV of both weights"
    first.store(fresh, KEYS[5])
    assert len(files_in(tmp_path / "kv")) == num_files + 1

    second = start()
    context = second.begin("with the first weights")
    found = [second.look_up(KEYS[number], context) for number in (1, 4, 5)]
    assert found == [LookupResult.HIT, LookupResult.MISS, LookupResult.MISS]


def test_a_lookup_from_before_a_reset_is_no_answer_after_it(start: Callable[..., World]) -> None:
    world = start()
    world.store(world.begin("a"), KEYS[1])
    tier, context = world.tier, world.begin("b")
    assert tier.lookup(KEYS[1], context) is LookupResult.RETRY
    tier.on_schedule_end(STEP)
    wait_for(lambda: tier._looking[0][1].found is not None)
    tier.drain_jobs()
    assert tier.lookup(KEYS[1], context) is LookupResult.RETRY
    assert list(tier.get_finished_jobs()) == []
    assert tier.lookup(KEYS[1], context) is LookupResult.RETRY, "nothing has looked under the new names"


def test_evicted_chunks_are_announced(start: Callable[..., World]) -> None:
    world = start(max_gib=3 * ROW / (1 << 30))  # One chunk with its header.
    world.store(world.begin("a"), *KEYS[1:4])
    deadline_s = time.monotonic() + WAIT_S
    removed: set[bytes] = set()
    while len(removed) < 2:
        assert time.monotonic() < deadline_s
        removed |= {key for event in world.tier.take_events() if event.removed for key in event.keys}
    assert removed < set(KEYS[1:4])
    assert any("evicted_chunks" in name for name in world.tier.get_stats().reduce())


def test_sweeps_hear_what_requests_ask_by_params_and_by_hints(
    start: Callable[..., World], tmp_path: Path
) -> None:
    world = start(max_gib=1, tenant_max_share=0.5)
    hint = KvHintAction("1", "retain", "1", {"priority": 7, "ttl_s": 60})
    world.store(world.begin("hinted", kv_hints=KvHintsEnvelope("1", "m", [hint])), KEYS[1])
    world.store(world.begin("named", kv_transfer_params={"baton_tenant": "search"}), KEYS[2])
    world.store(world.begin("plain"), KEYS[3])
    other = start(max_gib=1)
    context = other.begin("urgent", kv_transfer_params={"baton_retention": {"priority": 9, "ttl_s": 1}})
    assert other.look_up(KEYS[3], context) is LookupResult.HIT
    wait_for(lambda: len(list((tmp_path / "kv").glob("*/*/*.keep"))) >= 3)
    chunks = chunks_of(FileStore(tmp_path / "kv"))
    keeps = {chunk.names[0].split("/")[2][:2]: chunk.keep for chunk in chunks}
    assert (keeps["01"], keeps["03"]) == (Keep(7, 60), Keep(9))
    assert keeps["02"].tenant


def test_chunks_that_only_an_ended_session_has_used_go_first(
    start: Callable[..., World], tmp_path: Path
) -> None:
    def used_s(key: bytes) -> float:
        return next(path for path in files_in(tmp_path / "kv") if key.hex() in path.name).stat().st_mtime

    world, named = start(max_gib=1), {"baton_session": "s", "baton_tenant": "search"}
    world.store(world.begin("first", kv_transfer_params=named), *KEYS[1:3])
    world.manager.primary_tier.reset_cache()
    assert world.look_up(KEYS[2], world.begin("of no session")) is LookupResult.HIT
    ends = {**named, "baton_retention": {"ends_session": True}}
    for number, params in enumerate(({**ends, "baton_tenant": "another"}, ends)):
        assert used_s(KEYS[1]) != ENDED_S
        world.manager.on_request_finished(world.begin(f"last {number}", kv_transfer_params=params))
    wait_for(lambda: used_s(KEYS[1]) == ENDED_S)
    assert used_s(KEYS[2]) != ENDED_S


def test_metrics_and_settings(tmp_path: Path) -> None:
    tier = {"type": "BatonTier", "module_path": "baton.hosts.vllm.tier"}
    names = TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": [tier]})
    assert "vllm:kv_offload_baton_not_stored" in names
    spec = SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=False))
    rows = memoryview(np.zeros((NUM_ROWS, ROW), np.int8))
    for wrong, message in (
        ({"tiers": []}, "tiers instead"),
        ({"tiers": [{"type": "disk"}]}, "disk"),
        ({"tiers": [{"type": "files", "path": str(tmp_path)}], "chunk_tokens": 16}, "block_size"),
        ({"tiers": [{"type": "files", "path": str(tmp_path)}], "n_read_threads": 4}, "not known"),
    ):
        with pytest.raises(ConfigError, match=message):
            BatonTier(spec, rows, "BatonTier", naming=NAMING, **wrong)


def offloading(**changed: Any) -> OffloadingConfig:
    parallel = OffloadingParallelConfig(
        rank=0,
        world_size=2,
        tp_size=2,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=False,
    )
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("a", "b"), group_id=0),),
        worker_kv_bytes_per_block=2048,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="e",
        model=OffloadingModelConfig(name="m", dtype="float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=parallel,
    )
    of_parallel = {key: changed.pop(key) for key in list(changed) if hasattr(parallel, key)}
    return replace(config, parallel=replace(parallel, **of_parallel), **changed)


def test_engines_share_chunks_only_if_all_is_equal_on_which_bytes_depend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plugin = PluginSettings(revision="1", insecure_no_secret=True)
    monkeypatch.delenv("BATON_SECRET", raising=False)

    def namespace(config: OffloadingConfig, row_bytes: int = ROW, of: PluginSettings = plugin) -> str:
        return naming_of(config, row_bytes, of).signed[0][0]

    usual = namespace(offloading())
    same = [
        offloading(engine_id="f"),
        offloading(data_parallel_index=1, data_parallel_size=2),
        offloading(rank=1),
        offloading(enable_kv_cache_events=True),
    ]
    assert {namespace(config) for config in same} == {usual}
    others = [
        offloading(tp_size=1, world_size=1),
        offloading(model=OffloadingModelConfig(name="m", dtype="float16")),
        offloading(cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=2)),
        offloading(groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("a",), group_id=0),)),
        offloading(kv_cache_layout="HND"),
        offloading(canonical_layout=True),
    ]
    found = {namespace(config) for config in others}
    found |= {
        usual,
        namespace(offloading(), 2 * ROW),
        namespace(offloading(), of=msgspec.structs.replace(plugin, revision="2")),
    }
    monkeypatch.setenv("BATON_SECRET", "5ecret-of-a-test-0123456789abcdef0")
    found.add(namespace(offloading(), of=PluginSettings(revision="1")))
    assert len(found) == len(others) + 4


def test_vllms_configuration_is_found_in_the_calls_above() -> None:
    def make_connector(vllm_config: VllmConfig) -> Any:
        return find_vllm_config(sys._getframe(0))

    config = VllmConfig()
    assert make_connector(config) is config
    del config
    assert find_vllm_config(sys._getframe()) is None


def test_without_vllms_configuration_a_revision_is_needed() -> None:
    with pytest.raises(ConfigError, match="quantization"):
        naming_of(offloading(), ROW, PluginSettings(insecure_no_secret=True))


def test_with_adapters_a_revision_is_needed() -> None:
    def make_connector(vllm_config: VllmConfig) -> Any:
        return naming_of(offloading(), ROW, PluginSettings(insecure_no_secret=True))

    config = VllmConfig()
    config.lora_config = LoRAConfig()
    with pytest.raises(ConfigError, match="adapter's name only"):
        make_connector(config)


def test_another_version_of_vllm_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("vllm.__version__", "0.34.0")
    rows = memoryview(np.zeros((NUM_ROWS, ROW), np.int8))
    with pytest.raises(ConfigError, match=r"0\.34\.0, and BatonTier .* 0\.33 only.*allow_untested_vllm"):
        BatonTier(SimpleNamespace(), rows, "BatonTier", path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"spec_name: this is vLLM 0\.34\.0, and CpuTieringSpec"):
        CpuTieringSpec(offloading())
    with pytest.raises(Exception, match="cpu_bytes_to_use"):
        CpuTieringSpec(offloading(extra_config={"allow_untested_vllm": True}))


def test_a_row_has_the_bytes_of_all_ranks() -> None:
    page = 1024
    regions = [SharedOffloadRegion("baton-test-ranks", 4, rank, ROW, page) for rank in (0, 1, None)]
    caches = [torch.full((2, page), 10 + rank, dtype=torch.int8) for rank in range(2)]
    workers = [
        CpuWorker(
            CanonicalKVCaches([CanonicalKVCacheTensor(cache, page)], [[CanonicalKVCacheRef(0, page)]]),
            region,
            1,
        )
        for cache, region in zip(caches, regions, strict=False)
    ]
    for worker in workers:
        worker.submit_store(1, GPULoadStoreSpec([1], [1], [0]), CPULoadStoreSpec([3]))
    row = bytes(regions[2].mmap_obj[3 * ROW : 4 * ROW])
    assert row[: 2 * page] == b"\x0a" * page + b"\x0b" * page
    for worker in workers:
        worker.shutdown()
    regions[2].cleanup()
    assert not Path(regions[2].mmap_path).exists()


def test_blocks_of_two_groups_move_between_cache_and_rows() -> None:
    """Chunks of two blocks; each group's first and last chunk is used in part."""
    num_blocks, page, per_chunk = 12, 64, 2
    caches = [torch.randint(-128, 127, (num_blocks, page), dtype=torch.int8) for _ in range(3)]
    region = SharedOffloadRegion("baton-test-worker", 8, 0, ROW, 3 * page * per_chunk)
    groups = [
        [CanonicalKVCacheRef(0, page), CanonicalKVCacheRef(1, page - 8)],
        [CanonicalKVCacheRef(2, page)],
    ]
    worker = CpuWorker(
        CanonicalKVCaches([CanonicalKVCacheTensor(cache, page) for cache in caches], groups),
        region,
        per_chunk,
    )
    before = [cache.clone() for cache in caches]
    blocks = GPULoadStoreSpec([3, 7, 1, 9, 4], group_sizes=[3, 2], block_indices=[1, 4])
    chunks = CPULoadStoreSpec([6, 2, 5])
    assert worker.submit_store(1, blocks, chunks)
    for cache in caches:
        cache.zero_()
    assert worker.submit_load(2, chunks, blocks, *EXPEDITED)
    assert [(result.job_id, result.success) for result in worker.get_finished()] == [(1, True), (2, True)]
    assert torch.equal(caches[0][[3, 7, 1]], before[0][[3, 7, 1]])
    assert torch.equal(caches[1][[3, 7, 1], : page - 8], before[1][[3, 7, 1], : page - 8])
    assert torch.equal(caches[2][[9, 4]], before[2][[9, 4]])
    assert not caches[0][[0, 2, 9]].any()
    rows = np.frombuffer(region.mmap_obj, np.int8).reshape(8, ROW)
    assert np.array_equal(rows[6, page : 2 * page], before[0][3].numpy()), "the second block of its chunk"
    del rows
    worker.shutdown()
    assert not Path(region.mmap_path).exists()
