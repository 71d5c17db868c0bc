"""The halves without an engine: what is saved, what is not, and how long requests wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from baton.connectors.jobs import Jobs
from baton.connectors.multi.children import transfers_of
from baton.connectors.storage.connectors import BatonTieredConnector
from baton.connectors.storage.stores import upkeep
from baton.connectors.storage.stores.identity import StorageIdentity
from baton.connectors.storage.stores.layer_kinds import kinds_of
from baton.connectors.storage.stores.metadata import (
    ChunkPart,
    LoadChunks,
    StorageMetadata,
    StorageReport,
)
from baton.connectors.storage.stores.prompts import Prompt
from baton.connectors.storage.stores.scheduler import StorageSchedulerHalf
from baton.connectors.storage.stores.settings import StorageSettings
from baton.connectors.storage.stores.worker import StorageWorkerHalf
from baton.contract import ConnectorDead, KVConnectorOutput
from baton.core.config import CacheConfig, EngineConfig, KVTransferConfig
from baton.core.errors import ConfigError
from baton.core.hashing import root_hash
from baton.core.kv_groups import KVCacheGroup
from baton.engine.api import EngineRequest, SamplingParams
from baton.engine.request import Request
from baton.engine.step import CachedRequestData, NewRequestData, SchedulerOutput
from baton.stores.backends.files import FileStore
from baton.stores.backends.sweep import ENDED_S, chunks_of
from baton.stores.backends.tiers import Tiers
from baton.stores.base.chunk_name import Keep, parse_keep
from tests.connectors.host_views import view_fields
from tests.connectors.storage_world import BLOCK, CHUNK, WAIT_S, files_in, settings_in, wait_for
from tests.server.fakes import model_config
from tests.stores.slow_store import SlowStore

NUM_BLOCKS = 16


def identity_in(folder: Path, *, num_ranks: int = 1, rank: int = 0, **extra: Any) -> StorageIdentity:
    return StorageIdentity(
        **view_fields(tp_size=num_ranks, tp_rank=rank),
        block_tokens=BLOCK,
        takes_back_tokens=True,
        settings=StorageSettings(**settings_in(folder, **extra)),
    )


def request_of(name: str, num_tokens: int, kind: type[Request] = Request, **fields: Any) -> Request:
    return kind(
        EngineRequest(
            request_id=name,
            prompt_token_ids=list(range(num_tokens)),
            sampling_params=SamplingParams(),
            arrival_time_s=0,
            **fields,
        ),
        block_size=BLOCK,
    )


@dataclass
class Halves:
    """The halves of one engine, connected by hand."""

    scheduler: StorageSchedulerHalf
    ranks: list[StorageWorkerHalf]
    caches: list[dict[str, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def start(
        cls, folder: Path, num_ranks: int = 1, clock: Callable[[], float] = time.monotonic, **extra: Any
    ) -> Halves:
        halves = cls(StorageSchedulerHalf(identity_in(folder, num_ranks=num_ranks, **extra), clock=clock), [])
        for rank in range(num_ranks):
            half = StorageWorkerHalf(identity_in(folder, num_ranks=num_ranks, rank=rank, **extra))
            cache = {"layer": torch.rand(NUM_BLOCKS, 1, BLOCK, 4)}
            half.register_kv_caches(cache)
            halves.caches.append(cache)
            halves.ranks.append(half)
        return halves

    def shake_hands(self) -> None:
        self.scheduler.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): half.get_handshake_metadata() for rank, half in enumerate(self.ranks)}  # type: ignore[misc]
        )

    def step(
        self, output: SchedulerOutput, *, ranks: list[int] | None = None, **report: Any
    ) -> StorageMetadata:
        """`ranks`: those that report in this step; all of them by default."""
        metadata = self.scheduler.build_connector_meta(output)
        assert isinstance(metadata, StorageMetadata)
        of_ranks = []
        for rank, half in enumerate(self.ranks):
            half.bind_connector_metadata(metadata)
            half.wait_for_save()
            half.get_finished(set())
            meta = half.build_connector_worker_meta()
            half.clear_connector_metadata()
            if meta is not None and (ranks is None or rank in ranks):
                of_ranks.append(meta)
        whole = None
        for meta in of_ranks:
            whole = meta if whole is None else whole.aggregate(meta)
        self.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=whole, **report))
        return metadata

    def close(self) -> None:
        for half in self.ranks:
            half.shutdown()
        self.scheduler.shutdown()


@pytest.fixture
def halves(tmp_path: Path) -> Iterator[Halves]:
    halves = Halves.start(tmp_path)
    halves.shake_hands()
    yield halves
    halves.close()


def prefill_of(request: Request, num_scheduled: int, num_computed: int = 0) -> SchedulerOutput:
    blocks = list(range(1, 1 + -(-request.num_tokens // BLOCK)))
    output = SchedulerOutput(
        num_scheduled_tokens={request.request_id: num_scheduled}, total_num_scheduled_tokens=num_scheduled
    )
    if num_computed:
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=[request.request_id], new_block_ids=[None], num_computed_tokens=[num_computed]
        )
    else:
        new = NewRequestData(request.request_id, [], SamplingParams(), (blocks,), 0)
        output.scheduled_new_reqs = [new]
    return output


EMPTY = SchedulerOutput()
TABLE = SimpleNamespace(get_block_ids=lambda: (list(range(1, 8)),))


def test_each_chunk_is_saved_in_the_step_that_completes_it(halves: Halves, tmp_path: Path) -> None:
    request = request_of("r", 3 * CHUNK + 3)
    halves.scheduler.on_new_request(request)
    chunks = []
    for num_scheduled, num_computed in ((CHUNK + 2, 0), (CHUNK - 3, CHUNK + 2), (CHUNK + 4, 2 * CHUNK - 1)):
        metadata = halves.step(prefill_of(request, num_scheduled, num_computed))
        chunks.append([save.block_ids for save in metadata.saves])
    assert chunks == [[(1, 2)], [], [(3, 4), (5, 6)]]
    assert halves.scheduler.has_pending_push_work()
    halves.step(EMPTY)
    assert not halves.scheduler.has_pending_push_work()
    halves.close()
    assert len(files_in(tmp_path)) == 3


def test_loaded_chunks_are_not_saved_again(halves: Halves, tmp_path: Path) -> None:
    first, again = request_of("first", 3 * CHUNK + 1), request_of("again", 3 * CHUNK + 1)
    halves.scheduler.on_new_request(first)
    halves.step(prefill_of(first, first.num_tokens))
    halves.step(EMPTY)
    wait_for(lambda: len(files_in(tmp_path)) == 3)
    halves.scheduler.on_new_request(again)
    wait_for(lambda: halves.scheduler.get_num_new_matched_tokens(again, 0) == (3 * CHUNK, True))
    halves.scheduler.update_state_after_alloc(again, TABLE, 3 * CHUNK)
    loads = halves.step(EMPTY).loads
    assert [part.block_ids for part in loads[0].parts] == [(1, 2), (3, 4), (5, 6)]
    assert halves.step(prefill_of(again, 1, 3 * CHUNK)).saves == ()


@pytest.mark.parametrize(
    "inputs", [{"lora_request": SimpleNamespace(lora_name="x")}, {"resumable": True}], ids=str
)
def test_prompts_that_cannot_be_named_are_neither_saved_nor_found(
    halves: Halves, inputs: dict[str, Any]
) -> None:
    request = request_of("r", CHUNK, type("VllmRequest", (Request,), inputs))
    halves.scheduler.on_new_request(request)
    assert halves.step(prefill_of(request, CHUNK)).saves == ()
    assert halves.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


def test_embeddings_in_place_of_tokens_are_part_of_a_chunks_key(halves: Halves) -> None:
    embeds, others = torch.zeros(CHUNK, 2), torch.ones(CHUNK, 2)
    keys = []
    for name, value in (("a", embeds), ("b", others), ("c", embeds.clone())):
        request = request_of(name, CHUNK, type("VllmRequest", (Request,), {"prompt_embeds": value}))
        halves.scheduler.on_new_request(request)
        keys += [save.key for save in halves.step(prefill_of(request, CHUNK)).saves]
    assert len(keys) == 3
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]


def test_blocks_that_have_left_a_window_are_not_saved() -> None:
    """The table still lists blocks that belong to other requests by now, as after a dropped step."""
    request = request_of("r", 6 * CHUNK)
    kinds = kinds_of([KVCacheGroup((0,)), KVCacheGroup((1,), 10)], chunk_blocks=2, block_tokens=BLOCK)
    prompt = Prompt(
        request, CHUNK, BLOCK, root_hash("seed"), kinds, tables=(list(range(1, 13)), list(range(21, 33)))
    )
    # Block 7 is the first one in a window of ten after 40 tokens.
    saves = [(save.kind, save.block_ids) for _, save in prompt.take_saves(40, 48, {})]
    assert [blocks for kind, blocks in saves if kind == 0] == [(i, i + 1) for i in range(1, 12, 2)]
    assert [blocks for kind, blocks in saves if kind == 1] == [(29, 30), (31, 32)]


def test_a_state_is_saved_from_the_block_that_the_host_offers() -> None:
    """Tables do not tell a state's place. A chunk gets no states unless every group's state is offered."""
    groups = [KVCacheGroup((0,)), KVCacheGroup((1,), 1, is_state=True), KVCacheGroup((2,), 1, is_state=True)]
    prompt = Prompt(
        request_of("r", 3 * BLOCK),
        BLOCK,
        BLOCK,
        root_hash("seed"),
        kinds_of(groups, chunk_blocks=1, block_tokens=BLOCK),
        tables=([1, 2, 3], [0, 0, 7], [0, 0, 8]),
    )
    offered = {2 * BLOCK: {1: 11, 2: 12}, 3 * BLOCK: {1: 13}}
    saves = prompt.take_saves(0, 3 * BLOCK, offered)
    assert [(index, save.block_ids) for index, save in saves] == [
        (0, (1,)),
        (1, (2,)),
        (1, (11, 12)),
        (2, (3,)),
    ]


def test_copies_in_flight_when_bad_blocks_are_reported_are_not_written(tmp_path: Path) -> None:
    halves = Halves.start(tmp_path)
    halves.shake_hands()
    request = request_of("r", 2 * CHUNK)
    halves.scheduler.on_new_request(request)
    ahead = halves.step(prefill_of(request, CHUNK), ranks=[])  # The report of this step arrives later.
    halves.step(EMPTY, failed_recving={"another's"}, finished_recving={"another's"})
    halves.scheduler.update_connector_output(
        KVConnectorOutput(kv_connector_worker_meta=StorageReport(rank=0, copied={ahead.step}))
    )
    orders = halves.step(EMPTY)
    assert (orders.write, orders.drop) == ((), (ahead.step,))
    halves.close()
    assert files_in(tmp_path) == []


def test_nothing_is_written_before_every_rank_has_its_copy(tmp_path: Path) -> None:
    halves = Halves.start(tmp_path, num_ranks=2)
    halves.shake_hands()
    request = request_of("r", CHUNK)
    halves.scheduler.on_new_request(request)
    first = halves.step(prefill_of(request, CHUNK), ranks=[0])
    assert halves.step(EMPTY).write == ()
    halves.scheduler.update_connector_output(
        KVConnectorOutput(kv_connector_worker_meta=StorageReport(rank=1, copied={first.step}))
    )
    assert halves.step(EMPTY).write == (first.step,)
    halves.close()
    assert len(files_in(tmp_path)) == 2


def test_without_a_handshake_the_ranks_report_the_layout(tmp_path: Path) -> None:
    halves = Halves.start(tmp_path, num_ranks=2)
    assert halves.step(EMPTY).namespaces == ()
    assert halves.step(EMPTY).namespaces
    halves.close()


def test_empty_metadata_in_place_of_lost_ones_changes_nothing(tmp_path: Path) -> None:
    halves = Halves.start(tmp_path)
    halves.shake_hands()
    (half,) = halves.ranks
    half.bind_connector_metadata(StorageMetadata(step=1, namespaces=("n",), saves=(ChunkPart(b"1", (0, 1)),)))
    half.wait_for_save()
    half.bind_connector_metadata(StorageMetadata(step=2, namespaces=("n",), write=(1,)))
    half.bind_connector_metadata(StorageMetadata())
    halves.close()
    assert len(files_in(tmp_path)) == 1


def test_copies_that_wait_to_be_written_are_bounded(tmp_path: Path) -> None:
    halves = Halves.start(tmp_path, backlog_max_mib=1)
    halves.shake_hands()
    (half,) = halves.ranks
    of_chunk = 2 * BLOCK * 4 * 4  # Bytes.
    half._transfers._states.backlog_bytes = (1 << 20) - of_chunk
    metadata = StorageMetadata(
        step=1, namespaces=("n",), saves=(ChunkPart(b"1", (0, 1)), ChunkPart(b"2", (2, 3)))
    )
    half.bind_connector_metadata(metadata)
    half.wait_for_save()
    half.bind_connector_metadata(StorageMetadata(step=2, namespaces=("n",), drop=(1,)))
    stats = half.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["not_saved"] == {"backlog": 1, "tainted": 1}
    assert half._transfers._states.backlog_bytes == (1 << 20) - of_chunk
    halves.close()


def test_a_hanging_lookup_delays_a_prompt_by_its_timeout_only(tmp_path: Path) -> None:
    now = [100.0]
    half = StorageSchedulerHalf(identity_in(tmp_path, lookup_timeout_s=2.0), clock=lambda: now[0])
    rank = StorageWorkerHalf(identity_in(tmp_path))
    rank.register_kv_caches({"layer": torch.zeros(NUM_BLOCKS, 1, BLOCK, 4)})
    half.set_xfer_handshake_metadata_pp_aware({(0, 0): rank.get_handshake_metadata()})  # type: ignore[dict-item]
    hangs = threading.Event()
    half._lookups._jobs.put(lambda: hangs.wait(WAIT_S) and None)
    request = request_of("r", CHUNK)
    half.on_new_request(request)
    assert half.get_num_new_matched_tokens(request, 0) == (None, False)
    now[0] += 2.0
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)
    other = request_of("other", CHUNK)
    half.on_new_request(other)
    assert half.get_num_new_matched_tokens(other, 0) == (0, False), "it must not wait for a hanging lookup"
    hangs.set()
    wait_for(lambda: not half._lookups.is_overdue(now[0]))
    third = request_of("third", CHUNK)
    half.on_new_request(third)
    wait_for(lambda: half.get_num_new_matched_tokens(third, 0)[0] is not None)
    half.shutdown()
    rank.shutdown()


def test_reads_and_writes_that_fail_are_counted_and_hanging_ones_delay_nothing_else(tmp_path: Path) -> None:
    """`tests/stores/test_transfers.py` has all ways to fail."""
    now = [100.0]
    half = StorageWorkerHalf(identity_in(tmp_path, read_timeout_s=2.0), clock=lambda: now[0])
    half.register_kv_caches({"layer": torch.rand(NUM_BLOCKS, 1, BLOCK, 4)})
    store = SlowStore()
    half._transfers._tiers = Tiers([store])
    store.is_full = True

    def step(number: int, **orders: Any) -> set[str]:
        half.bind_connector_metadata(StorageMetadata(step=number, namespaces=("n",), **orders))
        half.wait_for_save()
        return finished()

    def finished() -> set[str]:
        return half.get_finished(set())[1] or set()

    def load(name: str) -> LoadChunks:
        return LoadChunks(name, (ChunkPart(b"1", (1, 2)), ChunkPart(b"2", (3, 4))))

    step(1, saves=(ChunkPart(b"1", (0, 1)), ChunkPart(b"2", (2, 3))))
    step(2, write=(1,))
    half._transfers.drain()
    assert step(3, loads=(load("gone"),)) == set()
    half._transfers.drain()
    assert finished() == {"gone"}
    assert half.get_block_ids_with_load_errors() == {1, 2, 3, 4}
    store.hold()
    step(4, loads=(load("hangs"),))
    store.wait_held()
    store.wait_held()
    now[0] += 2.0
    assert step(5, loads=(load("late"), LoadChunks("failed", (ChunkPart(b"", (7,)),), is_failed=True))) == {
        "hangs",
        "late",
        "failed",
    }
    stats = half.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["not_saved"] == {"io": 2}
    assert stats.data["failures"] == {"gone": 1, "timeout": 2, "failed": 1}
    report = half.build_connector_worker_meta()
    assert isinstance(report, StorageReport)
    assert report.failed_loads == {"gone", "hangs", "late", "failed"}
    store.release()
    half.shutdown()


def test_a_dead_thread_is_reported() -> None:
    jobs = Jobs("dies")

    def die() -> None:
        raise RuntimeError("a bug")

    jobs.put(die)
    jobs._threads[0].join(WAIT_S)
    with pytest.raises(ConnectorDead, match="a bug"):
        jobs.raise_if_dead()


# --- Settings and numbers ----------------------------------------------------------------------------


def test_chunks_are_whole_blocks() -> None:
    assert StorageSettings(path="/x").chunk_tokens_of(16) == 256
    assert StorageSettings(path="/x").chunk_tokens_of(96) == 288
    with pytest.raises(ConfigError, match=r"chunk_tokens: must be a multiple of the block size, 16"):
        StorageSettings(path="/x", chunk_tokens=40).chunk_tokens_of(16)


def test_a_folder_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"extra_config\.path: cannot be created"):
        StorageSchedulerHalf(identity_in(tmp_path / "file" / "below"))


# --- Retention --------------------------------------------------------------------------------------


def keeps_in(folder: Path) -> list[tuple[str, Keep]]:
    """The keeps in `folder`, each after the beginning of its chunk's key."""
    found = [(path.name[:8], parse_keep(str(path.relative_to(folder)))) for path in folder.glob("*/*/*.keep")]
    return sorted(((key, keep) for key, keep in found if keep is not None), key=str)


def test_stores_with_limits_keep_what_requests_ask_for(tmp_path: Path) -> None:
    halves = Halves.start(tmp_path, max_gib=1, tenant_max_share=0.5, sweep_every_s=3600)
    halves.shake_hands()
    params = {"baton_retention": {"priority": -3, "ttl_s": 60}, "baton_tenant": "search"}
    first = request_of("first", 3 * CHUNK, kv_transfer_params=params)
    halves.scheduler.on_new_request(first)
    halves.step(prefill_of(first, first.num_tokens))
    halves.step(EMPTY)
    wait_for(lambda: len(files_in(tmp_path)) == 3)
    halves.scheduler.request_finished(first, [])
    wait_for(lambda: len(keeps_in(tmp_path)) == 3)
    (of_first,) = {keep for _, keep in keeps_in(tmp_path)}
    assert (of_first.priority, of_first.ttl_s, len(of_first.tenant)) == (-3, 60, 16)

    low = {"baton_retention": {"priority": -9, "ttl_s": 1}, "baton_tenant": "other"}
    high = {"baton_retention": {"priority": 9, "ttl_s": 1}}
    for name, params in (("low", low), ("high", high)):  # Both requests find all chunks.
        again = request_of(name, 3 * CHUNK, kv_transfer_params=params)
        halves.scheduler.on_new_request(again)
        wait_for(lambda: halves.scheduler.get_num_new_matched_tokens(again, 0)[0] is not None)  # noqa: B023
        halves.step(prefill_of(again, again.num_tokens))
        halves.scheduler.request_finished(again, [])
    halves.close()
    keeps = keeps_in(tmp_path)
    assert {keep for _, keep in keeps} == {of_first, Keep(9)}, "others' chunks are not harmed"
    assert len(keeps) == 6
    (merged,) = {chunk.keep for chunk in chunks_of(FileStore(tmp_path))}
    assert merged == Keep(9, 60, of_first.tenant)


def test_while_a_store_is_slow_few_requests_wait_for_their_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upkeep, "KEEPS_MAX", 2)
    halves = Halves.start(tmp_path, max_gib=1, sweep_every_s=3600)
    halves.shake_hands()
    begun, goes_on = threading.Event(), threading.Event()
    keeper = halves.scheduler._upkeep._keeper
    assert keeper is not None

    def hang() -> None:
        begun.set()
        goes_on.wait(WAIT_S)

    keeper.put(hang)
    assert begun.wait(WAIT_S)
    params = {"baton_retention": {"priority": 1}}
    for number in range(5):
        request = request_of(f"r{number}", CHUNK, kv_transfer_params=params)
        halves.scheduler.on_new_request(request)
        halves.scheduler.request_finished(request, [])
        assert keeper.num_waiting == min(number + 1, 2)
    goes_on.set()
    halves.close()
    assert caplog.text.count("retention is not kept") == 1


def test_chunks_of_an_ended_session_are_the_oldest(tmp_path: Path) -> None:
    halves = Halves.start(tmp_path, max_gib=1, sweep_every_s=3600)
    halves.shake_hands()
    ends = {"baton_retention": {"ends_session": True}}
    turn = request_of("turn", 2 * CHUNK, session_id="s")
    last = request_of("last", 3 * CHUNK, session_id="s", kv_transfer_params=ends)
    for request, num_files in ((turn, 2), (last, 3)):
        halves.scheduler.on_new_request(request)
        wait_for(lambda: halves.scheduler.get_num_new_matched_tokens(request, 0)[0] is not None)  # noqa: B023
        halves.step(prefill_of(request, request.num_tokens))
        halves.step(EMPTY)
        wait_for(lambda: len(files_in(tmp_path)) == num_files)  # noqa: B023
        if request is last:
            system = request_of("system", CHUNK)  # This request has no session.
            halves.scheduler.on_new_request(system)
            wait_for(lambda: halves.scheduler.get_num_new_matched_tokens(system, 0) == (CHUNK, True))  # noqa: B023
            halves.step(prefill_of(system, CHUNK))
            halves.scheduler.request_finished(system, [])
        halves.scheduler.request_finished(request, [])
    halves.close()
    ages = sorted(path.stat().st_mtime for path in files_in(tmp_path))
    assert ages[:2] == [ENDED_S, ENDED_S]
    assert ages[2] > ENDED_S, "another request uses the first chunk, too"


def test_loads_by_layers_need_one_block_table_and_no_other_connector(tmp_path: Path) -> None:
    identity = identity_in(tmp_path, layerwise=True)
    with pytest.raises(ConfigError, match=r"layerwise: needs one block table"):
        msgspec.structs.replace(identity, groups=(KVCacheGroup((0,)), KVCacheGroup((1,), 9)))
    of_tiers = KVTransferConfig(
        kv_connector="BatonTieredConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"tiers": [{"type": "files", "path": "/kv"}], "layerwise": True},
    )
    with pytest.raises(ConfigError, match=r"layerwise: is for an only connector"):
        transfers_of(of_tiers, BatonTieredConnector.listed)


@pytest.mark.parametrize("layerwise", [True, False])
def test_no_step_may_wait_for_layers_until_its_engine_ends(tmp_path: Path, layerwise: bool) -> None:
    extra = settings_in(tmp_path, layerwise=layerwise, layer_wait_s=1.0)
    engine = EngineConfig(
        model_config=model_config(),
        cache_config=CacheConfig(block_size=BLOCK),
        kv_transfer_config=KVTransferConfig(
            kv_connector="BatonSharedStorageConnector", kv_role="kv_both", kv_connector_extra_config=extra
        ),
        insecure_no_secret=True,
        step_timeout_s=2.0,
    )
    assert StorageIdentity.of_engine(engine).settings.layer_wait_s == 1.0
    engine = msgspec.structs.replace(engine, step_timeout_s=1.9)
    problem = r"layer_wait_s: must be at most half of step_timeout_s, 1\.9"
    with pytest.raises(ConfigError, match=problem) if layerwise else nullcontext():
        StorageIdentity.of_engine(engine)


def test_no_step_waits_for_the_load_of_a_request_that_ended_before_it_arrived(halves: Halves) -> None:
    """No other request has found its blocks."""
    for name in ("runs", "ended"):
        halves.scheduler.on_new_request(request_of(name, CHUNK))
    halves.scheduler.request_finished(request_of("ended", CHUNK), [])
    report = KVConnectorOutput(kv_connector_worker_meta=StorageReport(rank=0, arriving={"runs", "ended"}))
    halves.scheduler.update_connector_output(report)
    assert report.arriving_recving == {"runs"}
    halves.scheduler.request_finished(request_of("runs", CHUNK), [])
    assert halves.step(EMPTY).usable == ("runs",), "others may have found its blocks"


def test_what_was_read_ahead_stays_until_the_load_by_layers_has_ended(halves: Halves, tmp_path: Path) -> None:
    first, again = request_of("first", CHUNK + 1), request_of("again", CHUNK + 1)
    halves.scheduler.on_new_request(first)
    halves.step(prefill_of(first, first.num_tokens))
    halves.step(EMPTY)
    wait_for(lambda: len(files_in(tmp_path)) == 1)
    halves.scheduler.on_new_request(again)
    wait_for(lambda: halves.scheduler.get_num_new_matched_tokens(again, 0) == (CHUNK, True))
    assert [order.owner for order in halves.step(EMPTY).read_ahead] == ["again"]
    halves.scheduler.update_state_after_alloc(again, TABLE, CHUNK)
    halves.step(EMPTY)
    arriving = StorageReport(rank=0, arriving={"again"})
    halves.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=arriving))
    assert halves.step(prefill_of(again, 1, 0), finished_recving={"again"}).forget == ()
    assert halves.step(EMPTY).forget == ("again",)


def test_the_output_of_vllm_has_only_vllms_fields(halves: Halves) -> None:
    of_vllm: dict[str, Any] = dict.fromkeys(each.name for each in fields(KVConnectorOutput))
    for of_baton in ("abandoned_recving", "arriving_recving"):
        del of_vllm[of_baton]
    of_vllm |= {"kv_connector_worker_meta": StorageReport(rank=0, copied={1})}
    before = dict(of_vllm)
    halves.scheduler.update_connector_output(output := SimpleNamespace(**of_vllm))  # type: ignore[arg-type]
    assert vars(output) == before


def test_a_chunk_that_was_read_ahead_counts_once_however_many_sections_it_has(tmp_path: Path) -> None:
    half = StorageWorkerHalf(identity_in(tmp_path, layerwise=True))
    half.register_kv_caches({f"layer {n}": torch.rand(4, 1, BLOCK, (64 << 10) // BLOCK) for n in range(4)})
    form = half._chunks._blocks[0].form
    assert len(form.section_ends) > 1
    half.bind_connector_metadata(StorageMetadata(namespaces=("n",)))
    half._ahead.want("r", (b"k", 0), form.nbytes)
    half._ahead.keep((b"k", 0), memoryview(bytearray(form.nbytes)))
    order = LoadChunks("r", (ChunkPart(b"k", (0, 1)),), arrives_s=1.0)
    half.bind_connector_metadata(StorageMetadata(namespaces=("n",), loads=(order,)))
    half._transfers.drain()
    half.get_finished(set())
    stats = half.get_kv_connector_stats()
    half.shutdown()
    assert stats is not None
    assert (stats.data["loaded_chunks"], stats.data["prefetched_chunks"]) == (1, 1)
