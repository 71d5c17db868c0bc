"""Jobs of the tier between rows of memory and a store: partial success, deadlines, backlog, drain."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton.connectors.shared_storage.settings import FilesTier
from baton.tiers.store import Store
from baton.tiers.tiers import Tiers
from baton.vllm_tier.naming import Naming, any_of
from baton.vllm_tier.settings import TierSettings
from baton.vllm_tier.transfers import Ended, Transfers
from tests.tiers.slow_store import WAIT_S, SlowStore

ROW = 5000
NUM_ROWS = 8
KEYS = [bytes([number]) * 36 for number in range(NUM_ROWS)]
NAMING = Naming(ROW, (("current", b"s" * 32),))


Start = Callable[..., "World"]


class World:
    def __init__(self, *stores: Store, naming: Naming = NAMING, **settings: Any) -> None:
        self.now = 0.0
        self.rows = bytearray(ROW * NUM_ROWS)
        settings = {"io_threads": 1, "shutdown_timeout_s": 1.0, **settings}
        self.settings = TierSettings(tiers=(FilesTier(path="/unused"),), **settings)
        view = memoryview(self.rows)
        tiers = Tiers(stores, clock=self.clock)
        self.transfers = Transfers(tiers, view, naming, self.settings, clock=self.clock)

    def clock(self) -> float:
        return self.now

    def row(self, index: int) -> bytes:
        return bytes(self.rows[index * ROW : (index + 1) * ROW])

    def fill(self, index: int, value: int) -> bytes:
        self.rows[index * ROW : (index + 1) * ROW] = bytes([value]) * ROW
        return self.row(index)

    def ended(self) -> list[Ended]:
        """After all jobs have ended."""
        self.transfers.drain()
        return self.transfers.take_ended()

    def wait_reader(self) -> None:
        """Until the reader has ended what it does."""
        idle = threading.Event()
        self.transfers._readers.put(idle.set)
        assert idle.wait(WAIT_S)


@pytest.fixture
def store() -> SlowStore:
    return SlowStore()


@pytest.fixture
def start(store: SlowStore) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(*stores: Store, **options: Any) -> World:
        worlds.append(World(*(stores or (store,)), **options))
        return worlds[-1]

    yield make
    store.release()
    for world in worlds:
        world.transfers.close()


def stored(world: World, *keys: bytes) -> None:
    """Stores rows of the values 1, 2, ... under these keys, and clears the rows."""
    for index, key in enumerate(keys):
        world.fill(index, index + 1)
        world.transfers.store(1000 + index, [key], [index])
    assert all(not ended.failed for ended in world.ended())
    world.rows[:] = bytes(len(world.rows))
    world.transfers.take_events()


def test_what_was_stored_is_loaded_into_other_rows(start: Start, store: SlowStore) -> None:
    world = start()
    rows = [world.fill(index, index + 1) for index in range(2)]
    world.transfers.store(1, KEYS[:2], [0, 1])
    (ended,) = world.ended()
    assert (ended.job_id, ended.is_load, ended.done, ended.failed) == (1, False, tuple(KEYS[:2]), ())
    assert world.transfers.take_events() == (KEYS[:2], [])
    world.transfers.load(2, KEYS[:2], [7, 3])
    (ended,) = world.ended()
    assert (ended.is_load, set(ended.done), ended.failed) == (True, set(KEYS[:2]), ())
    assert [world.row(7), world.row(3)] == rows


def test_the_beginning_of_a_loaded_prompt_is_evicted_last(start: Start, store: SlowStore) -> None:
    world = start(io_threads=2)
    stored(world, *KEYS[:4])
    world.transfers.load(1, KEYS[:4], [4, 5, 6, 7])
    world.transfers.drain()
    world.transfers.close()  # After the touches.
    used_s = [store.touched[str(name)] for key in KEYS[:4] for name, _ in NAMING.names_of(key)]
    assert used_s == sorted(used_s, reverse=True)


def test_a_damaged_and_a_missing_chunk_fail_alone_and_leave_their_rows(
    start: Start, store: SlowStore
) -> None:
    world = start()
    stored(world, KEYS[0], KEYS[1])
    name = next(name for name in store.values if KEYS[1].hex() in name)
    store.values[name] = store.values[name][:-1] + b"?"
    world.transfers.load(1, KEYS[:3], [4, 5, 6])
    (ended,) = world.ended()
    assert (ended.done, ended.failed) == ((KEYS[0],), (KEYS[1], KEYS[2]))
    assert world.row(4) == b"\1" * ROW
    assert world.row(5) == world.row(6) == bytes(ROW)
    assert name not in store.values
    assert world.transfers.take_events() == ([], [KEYS[1], KEYS[2]])
    assert dict(world.transfers.take_counts()) == {
        ("failed_loads", "corrupt"): 1,
        ("failed_loads", "gone"): 1,
    }


def test_a_load_that_hangs_fails_at_its_deadline_and_never_writes_its_row(
    start: Start, store: SlowStore
) -> None:
    world = start(load_timeout_s=10.0, read_timeout_s=5.0)
    stored(world, KEYS[0], KEYS[1])
    store.hold()
    world.transfers.load(1, KEYS[:2], [4, 5])
    store.wait_held()
    world.transfers.expire()
    assert not world.transfers.take_ended()
    world.now = 5.0
    assert world.transfers.is_stuck
    world.transfers.expire()
    (ended,) = world.transfers.take_ended()
    assert (ended.done, ended.failed) == ((), tuple(KEYS[:2]))
    world.fill(4, 9)  # vLLM gives the row to another chunk.
    store.release()
    world.wait_reader()
    assert world.row(4) == b"\x09" * ROW
    assert world.row(5) == bytes(ROW)


def test_nothing_waits_for_readers_that_all_hang(start: Start, store: SlowStore) -> None:
    world = start(read_timeout_s=5.0)
    stored(world, KEYS[0])
    store.hold()
    world.transfers.load(1, [KEYS[0]], [4])
    store.wait_held()
    world.now = 6.0
    world.transfers.load(2, [KEYS[0]], [5])
    assert [ended.job_id for ended in world.transfers.take_ended()] == [2]
    assert world.transfers.take_counts()["failed_loads", "timeout"] == 1


def test_a_store_that_hangs_gives_its_row_back_at_its_deadline(start: Start, store: SlowStore) -> None:
    world = start(store_timeout_s=3.0)
    world.fill(0, 1)
    store.hold()
    world.transfers.store(1, [KEYS[0]], [0])
    store.wait_held()
    world.now = 3.0
    world.transfers.expire()
    (ended,) = world.transfers.take_ended()
    assert ended.failed == (KEYS[0],)
    world.fill(0, 2)  # Another chunk's.
    world.transfers.store(2, [KEYS[1]], [1])
    assert [ended.job_id for ended in world.transfers.take_ended()] == [2], "the writer hangs"
    store.release()
    world.transfers.close()
    assert world.transfers.take_counts()["not_stored", "timeout"] == 2


def test_the_row_is_copied_before_the_store_answers(start: Start, store: SlowStore) -> None:
    """What is written is the chunk of the job, whatever vLLM does with the row afterwards."""
    world = start()
    before = world.fill(0, 1)
    store.hold()
    world.transfers.store(1, [KEYS[0]], [0])
    store.wait_held()
    world.fill(0, 2)
    store.release()
    world.ended()
    world.transfers.load(2, [KEYS[0]], [5])
    world.ended()
    assert world.row(5) == before


def test_chunks_beyond_the_backlog_are_not_stored(start: Start, store: SlowStore) -> None:
    world = start(backlog_max_mib=1)
    naming = Naming(400 << 10, NAMING.signed)
    rows = memoryview(bytearray(naming.row_bytes * 4))
    transfers = Transfers(Tiers([store]), rows, naming, world.settings)
    store.hold()
    transfers.store(1, KEYS[:4], [0, 1, 2, 3])
    store.release()
    transfers.drain()
    (ended,) = transfers.take_ended()
    assert (ended.done, ended.failed) == (tuple(KEYS[:2]), tuple(KEYS[2:4]))
    assert dict(transfers.take_counts()) == {("not_stored", "backlog"): 2}
    transfers.close()


def test_a_full_store_fails_the_job(start: Start, store: SlowStore) -> None:
    world = start()
    store.is_full = True
    world.transfers.store(1, [KEYS[0]], [0])
    (ended,) = world.ended()
    assert ended.failed == (KEYS[0],)
    assert world.transfers.take_events() == ([], [])
    assert world.transfers.take_counts()["not_stored", "io"] == 1


def test_a_copy_that_fails_ends_its_chunk_only(start: Start, store: SlowStore) -> None:
    world = start()
    stored(world, KEYS[0], KEYS[1])
    world.transfers.load(1, KEYS[:2], [NUM_ROWS, 4])  # The first row does not exist.
    (ended,) = world.ended()
    assert (ended.done, ended.failed) == ((KEYS[1],), (KEYS[0],))
    assert world.transfers.take_counts()["failed_loads", "failed"] == 1


def test_drain_waits_for_all_jobs(start: Start, store: SlowStore) -> None:
    world = start()
    stored(world, KEYS[0])
    store.hold()
    world.transfers.load(1, [KEYS[0]], [4])
    store.wait_held()
    drained = threading.Event()

    def drain() -> None:
        world.transfers.drain()
        drained.set()

    thread = threading.Thread(target=drain)
    thread.start()
    assert not drained.is_set()
    store.release()
    thread.join(WAIT_S)
    assert drained.is_set()
    assert [ended.job_id for ended in world.transfers.take_ended()] == [1]


def test_close_gives_up_what_hangs_and_frees_the_rows(start: Start, store: SlowStore) -> None:
    world = start(shutdown_timeout_s=0.0)
    store.hold()
    world.transfers.store(1, [KEYS[0]], [0])
    store.wait_held()
    world.transfers.close()
    (ended,) = world.transfers.take_ended()
    assert ended.failed == (KEYS[0],)


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_chunk_of_a_slow_store_is_copied_to_the_fast_one(
    start: Start, store: SlowStore, encrypt: bool
) -> None:
    fast = SlowStore()
    world = start(fast, store, encrypt=encrypt)
    stored(world, KEYS[0])
    fast.values.clear()
    world.transfers.load(1, [KEYS[0]], [4])
    world.ended()
    stored(world, KEYS[1])  # The writer has promoted the first one before.
    (name,) = (name for name in fast.values if KEYS[0].hex() in name)
    assert (b"\1" * 100 in fast.values[name]) is not encrypt
    store.values.clear()
    world.transfers.load(2, [KEYS[0]], [5])
    (ended,) = world.ended()
    assert ended.failed == ()
    assert world.row(5) == b"\1" * ROW


def test_nothing_waits_for_a_writer_that_hangs_in_the_fast_store(start: Start, store: SlowStore) -> None:
    fast, begun = SlowStore(), threading.Event()
    world = start(fast, store)
    stored(world, KEYS[0])
    fast.values.clear()
    world.transfers._writer.put(lambda: begun.wait(WAIT_S) and None)
    world.transfers.load(1, [KEYS[0]], [4])
    world.ended()
    world.wait_reader()
    fast.hold()
    begun.set()
    fast.wait_held()
    world.now += world.settings.store_timeout_s
    world.transfers.store(2, [KEYS[1]], [1])
    (ended,) = world.transfers.take_ended()
    assert ended.failed == (KEYS[1],)
    assert world.transfers.take_counts()["not_stored", "timeout"] == 1
    fast.release()


def test_chunks_of_the_previous_secret_are_loaded(start: Start, store: SlowStore) -> None:
    old = Naming(ROW, (("old", b"o" * 32),))
    stored(start(naming=old), KEYS[0])
    world = start(naming=Naming(ROW, (*NAMING.signed, *old.signed)))
    world.transfers.load(1, [KEYS[0]], [4])
    (ended,) = world.ended()
    assert ended.done == (KEYS[0],)
    assert world.row(4) == b"\1" * ROW


def test_names_and_keys() -> None:
    (name, _), *_ = NAMING.names_of(KEYS[3])
    assert NAMING.key_of(str(name)) == KEYS[3]
    assert NAMING.key_of(str(name).replace("current", "another")) is None
    assert NAMING.key_of("current/zz/zz.0.safetensors") is None
    assert any_of([True, False, False, False], 2) == [True, False]
