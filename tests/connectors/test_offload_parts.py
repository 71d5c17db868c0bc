"""Settings, validation, statistics and copy threads of offload, each separately."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.connectors.storage.connectors import BatonOffloadConnector
from baton.connectors.storage.memory.copies import CopyEnd
from baton.connectors.storage.memory.cpu_copies import CpuCopies
from baton.connectors.storage.memory.identity import OffloadIdentity
from baton.connectors.storage.memory.metadata import LoadBlocks, OffloadMetadata, OffloadReport, StoreBlocks
from baton.connectors.storage.memory.scheduler import OffloadSchedulerHalf
from baton.connectors.storage.memory.settings import OffloadSettings
from baton.connectors.storage.memory.worker import OffloadWorkerHalf
from baton.contract import KVConnectorOutput
from baton.core.errors import BadTransferParams, ConfigError, TransferError
from baton.core.kv_groups import KVCacheGroup
from baton.stores.host.rows import HostRows
from tests.connectors.host_views import view_fields
from tests.connectors.pull_world import FakeBlocks, FakeRequest

PATIENCE_S = 30.0

# --- Settings and validation - ------------------------------------------------------------------------------


def identity(cpu_gib: float = 1.0, num_ranks: int = 1, block_bytes: int = 1 << 20) -> OffloadIdentity:
    settings = OffloadSettings(cpu_gib=cpu_gib, blocks_per_chunk=2)
    return OffloadIdentity(
        **view_fields(tp_size=num_ranks), settings=settings, block_tokens=4, block_bytes=block_bytes
    )


def test_the_ranks_of_an_engine_share_its_memory() -> None:
    assert (identity().num_slots, identity().num_rows) == (512, 1024)
    assert identity(num_ranks=4).num_slots == 128
    with pytest.raises(ConfigError, match=r"cpu_gib: 0\.001 GiB cannot hold a chunk"):
        identity(0.001)


def test_too_much_memory_is_refused_before_allocation() -> None:
    worker = OffloadWorkerHalf(identity(cpu_gib=1 << 20))
    with pytest.raises(ConfigError, match=r"cpu_gib: this rank's share is .* are free"):
        worker.register_kv_caches({"l": torch.zeros(2, 1, 4, 8)})


def test_three_choices_are_accepted() -> None:
    for good in (None, {}, {"baton_offload": "off"}, {"do_remote_decode": True, "baton_offload": None}):
        BatonOffloadConnector.check_request(good)
    for bad in ({"baton_offload": True}, {"baton_offload": "OFF"}, {"baton_offload": ""}):
        with pytest.raises(BadTransferParams, match="baton_offload"):
            BatonOffloadConnector.check_request(bad)


# --- Copying -----------------------------------------------------------------------------------------


class HeldRows(HostRows):
    """Rows whose loads wait until they are released, and fail on request."""

    def __init__(self) -> None:
        super().__init__({"l": torch.arange(4 * 8, dtype=torch.uint8).reshape(4, 1, 1, 8)}, 4)
        self.let_go = threading.Event()
        self.error: BaseException | None = None

    def load(self, block_ids: Any, rows: Any) -> None:
        assert self.let_go.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        super().load(block_ids, rows)


def test_a_store_ends_at_once_and_a_load_wakes_the_host() -> None:
    rows, woken = HeldRows(), threading.Event()
    copies = CpuCopies(rows)
    assert copies.bind_wake(woken.set)
    copies.store(1, [0, 1], [2, 3])
    assert [(end.job, end.error) for end in copies.take_ended()] == [(1, "")]
    copies.load(2, [3], [2])
    assert not copies.wait([1, 2], 0)
    assert copies.take_ended() == []
    rows.let_go.set()
    assert woken.wait(PATIENCE_S)
    assert copies.wait([1, 2], 0)
    assert [(end.job, end.nbytes, end.error) for end in copies.take_ended()] == [(2, 8, "")]
    assert rows._caches[0][3].tolist() == list(range(8))
    copies.close(PATIENCE_S)


@pytest.mark.parametrize("error", [OSError("bad memory"), SystemExit("the thread")])
def test_a_failed_load_fails_alone_and_a_dead_thread_fails_all(error: BaseException) -> None:
    rows = HeldRows()
    rows.error = error
    rows.let_go.set()
    copies = CpuCopies(rows)
    copies.load(1, [0], [0])
    assert copies.wait([1], PATIENCE_S)
    (end,) = copies.take_ended()
    assert str(error) in end.error
    rows.error = None
    copies.load(2, [0], [0])
    assert copies.wait([2], PATIENCE_S)
    (end,) = copies.take_ended()
    assert bool(end.error) == isinstance(error, SystemExit)
    copies.close(PATIENCE_S)


class NeverEnding(CpuCopies):
    """Stores that never end, so that a fence times out."""

    def store(self, job: int, block_ids: Any, rows: Any) -> None:
        self.held = job

    def wait(self, jobs: Any, timeout_s: float) -> bool:
        return False


def test_a_store_after_a_fence_timeout_does_not_count() -> None:
    copies = NeverEnding(HeldRows())
    worker = OffloadWorkerHalf(identity(), lambda caches, identity: copies)
    worker.register_kv_caches({})
    worker.bind_connector_metadata(OffloadMetadata(stores=(StoreBlocks(7, (0,), (0,)),)))
    worker.wait_for_save()
    worker.clear_connector_metadata()
    worker.handle_preemptions(OffloadMetadata(fence=(7,)))
    copies._end(CopyEnd(copies.held, 8))
    worker.get_finished(set())
    report = worker.build_connector_worker_meta()
    assert report is not None
    assert (report.stored, report.failed_stores) == ({7}, {7})


def test_the_host_cannot_sleep_while_a_copy_does_not_end() -> None:
    """A host holds the blocks of loads, and not those of stores."""
    worker = OffloadWorkerHalf(identity(), lambda caches, identity: NeverEnding(HeldRows()))
    worker.unregister_kv_caches()
    worker.register_kv_caches({})
    worker.bind_connector_metadata(OffloadMetadata(stores=(StoreBlocks(7, (0,), (0,)),)))
    worker.wait_for_save()
    with pytest.raises(TransferError, match="cannot sleep: a copy"):
        worker.unregister_kv_caches()


def test_stores_of_an_aborted_step_are_reported_as_failed() -> None:
    worker = OffloadWorkerHalf(identity(), lambda caches, identity: CpuCopies(HeldRows()))
    worker.register_kv_caches({})
    worker.bind_connector_metadata(
        OffloadMetadata(loads=(LoadBlocks(1, "r", (5, 6), ()),), stores=(StoreBlocks(2, (0,), (0,)),))
    )
    worker.clear_connector_metadata()
    assert worker.get_finished(set()) == (None, {"r"})
    assert worker.get_block_ids_with_load_errors() == {5, 6}
    report = worker.build_connector_worker_meta()
    assert report is not None
    assert (report.stored, report.failed_stores) == ({2}, {2})
    assert (report.loaded, report.failed_loads) == ({1}, {1})
    assert worker.build_connector_worker_meta() is None
    worker.shutdown()


# --- Holes -------------------------------------------------------------------------------------------


def scheduled(
    request: FakeRequest,
    num_computed: int,
    num_tokens: int,
    *tables: list[int],
    states: Sequence[tuple[int, int, int]] = (),
) -> Any:
    """A step of this request only. `states`: what the host offers, (group, block, tokens)."""
    new = SimpleNamespace(req_id=request.request_id, num_computed_tokens=num_computed, block_ids=tables)
    none = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    return SimpleNamespace(
        preempted_req_ids=None,
        kv_connector_block_state=SimpleNamespace(boundary_state_offloads={request.request_id: list(states)}),
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=none,
        num_scheduled_tokens={request.request_id: num_tokens},
    )


def test_a_hole_in_a_prefix_hit_is_not_stored() -> None:
    """vLLM's prefix cache keeps what the next token sees, one token less than Baton keeps before a window."""
    settings = OffloadSettings(cpu_gib=1.0)
    groups = (KVCacheGroup((0,)), KVCacheGroup((1,), window=9))
    half = OffloadSchedulerHalf(
        OffloadIdentity(
            **view_fields(), settings=settings, block_tokens=4, block_bytes=1 << 20, groups=groups
        )
    )
    short, long = FakeRequest("short", list(range(5))), FakeRequest("long", list(range(20)))
    half.on_new_request(short)
    metadata = half.build_connector_meta(scheduled(short, 0, 5, [1, 2], [3, 4]))
    assert isinstance(metadata, OffloadMetadata)
    (store,) = metadata.stores
    assert store.block_ids == (1, 3)
    half.update_connector_output(
        KVConnectorOutput(kv_connector_worker_meta=OffloadReport(rank=0, stored={store.job}))
    )
    half.on_new_request(long)
    # Token 16 sees tokens from the ninth on: two blocks. The first token kept is the eighth, in block 1.
    metadata = half.build_connector_meta(scheduled(long, 16, 4, [1, 5, 6, 7, 8], [0, 0, 9, 10, 11]))
    assert isinstance(metadata, OffloadMetadata)
    assert metadata.stores == ()


# --- Recurrent states ----------------------------------------------------------------------------------


def half_of(*groups: KVCacheGroup) -> OffloadSchedulerHalf:
    return OffloadSchedulerHalf(
        OffloadIdentity(
            **view_fields(),
            settings=OffloadSettings(cpu_gib=1.0),
            block_tokens=4,
            block_bytes=1 << 20,
            groups=groups,
        )
    )


def stored(half: OffloadSchedulerHalf, step: Any) -> list[tuple[int, int]]:
    """(block, row) pairs that the step stores; the store has ended."""
    metadata = half.build_connector_meta(step)
    assert isinstance(metadata, OffloadMetadata)
    jobs = {store.job for store in metadata.stores}
    report = OffloadReport(rank=0, stored=jobs)
    half.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
    return [pair for store in metadata.stores for pair in zip(store.block_ids, store.rows, strict=True)]


ATTENTION, STATES, OTHER_STATES = (
    KVCacheGroup((0,)),
    KVCacheGroup((1,), 1, is_state=True),
    KVCacheGroup((2,), 1, is_state=True),
)


def test_a_state_is_stored_from_the_block_that_the_host_offers() -> None:
    """A host moves states, so the block at its place in the table may be another one. Loads end there."""
    half = half_of(ATTENTION, STATES, OTHER_STATES)
    request = FakeRequest("r", list(range(13)))
    half.on_new_request(request)
    tables = [1, 2, 3], [0, 5, 6], [0, 7, 8]
    step = scheduled(request, 0, 12, *tables, states=[(1, 31, 8), (2, 32, 8), (1, 33, 12)])
    # Rows of a chunk: attention, states, other states. At 12 tokens one group's state is missing.
    assert stored(half, step) == [(1, 0), (2, 3), (3, 6), (31, 4), (32, 5)]
    assert half.get_num_new_matched_tokens(FakeRequest("again", list(range(13))), 0) == (8, True)


def test_a_state_that_is_offered_later_joins_its_chunk() -> None:
    half = half_of(ATTENTION, STATES)
    first, second = FakeRequest("first", list(range(9))), FakeRequest("second", list(range(9)))
    half.on_new_request(first)
    assert stored(half, scheduled(first, 0, 9, [1, 2, 3], [0, 0, 4])) == [(1, 0), (2, 2)]
    half.on_new_request(second)
    assert half.get_num_new_matched_tokens(second, 0) == (0, False)
    assert stored(half, scheduled(second, 0, 8, [5, 6], [0, 7], states=[(1, 9, 8)])) == [(9, 3)]
    assert half.get_num_new_matched_tokens(FakeRequest("third", list(range(9))), 0) == (8, True)


def test_a_local_hit_of_attention_alone_is_completed_by_a_load_with_the_state() -> None:
    """The host has three blocks of attention, and the store has the state after four."""
    half = half_of(ATTENTION, STATES)
    assert half.supports_divergent_local_hybrid_hits
    assert not half_of(ATTENTION, STATES, KVCacheGroup((2,), 8)).supports_divergent_local_hybrid_hits
    first = FakeRequest("first", list(range(17)))
    half.on_new_request(first)
    stored(half, scheduled(first, 0, 16, [1, 2, 3, 4], [0, 0, 0, 5], states=[(1, 5, 16)]))
    again = FakeRequest("again", list(range(17)))
    half.on_new_request(again)
    assert half.get_num_new_matched_tokens(again, 16) == (0, False)
    assert half.get_num_new_matched_tokens(again, 12) == (4, True)
    half.update_state_after_alloc(again, FakeBlocks([1, 2, 3, 8], [0, 0, 0, 9]), 4)
    metadata = half.build_connector_meta(scheduled(FakeRequest("other", [1]), 0, 1, [], []))
    assert isinstance(metadata, OffloadMetadata)
    [load] = metadata.loads
    assert list(zip(load.block_ids, load.rows, strict=True)) == [(8, 6), (9, 7)]
