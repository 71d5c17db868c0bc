"""Sweeps by priorities, TTLs, quotas of tenants and ended sessions; sizes at the start without a scan."""

import os
from pathlib import Path
from typing import Any

import pytest

from baton.stores.backends.files import FileStore
from baton.stores.backends.objects import ObjectStore
from baton.stores.backends.sweep import (
    LONE_KEEP_S,
    MARK_EVERY_S,
    TOTALS,
    Limits,
    Sweeps,
    Totals,
    read_totals,
    sweep,
)
from baton.stores.base.chunk_name import ChunkName, Keep, chunk_of, is_of_a_store, mark_of, parse_keep
from baton.stores.base.store import Store, StoreError

NOW_S = 10_000.0
UNUSED_S = 5000.0


def name_of(number: int) -> str:
    return str(ChunkName("ns", bytes([number]) * 4, 0))


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path, fsync=False)


def put(store: FileStore, number: int, *keeps: Keep, age_s: float) -> None:
    """A chunk of 100 bytes."""
    store.write(name_of(number), (bytes(100),))
    store.touch(name_of(number), NOW_S - age_s)
    for keep in keeps:
        store.write(keep.name_of(chunk_of(name_of(number))), (b"",))


def kept(store: FileStore) -> list[int]:
    return sorted(
        number for number, size in enumerate(store.sizes([name_of(n) for n in range(20)])) if size is not None
    )


@pytest.mark.parametrize("keep", [Keep(), Keep(-100, 10**9, "0a"), Keep(7, None, ""), Keep(0, 5)])
def test_a_keep_is_named_by_what_it_says(keep: Keep) -> None:
    name = keep.name_of(chunk_of(name_of(1)))
    assert parse_keep(name) == keep
    assert is_of_a_store(name)
    assert chunk_of(name) == chunk_of(name_of(1))


@pytest.mark.parametrize("name", [name_of(1), TOTALS, "ns/01/01010101.keep", "ns/01/01010101.1.2.keep"])
def test_other_names_are_no_keeps(name: str) -> None:
    assert parse_keep(name) is None


def test_the_lowest_priority_goes_first_then_the_oldest(store: FileStore) -> None:
    put(store, 0, age_s=50)
    put(store, 1, Keep(5), age_s=90)
    put(store, 2, Keep(-1), age_s=1)
    put(store, 3, age_s=60)
    order = []
    for limit in (399, 299, 222):
        evicted = sweep(store, Limits(limit), now_s=NOW_S).evicted
        order.append({int(name[3:5], 16) for name in evicted})
    assert order == [{2}, {3}, set()]
    assert {int(name[3:5], 16) for name in sweep(store, Limits(199), now_s=NOW_S).evicted} == {1}


def test_high_priorities_have_half_of_the_room(store: FileStore) -> None:
    for number in range(4):
        put(store, number, Keep(9), age_s=100 + number)
    put(store, 4, Keep(3), age_s=50)
    put(store, 5, age_s=70)
    sweep(store, Limits(500), now_s=NOW_S)
    assert kept(store) == [0, 1, 4, 5], "the lowest priority counts as 0 first, then the oldest"


def test_a_chunk_goes_when_its_ttl_is_over_whatever_its_priority(store: FileStore) -> None:
    put(store, 0, Keep(100, 60), age_s=61)
    put(store, 1, Keep(0, 60), age_s=59)
    put(store, 2, Keep(0, 60), Keep(0, 90), age_s=61)  # The longer TTL of two requests counts.
    put(store, 3, age_s=5000)
    assert sweep(store, Limits(10**6), now_s=NOW_S).num_evicted == 1
    assert kept(store) == [1, 2, 3]
    sweep(store, Limits(10**6, max_age_s=60), now_s=NOW_S)
    assert kept(store) == [1], "the store's own limit of age holds for all"


def test_a_tenant_over_its_quota_loses_its_own_chunks_only(store: FileStore) -> None:
    for number in range(6):
        put(store, number, Keep(0, None, "aa"), age_s=number)
    put(store, 6, Keep(0, None, "bb"), age_s=1000)
    put(store, 7, age_s=2000)
    put(store, 8, Keep(0, None, "aa"), Keep(0, None, "bb"), age_s=3000)  # Two tenants have stored it.
    sweep(store, Limits(10**6, tenant_max_bytes=400), now_s=NOW_S)
    assert kept(store) == [0, 1, 2, 6, 7, 8], "down to nine tenths of the quota"


def test_a_pinned_chunk_stays_over_a_quota(store: FileStore) -> None:
    put(store, 0, Keep(-5, 1, "aa"), age_s=99)
    store.write(f"{chunk_of(name_of(0))}.pin", (b"",))
    sweep(store, Limits(1, 1.0, 1), now_s=NOW_S)
    assert kept(store) == [0]


def test_a_keep_without_a_chunk_is_removed_later(store: FileStore) -> None:
    lone = Keep(9).name_of(chunk_of(name_of(0)))
    store.write(lone, (b"",))
    store.touch(lone, NOW_S - LONE_KEEP_S)
    sweep(store, Limits(10**6), now_s=NOW_S)
    assert store.sizes([lone]) == [0]
    sweep(store, Limits(10**6), now_s=NOW_S + 1)
    assert store.sizes([lone]) == [None]


def test_a_request_is_kept_as_the_limits_of_each_store_need(store: FileStore, tmp_path: Path) -> None:
    other = FileStore(tmp_path / "other", fsync=False)
    sweeps = Sweeps([(store, Limits(10**6)), (other, Limits(10**6, tenant_max_bytes=400))])
    chunk = chunk_of(name_of(0))
    for _ in range(2):
        sweeps.keep([chunk], Keep(0, None, "aa"))
        sweeps.keep([chunk], Keep(3, 60, "aa"))
    names = [[stored.name for stored in each.scan()] for each in (store, other)]
    assert names[0] == [Keep(3, 60).name_of(chunk)], "without quotas the tenant is of no use"
    assert sorted(names[1]) == [Keep(0, None, "aa").name_of(chunk), Keep(3, 60, "aa").name_of(chunk)]


def test_chunks_of_an_ended_session_go_first_until_they_are_used(store: FileStore) -> None:
    keep = Keep(3)
    for number in range(3):
        put(store, number, keep, age_s=number)
    sweeps = Sweeps([(store, Limits(600))])
    sweeps.end([chunk_of(name_of(n)) for n in (0, 1)], [name_of(0), name_of(1)], keep)
    store.touch(name_of(1), NOW_S)
    put(store, 3, age_s=9000)
    sweep(store, Limits(399), now_s=NOW_S)
    assert kept(store) == [1, 2, 3]


def test_an_ended_session_leaves_no_keep_of_its_last_request(store: FileStore) -> None:
    """Neither of the chunks that it stored nor of those that it used; keeps of other requests stay."""
    sweeps = Sweeps([(store, Limits(10**6, tenant_max_bytes=400))])
    chunk, keep, other = chunk_of(name_of(0)), Keep(5, 60, "aa"), Keep(9)
    for each in (keep, keep.raised(), other):
        sweeps.keep([chunk], each)
    sweeps.end([chunk], [], keep)
    assert [stored.name for stored in store.scan()] == [other.name_of(chunk)]


# --- Namespaces ------------------------------------------------------------------------------------


def put_in(store: Store, namespace: str, *, marked_s: float | None = None, used_s: float) -> str:
    name = str(ChunkName(namespace, b"\1" * 4, 0))
    store.write(name, (bytes(100),))
    store.touch(name, used_s)
    if marked_s is not None:
        store.write(mark_of(namespace), (b"",))
        store.touch(mark_of(namespace), marked_s)
    return name


def marks_of(store: Store) -> dict[str, float]:
    return {one.name: one.used_s for one in store.scan() if one.name.endswith(".mark")}


def test_chunks_of_a_namespace_that_no_engine_uses_are_removed(store: FileStore) -> None:
    old = NOW_S - UNUSED_S - 1
    gone = put_in(store, "gone", marked_s=old, used_s=old)
    pinned = put_in(store, "pinned", marked_s=old, used_s=old)
    store.write(f"{chunk_of(pinned)}.pin", (b"",))
    store.touch(f"{chunk_of(pinned)}.pin", old)
    stay = [
        pinned,
        put_in(store, "own", marked_s=old, used_s=old),
        put_in(store, "marked", marked_s=NOW_S - 1, used_s=old),
        put_in(store, "used", marked_s=old, used_s=NOW_S - 1),
        put_in(store, "unmarked", used_s=old),
    ]
    limits = Limits(unused_namespaces_s=UNUSED_S)
    assert sweep(store, limits, now_s=NOW_S).evicted == [], "an engine does not know its own yet"
    swept = sweep(store, limits, now_s=NOW_S, own=("own",))
    assert (swept.evicted, swept.num_kept, swept.error) == ([gone], len(stay), "")
    assert None not in store.sizes(stay)
    assert marks_of(store).keys() == {mark_of(name) for name in ("pinned", "own", "marked", "used")}


def test_a_sweep_of_any_limits_marks_what_its_engine_uses(store: FileStore) -> None:
    own = ("used", "empty")
    put_in(store, "used", used_s=1.0)
    put_in(store, "another", used_s=1.0)
    sweep(store, Limits(10**6), now_s=NOW_S, own=own)
    assert marks_of(store).keys() == {mark_of("used")}, "what has no chunks needs no mark"
    for age_s, is_renewed in ((MARK_EVERY_S, False), (MARK_EVERY_S + 1, True)):
        store.touch(mark_of("used"), NOW_S - age_s)
        sweep(store, Limits(10**6), now_s=NOW_S, own=own)
        assert (marks_of(store)[mark_of("used")] != NOW_S - age_s) == is_renewed


def test_a_namespace_that_cannot_be_marked_is_not_removed_by_its_engine(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full; or the bucket cannot be written to."""
    put_in(store, "own", marked_s=1.0, used_s=1.0)
    monkeypatch.setattr(
        store, "write_all", lambda values: [StoreError("no space left") for _ in values], raising=True
    )
    assert sweep(store, Limits(unused_namespaces_s=UNUSED_S), now_s=NOW_S, own=("own",)).evicted == []


def test_unused_namespaces_of_a_bucket_are_removed() -> None:
    """A bucket keeps no time of use: the date is that of the write."""
    store = ObjectStore("memory:///", timeout_s=1.0)
    names = [put_in(store, name, marked_s=0.0, used_s=0.0) for name in ("gone", "own")]
    dates = [one.used_s for one in store.scan()]
    limits = Limits(unused_namespaces_s=UNUSED_S)
    assert sweep(store, limits, now_s=min(dates) + UNUSED_S, own=("own",)).evicted == []
    assert sweep(store, limits, now_s=max(dates) + UNUSED_S + 1, own=("own",)).evicted == [names[0]]
    assert [one.name for one in store.scan() if one.name.startswith("gone")] == []


# --- Totals -----------------------------------------------------------------------------------------


def test_a_start_knows_the_sizes_without_a_scan(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        put(store, number, age_s=number)
    limits = Limits(10**6)
    assert (swept := Sweeps([(store, limits)]).run(NOW_S)).num_kept == 5
    put(store, 5, age_s=1)
    calls: list[str] = []

    def counted(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    for name in ("open", "readv", "close", "fstat", "stat", "scandir", "replace", "unlink", "fsync"):
        counted(name)
    restarted = Sweeps([(store, limits)])
    known = restarted.run(NOW_S)
    assert (known.num_kept, known.kept_bytes) == (swept.num_kept, swept.kept_bytes) == (5, 500)
    assert calls == ["open", "fstat", "readv", "close"], "of one file, however many chunks there are"
    assert restarted.run(NOW_S).num_kept == 6, "the next run counts"
    assert "scandir" in calls
    assert read_totals(store) == Totals(6, 600)


def test_totals_are_written_only_if_they_have_changed(store: FileStore) -> None:
    put(store, 0, age_s=1)
    sweep(store, Limits(10**6), now_s=NOW_S)
    before = os.stat(store.folder / TOTALS).st_ino
    sweep(store, Limits(10**6), now_s=NOW_S)
    assert os.stat(store.folder / TOTALS).st_ino == before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"chunks": "1", "bytes": 1}',
        b'{"chunks": -1, "bytes": 1}',
        b"\xff" * 9,
        b" " * 5000,
    ],
)
def test_a_store_with_bad_totals_is_swept_at_the_start(store: FileStore, content: bytes) -> None:
    put(store, 0, age_s=1)
    store.write(TOTALS, (content,))
    assert read_totals(store) is None
    assert Sweeps([(store, Limits(10**6))]).run(NOW_S).num_kept == 1
    assert read_totals(store) == Totals(1, 100)


def test_a_store_that_takes_no_totals_is_swept(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, 0, age_s=1)

    def full(name: str, parts: object) -> None:
        raise StoreError("no space left")

    monkeypatch.setattr(store, "write", full)
    assert Sweeps([(store, Limits(10**6))]).run(NOW_S).num_kept == 1
