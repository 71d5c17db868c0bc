"""Offload under the real scheduler, one case at a time. Random worlds of it are in `baton.sim` (full worlds).

Ranks have KV that can be checked; copies are late or fail.
"""

import random
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from baton.connectors.offload.copies import Copies, CopyEnd
from baton.connectors.offload.identity import OffloadIdentity
from baton.connectors.offload.scheduler import OffloadSchedulerHalf
from baton.connectors.offload.settings import GIB, OffloadSettings
from baton.connectors.offload.worker import OffloadWorkerHalf
from baton.contract import KVConnectorOutput
from baton.core.errors import ConfigError
from tests.connectors.store_world import StoreWorld
from tests.engine_sched.world import (
    BLOCK,
    FakeRanks,
    engine_config,
    engine_request,
)

STEMS = [[1 + (7 * stem + i) % 48 for i in range(40)] for stem in range(3)]


class ListCopies(Copies):
    """Copies between lists. A job ends after some polls; until then it has copied nothing or half."""

    def __init__(self, memory: list[list[int | None]], num_rows: int, rng: random.Random) -> None:
        self.memory = memory
        self.rows: list[list[int | None]] = [[None] * BLOCK for _ in range(num_rows)]
        self.rng = rng
        self.failure_share = 0.0
        self.looks_max = 0
        self.due: dict[int, tuple[int, Callable[[], CopyEnd]]] = {}
        self.ended: list[CopyEnd] = []

    def store(self, job: int, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        self._begin(job, list(zip(block_ids, rows, strict=True)), self.memory, self.rows)

    def load(self, job: int, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        self._begin(job, list(zip(rows, block_ids, strict=True)), self.rows, self.memory)

    def _begin(self, job: int, pairs: list[tuple[int, int]], source: Any, target: Any) -> None:
        fails = self.rng.random() < self.failure_share
        for _, there in pairs:
            target[there] = [None] * BLOCK  # Half written, from the beginning.

        def copy() -> CopyEnd:
            for here, there in pairs[: len(pairs) // 2] if fails else pairs:
                target[there] = list(source[here])
            return CopyEnd(job, error="short" if fails else "")

        self.due[job] = (self.rng.randint(0, self.looks_max), copy)

    def take_ended(self) -> list[CopyEnd]:
        for job, (num_looks, copy) in list(self.due.items()):
            self.due[job] = (num_looks - 1, copy)
            if num_looks <= 0:
                del self.due[job]
                self.ended.append(copy())
        ended, self.ended = self.ended, []
        return ended

    def wait(self, jobs: Collection[int], timeout_s: float) -> bool:
        for job in jobs:
            if job in self.due:
                self.ended.append(self.due.pop(job)[1]())
        return True

    def close(self, timeout_s: float) -> None:
        return


class OffloadWorld(StoreWorld):
    def __init__(
        self,
        rng: random.Random,
        *,
        num_ranks: int = 1,
        num_slots: int = 12,
        num_blocks: int = 20,
        failure_share: float = 0.0,
        looks_max: int = 0,
        settings: dict[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        config = engine_config(num_blocks=num_blocks, max_model_len=60, **engine)
        offload = OffloadSettings(cpu_gib=1.0, **(settings or {}))
        groups = config.kv_cache_groups
        chunk_bytes = GIB // num_slots // num_ranks // len(groups)
        self.identities = [
            OffloadIdentity(
                settings=offload,
                rank=rank,
                num_ranks=num_ranks,
                block_tokens=BLOCK,
                block_bytes=chunk_bytes // offload.blocks_per_chunk,
                groups=groups,
            )
            for rank in range(num_ranks)
        ]
        self.half = OffloadSchedulerHalf(self.identities[0])
        ranks = [FakeRanks(num_blocks, groups) for _ in range(num_ranks)]
        self.workers: list[OffloadWorkerHalf] = []
        for rank, identity in zip(ranks, self.identities, strict=True):
            copies = ListCopies(rank.memory, identity.num_rows, rng)
            copies.failure_share, copies.looks_max = failure_share, looks_max
            worker = OffloadWorkerHalf(identity, lambda caches, identity, copies=copies: copies)  # type: ignore[misc]
            worker._copies = copies  # There are no tensors to register.
            self.workers.append(worker)
        super().__init__(config, self.half, ranks, self.workers)

    def check(self, on_failure: str = "recompute") -> None:
        super().check(on_failure)
        assert not self.half._stores
        assert not self.half._loads
        assert not self.half._prompts
        self.half._index.assert_consistent()


def test_a_store_that_failed_on_one_rank_is_not_found() -> None:
    world = OffloadWorld(random.Random(1), num_ranks=2, num_blocks=20, caching=False)
    copies = world.workers[1]._copies
    assert isinstance(copies, ListCopies)
    copies.failure_share = 1.0
    world.add(engine_request("a", STEMS[0], max_tokens=3))
    world.run()
    assert world.half._index.num_free == world.half._index.num_slots
    copies.failure_share = 0.0
    world.add(engine_request("b", STEMS[0], max_tokens=3))
    world.run()
    assert world.half._index.num_free < world.half._index.num_slots
    world.check()


def always_late(world: OffloadWorld, rank: int, num_looks: int) -> None:
    copies = world.workers[rank]._copies
    assert isinstance(copies, ListCopies)
    copies.looks_max = num_looks
    copies.rng = SimpleNamespace(random=lambda: 1.0, randint=lambda low, high: high)  # type: ignore[assignment]


def test_a_store_counts_when_the_last_rank_has_its_part() -> None:
    world = OffloadWorld(random.Random(1), num_ranks=2, num_blocks=20)
    always_late(world, 1, 5)
    world.add(engine_request("a", STEMS[0], max_tokens=12))
    found = []
    while not found or found[-1] == 0:
        world.step()
        found.append(world.half._index.num_found(world.half._prompts["a"].keys))
    assert len(found) == 6, "five polls, and the one that sees it"
    world.run()
    world.check()


def test_stores_during_a_failed_load_are_never_found() -> None:
    """As with another connector whose synchronous load of the same step turns out to be bad."""
    world = OffloadWorld(random.Random(1), num_slots=30, num_blocks=20)
    always_late(world, 0, 3)
    world.add(engine_request("a", STEMS[0], max_tokens=12))
    world.step()
    (condemned,) = world.half._stores
    world.half.update_connector_output(KVConnectorOutput(invalid_block_ids={1}))
    while condemned in world.half._stores:
        world.step()
    assert world.half._stores, "it must be stored again"
    assert world.half._index.num_found(world.half._prompts["a"].keys) == 0
    world.run()
    world.check()


@pytest.mark.parametrize("is_preempted", [False, True])
def test_blocks_are_not_overwritten_while_a_late_store_reads_them(is_preempted: bool) -> None:
    world = OffloadWorld(random.Random(1), num_slots=60, num_blocks=16, caching=False)
    always_late(world, 0, 1000)
    num_tokens = 12 if is_preempted else 1
    world.add(engine_request("a", STEMS[0], max_tokens=num_tokens))
    if is_preempted:
        world.add(engine_request("before", STEMS[2][:12], max_tokens=30, priority=-1))
    world.step()
    world.add(engine_request("b", STEMS[1], max_tokens=num_tokens))
    world.run()
    # What was stored of the preempted request must be right.
    for name, prompt in {"again": STEMS[0], "before again": STEMS[2][:12]}.items():
        world.add(engine_request(name, prompt, max_tokens=4))
        world.run()
        last = world.answers[name].last
        assert last is not None
        assert last.num_transferred_tokens > 0 or not (is_preempted or name == "again")
    world.check()


def test_the_end_of_a_prompt_is_evicted_first() -> None:
    """Without its beginning, nothing of a prompt can be found."""
    world = OffloadWorld(random.Random(1), num_slots=12, num_blocks=60)
    for name, prompt in {"a": STEMS[0], "b": STEMS[1][:16]}.items():  # Ten chunks, and four.
        world.add(engine_request(name, prompt, max_tokens=1))
        world.run()
    assert world.scheduler.reset_prefix_cache()
    world.add(engine_request("again", STEMS[0], max_tokens=3))
    world.run()
    last = world.answers["again"].last
    assert last is not None
    assert last.num_transferred_tokens == 8 * BLOCK
    world.check()


def test_a_chunk_that_has_partly_left_a_window_is_not_stored() -> None:
    """The engine's own cache still has the prompt, but host memory does not."""
    world = OffloadWorld(random.Random(1), num_slots=60, num_blocks=60, windows=(None, 9))
    world.add(engine_request("first", STEMS[0][:32], max_tokens=1))
    world.run()
    world.half.reset_cache()
    world.add(engine_request("longer", [*STEMS[0][:32], *STEMS[1][:8]], max_tokens=1))
    world.run()
    assert world.scheduler.reset_prefix_cache()
    world.add(engine_request("short", STEMS[0][:9], max_tokens=3))
    world.run()
    world.check()


def test_only_blocks_within_a_window_are_loaded() -> None:
    world = OffloadWorld(random.Random(1), num_slots=60, num_blocks=60, windows=(None, 9))
    world.add(engine_request("a", STEMS[0], max_tokens=1))
    world.run()
    assert world.scheduler.reset_prefix_cache()
    world.add(engine_request("again", STEMS[0], max_tokens=3))
    metadata = world.scheduler.schedule().kv_connector_metadata
    (load,) = metadata.loads  # type: ignore[union-attr]
    # Nine full blocks with full attention; three blocks for nine tokens of a window and one more.
    assert len(load.block_ids) == len(set(load.block_ids)) == 9 + 3


def test_chunks_longer_than_a_window_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="blocks_per_chunk: chunks must not be longer than the window of 9 tokens"
    ):
        OffloadWorld(random.Random(1), windows=(None, 9), settings={"blocks_per_chunk": 4})
