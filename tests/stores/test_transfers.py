"""Jobs of chunks between memory and stores: partial success, faults within a call, deadlines, backlog.

`test_stores.test_jobs_over_each_store` has the real servers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.connectors.jobs import Jobs
from baton.stores.backends.files import FileStore
from baton.stores.backends.objects import ObjectStore
from baton.stores.base.store import Store, StoreError, Unusable
from baton.stores.chunks.transfers import MIB, Copy
from tests.stores.slow_store import WAIT_S, SlowStore
from tests.stores.transfers_world import NAMES, NUM_ROWS, ROW, World, damage, meanwhile

OPENED = {
    "files": FileStore,
    "objects": lambda folder: ObjectStore("memory:///", timeout_s=WAIT_S),
    "slow": lambda _: SlowStore(),
}


@pytest.fixture(params=OPENED)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    store: Store = OPENED[request.param](tmp_path)
    store.check()
    return store


@pytest.fixture
def slow() -> Iterator[SlowStore]:
    store = SlowStore()
    yield store
    store.release()


# --- Any store --------------------------------------------------------------------------------------


def test_what_was_stored_is_found_and_loaded_into_other_rows(store: Store) -> None:
    world = World(store)
    world.fill_stores(0, 1)
    assert world.found(0, 1, 2) == [True, True, False]
    world.load("job", (0, 7), (1, 3))
    (ended,) = world.ended()
    assert (ended.job_id, ended.kind) == ("job", "load")
    assert [outcome.chunk for outcome in ended.outcomes] == [(0, 7), (1, 3)]
    assert {outcome.store for outcome in ended.outcomes} == {0}
    assert world.contents() == [0, 0, 0, 2, 0, 0, 0, 1]


@pytest.mark.parametrize("is_prefix", [False, True])
def test_damaged_and_missing_chunks_fail_alone_and_leave_their_rows(store: Store, is_prefix: bool) -> None:
    world = World(store)
    world.fill_stores(0, 1, 3)
    damage(store, world.name_of(1))
    world.load("job", (0, 4), (1, 5), (2, 6), (3, 7), places=range(4) if is_prefix else ())
    outcomes = world.outcomes()
    if is_prefix:
        assert [outcome.reason for outcome in outcomes] == [None, "corrupt", "unneeded", "unneeded"]
        assert world.contents()[4:] == [1, 0, 0, 0]
    else:
        assert [outcome.reason for outcome in outcomes] == [None, "corrupt", "gone", None]
        assert [outcome.is_lost for outcome in outcomes] == [False, True, True, False]
        assert world.contents()[4:] == [1, 0, 0, 4]
    assert store.sizes([world.name_of(1)]) == [None], "an unusable copy is removed"


FAULTS: dict[str, Callable[[World], Any]] = {
    "timeout": lambda world: world.pass_time(5.0),  # The read times out.
    "cancelled": lambda world: world.transfers.cancel("job"),
    "shutdown": lambda world: world.transfers._give_up_all("load"),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_a_read_that_ends_too_late_never_writes_its_row(store: Store, reason: str) -> None:
    world = World(store, read_timeout_s=5.0)
    world.fill_stores(0)

    def happen() -> None:
        FAULTS[reason](world)
        (ended,) = world.transfers.take_ended()
        assert [outcome.reason for outcome in ended.outcomes] == [reason]
        world.rows[4][:] = b"\x09" * ROW  # The caller gives the row to another chunk.

    meanwhile(store, "read", happen)
    world.load("job", (0, 4))
    assert world.ended() == [], "it ends once"
    assert world.contents()[4] == 9


def test_a_copy_that_runs_is_waited_for(store: Store) -> None:
    world = World(store, read_timeout_s=5.0)
    world.fill_stores(0)

    def install(chunk: tuple[int, int], body: memoryview) -> None:
        world.pass_time(20.0)
        world.transfers.cancel("job")
        assert world.transfers.take_ended() == []
        world.install(chunk, body)

    world.transfers.load("job", [(0, 4), (0, 5)], install)
    assert world.reasons() == [None, "timeout"]
    assert world.contents()[4:6] == [1, 0]


def test_chunks_that_no_thread_has_begun_fail_at_the_deadline(store: Store) -> None:
    world = World(store)
    world.fill_stores(0)
    world.load("load", (0, 4), (0, 5))
    world.store("store", (1, 0))
    world.pass_time(10.0)
    assert [job.job_id for job in world.transfers.take_ended()] == ["load"]
    world.pass_time(20.0)
    assert [job.job_id for job in world.transfers.take_ended()] == ["store"]
    assert world.ended() == []
    assert world.contents()[4] == 0
    assert world.transfers._states.backlog_bytes == 0
    assert store.sizes([world.name_of(1)]) == [None]


def test_nothing_waits_for_readers_that_all_hang(store: Store) -> None:
    world = World(store, read_timeout_s=5.0)
    world.fill_stores(0)

    def hang() -> None:
        assert not world.transfers.is_stuck
        world.pass_time(5.0)
        assert world.transfers.is_stuck
        assert [job.job_id for job in world.transfers.take_ended()] == ["hangs", "queued"]
        world.load("late", (0, 5))
        assert [job.job_id for job in world.transfers.take_ended()] == ["late"]
        world.load("ahead", (0, 5), is_ahead=True)

    meanwhile(store, "read", hang)
    world.load("hangs", (0, 4))
    world.load("queued", (0, 6))
    world.store("store", (1, 0))
    assert {job.job_id: job.outcomes[0].reason for job in world.ended()} == {"store": None, "ahead": None}
    assert not world.transfers.is_stuck
    world.load("after", (0, 4))
    assert world.reasons() == [None]


def test_a_reader_that_hangs_costs_its_chunk_only(store: Store) -> None:
    world = World(store, read_timeout_s=5.0, io_threads=2)  # The other one is idle.
    world.fill_stores(0, 1)
    meanwhile(store, "read", lambda: world.pass_time(5.0))
    world.load("job", (0, 4), (1, 5))
    assert world.reasons() == ["timeout", None]
    assert world.contents()[4:6] == [0, 2]


def test_a_write_that_hangs_gives_its_row_back_at_its_deadline(store: Store) -> None:
    world = World(store, store_timeout_s=3.0)
    world.rows[0][:] = b"\1" * ROW

    def hang() -> None:
        world.pass_time(3.0)
        assert [outcome.reason for outcome in world.transfers.take_ended()[0].outcomes] == ["timeout"]
        world.rows[0][:] = b"\2" * ROW  # The row is another chunk's.
        world.store("late", (1, 1))
        assert [job.job_id for job in world.transfers.take_ended()] == ["late"], "the writer hangs"

    meanwhile(store, "write_all", hang)
    world.store("job", (0, 0))
    assert world.ended() == []
    assert world.transfers._states.backlog_bytes == 0
    world.load("load", (0, 5))
    assert world.reasons() == [None], "it was written after all, as it was when it was copied"
    assert world.contents()[5] == 1


def test_a_store_that_is_late_while_its_row_is_copied_ends_after_the_copy(store: Store) -> None:
    world = World(store, store_timeout_s=3.0)

    def fill(chunk: tuple[int, int], body: memoryview) -> None:
        world.pass_time(3.0)
        assert world.transfers.take_ended() == []

    def write() -> None:
        assert world.transfers.take_ended()[0].outcomes[0].reason == "timeout"

    meanwhile(store, "write_all", write)
    world.transfers.store("job", [Copy((0, 0), world.form_of((0, 0)))], fill)
    assert world.ended() == []


def test_copies_are_stored_or_dropped_later(store: Store) -> None:
    world = World(store, backlog_max_mib=1)
    world.rows[0][:] = b"\1" * ROW
    copies = []
    while (copy := world.transfers.copy((len(copies), 0), world.fill)) is not None:
        copies.append(copy)
    assert len(copies) == MIB // ROW
    world.rows[0][:] = bytes(ROW)
    world.transfers.store("job", copies[:20])  # These are more than are synchronised together.
    world.transfers.drop(copies[20:])
    assert world.reasons() == [None] * 20
    assert world.transfers._states.backlog_bytes == 0
    world.load("load", (19, 5), (20, 6))
    assert world.reasons() == [None, "gone"]
    assert world.contents()[5:7] == [1, 0]


# --- Reasons ----------------------------------------------------------------------------------------


def test_chunks_beyond_the_backlog_are_not_stored(slow: SlowStore) -> None:
    world = World(slow, backlog_max_mib=1)
    world.store("job", *[(number, 0) for number in range(MIB // ROW + 2)])
    assert world.reasons()[-3:] == [None, "backlog", "backlog"]
    assert world.transfers._states.backlog_bytes == 0


def test_a_copy_that_fails_does_not_count_to_the_backlog(slow: SlowStore) -> None:
    def fail(chunk: tuple[int, int], body: memoryview) -> None:
        raise RuntimeError

    world = World(slow)
    with pytest.raises(RuntimeError):
        world.transfers.copy((0, 0), fail)
    assert world.transfers._states.backlog_bytes == 0


def test_a_full_store_fails_its_chunks_and_is_logged_at_intervals(
    slow: SlowStore, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(slow)
    slow.is_full = True
    for number in range(11):
        world.store("job", (number, 0))
        assert world.reasons() == ["io"]
        world.now += 5.0
    told = [record.getMessage().partition(",")[0] for record in caplog.records]
    assert told == ["could not write 1 chunks", "could not write 6 chunks"]


@pytest.mark.parametrize(
    ("error", "reason"), [(StoreError("gone"), "failed"), (Unusable("io"), "io"), (RuntimeError(), "failed")]
)
def test_an_error_fails_its_chunk_only(slow: SlowStore, error: Exception, reason: str) -> None:
    def fail() -> None:
        raise error

    world = World(slow)
    world.fill_stores(0, 1)
    meanwhile(slow, "read", fail)
    world.load("load", (0, 4), (1, 5))
    assert world.reasons() == [reason, None]
    meanwhile(slow, "write", fail)
    world.store("store", (2, 0))
    world.store("store", (3, 0))
    assert world.reasons() == ["io" if isinstance(error, OSError) else "failed", None]


def test_a_row_that_does_not_exist_fails_its_chunk_only(slow: SlowStore) -> None:
    world = World(slow)
    world.fill_stores(0)
    world.load("load", (0, NUM_ROWS), (0, 4))
    world.store("store", (1, NUM_ROWS))
    world.store("store", (2, 0))
    assert world.reasons() == ["failed", None, "failed", None]
    assert world.transfers._states.backlog_bytes == 0


def test_dead_threads_fail_what_waits_for_them(slow: SlowStore) -> None:
    world = World(slow)
    world.load("before", (0, 4))
    for threads in world.threads:
        threads.is_dead = True  # type: ignore[misc]
    world.transfers.expire(0.0)
    world.load("load", (0, 4))
    world.store("store", (0, 4))
    copy = world.transfers.copy((0, 4), world.fill)
    assert copy is not None
    world.transfers.store("copy", [copy])
    assert [job.outcomes[0].reason for job in world.transfers.take_ended()] == ["failed"] * 4
    assert world.transfers.is_stuck
    assert world.transfers._states.backlog_bytes == 0


def test_jobs_without_chunks_end_at_once(slow: SlowStore) -> None:
    world = World(slow)
    world.load("load")
    world.store("store")
    assert [job.outcomes for job in world.transfers.take_ended()] == [(), ()]


# --- Order, memory, several stores ------------------------------------------------------------------


def test_the_beginning_of_a_loaded_prompt_is_evicted_last(slow: SlowStore) -> None:
    world = World(slow)
    world.fill_stores(0, 1, 2)
    world.load("job", (0, 4), (1, 5), (2, 6))
    world.run()
    used_s = [slow.touched[world.name_of(number)] for number in range(3)]
    assert used_s[0] > used_s[1] > used_s[2]


def test_what_is_in_memory_is_not_read(slow: SlowStore) -> None:
    world = World(slow, held={0: b"\7" * ROW})
    world.load("job", (0, 4))
    (outcome,) = world.outcomes()
    assert (outcome.reason, outcome.store) == (None, None)
    assert world.contents()[4] == 7
    assert world.name_of(0) in slow.touched


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_chunk_of_a_slow_store_is_copied_to_the_fast_one(
    slow: SlowStore, encrypt: bool, is_ahead: bool
) -> None:
    fast = SlowStore()
    world = World(fast, slow, encrypt=encrypt)
    world.fill_stores(0)
    fast.values.clear()
    world.load("job", (0, 4), is_ahead=is_ahead)
    loaded, promoted = world.ended()
    assert (loaded.kind, loaded.outcomes[0].store) == ("ahead" if is_ahead else "load", 1)
    assert (promoted.kind, promoted.outcomes[0].num_written) == ("promote", 1)
    assert (b"\1" * 100 in fast.values[world.name_of(0)]) is not encrypt
    assert (world.name_of(0) in slow.touched) is not is_ahead
    slow.values.clear()
    world.load("again", (0, 5))
    assert world.reasons() == [None]
    assert world.contents()[4:6] == [1, 1]


def test_nothing_waits_for_a_writer_that_hangs_in_the_fast_store(slow: SlowStore) -> None:
    fast = SlowStore()
    world = World(fast, slow)
    world.fill_stores(0)
    fast.values.clear()

    def hang() -> None:
        world.pass_time(30.0)
        world.store("job", (1, 0))
        world.transfers.drain()  # Draining does not wait for the writer, either.
        assert [job.job_id for job in world.transfers.take_ended()] == ["load", "job"]

    meanwhile(fast, "write", hang)
    world.load("load", (0, 4))
    world.run()


def test_chunks_of_the_previous_secret_are_found_and_loaded(slow: SlowStore) -> None:
    old = ("old", b"o" * 32)
    World(slow, names=[old]).fill_stores(0)
    world = World(slow, names=[NAMES, old])
    assert world.found(0, 1) == [True, False]
    world.load("job", (0, 4))
    assert world.reasons() == [None]
    assert world.contents()[4] == 1


def test_close_writes_what_waits_and_loads_no_more(slow: SlowStore) -> None:
    world = World(slow)
    world.fill_stores(0)
    world.load("load", (0, 4))
    world.store("store", (1, 0))
    world.transfers.close()
    assert world.reasons() == ["shutdown", None]
    assert world.contents()[4] == 0
    assert world.name_of(1) in slow.values


# --- Threads ----------------------------------------------------------------------------------------


def test_drain_waits_for_all_jobs_and_close_gives_up_what_hangs(slow: SlowStore) -> None:
    world = World(slow, threads=lambda: Jobs("of a test"), shutdown_timeout_s=0.0)
    world.rows[0][:] = b"\1" * ROW
    slow.hold()
    world.store("job", (0, 0))
    slow.wait_held()
    drained = threading.Thread(target=world.transfers.drain)
    drained.start()
    assert drained.is_alive()
    slow.release()
    drained.join(WAIT_S)
    assert [job.job_id for job in world.transfers.take_ended()] == ["job"]
    slow.hold()
    world.load("hangs", (0, 4))
    world.store("waits", (1, 0))
    slow.wait_held()
    slow.wait_held()
    world.transfers.close()
    ended = {job.job_id: job.outcomes[0].reason for job in world.transfers.take_ended()}
    assert ended == {"hangs": "shutdown", "waits": "shutdown"}
    assert world.contents()[4] == 0
