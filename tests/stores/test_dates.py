"""Values with dates ahead of the clock, and with any other dates: what sweeps remove, and what stays."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.stores.backends.files import FileStore
from baton.stores.backends.sweep import LONE_KEEP_S, LOW_WATER, Limits, Sweeps, sweep
from baton.stores.backends.whole_file import TEMPORARY_PREFIX
from baton.stores.base.chunk_name import ChunkName, Keep, chunk_of, mark_of
from baton.stores.base.dates import AHEAD_S
from baton.stores.base.store import Parts, Stored
from tests.stores.slow_store import SlowStore

NOW_S = 1_700_000_000.0
YEAR_S = 365 * 86_400.0
NBYTES = 100
MAX_CHUNKS = 10


def name_of(number: int) -> str:
    return str(ChunkName("ns", number.to_bytes(4, "big"), 0))


class DatedStore(SlowStore):
    """A store in memory. `keeps_time`: `touch` has an effect, as in a folder; it has none in a bucket."""

    def __init__(self, *, keeps_time: bool) -> None:
        super().__init__()
        self.keeps_time = keeps_time
        self.dates: dict[str, float] = {}

    def write(self, name: str, parts: Parts) -> None:
        """Values are dated by the test."""

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self.dates.pop(name, None)

    def touch(self, name: str, used_s: float) -> None:
        if self.keeps_time:
            self.dates[name] = used_s

    def scan(self) -> Iterator[Stored]:
        return iter([Stored(name, NBYTES, date_s) for name, date_s in self.dates.items()])


ages_s = st.one_of(
    st.integers(-(10**12), -int(AHEAD_S) - 1),  # Dates ahead of now.
    st.just(0),
    st.integers(1, int(NOW_S)),
    st.integers(int(NOW_S) + 1, 10**12),  # Dates before 1970.
)


@given(ages=st.lists(ages_s, max_size=3 * MAX_CHUNKS), num_new=st.integers(1, 3), keeps_time=st.booleans())
def test_the_oldest_go_first_and_what_is_dated_ahead_counts_as_found_now(
    ages: list[int], num_new: int, keeps_time: bool
) -> None:
    store = DatedStore(keeps_time=keeps_time)
    # The order of eviction: by the date that counts, then by the one in the store.
    order: dict[str, tuple[float, float]] = {}

    def put(date_s: float, now_s: float) -> None:
        name = name_of(len(order))
        store.dates[name] = date_s
        order[name] = max(0.0, date_s if date_s <= now_s else now_s - 0.01), max(0.0, date_s)

    for age in ages:
        put(NOW_S - age, NOW_S)
    sweeps = Sweeps([(store, Limits(MAX_CHUNKS * NBYTES))])
    for minute in range(3 * MAX_CHUNKS):
        now_s = NOW_S + 60 * minute
        for number in range(num_new):
            put(now_s - 0.1 - number, now_s)
        present = sorted(store.dates, key=lambda name: order[name])
        excess = len(present) - int(LOW_WATER * MAX_CHUNKS) if len(present) > MAX_CHUNKS else 0
        sweeps.run(now_s)
        assert sorted(store.dates, key=lambda name: order[name]) == present[excess:]
    assert min(map(list(order).index, store.dates)) >= len(ages), (
        "only what was written after the first sweep"
    )


@given(ages=st.lists(ages_s, min_size=1, max_size=9), max_age_s=st.integers(60, 10**7), keeps=st.booleans())
def test_an_age_is_counted_from_the_first_sweep_at_the_latest(
    ages: list[int], max_age_s: int, keeps: bool
) -> None:
    store = DatedStore(keeps_time=keeps)
    store.dates = {name_of(number): NOW_S - age for number, age in enumerate(ages)}
    sweeps = Sweeps([(store, Limits(max_age_s=max_age_s))])
    sweeps.run(NOW_S)
    assert set(store.dates) == {name_of(number) for number, age in enumerate(ages) if age <= max_age_s}
    sweeps.run(NOW_S + max_age_s + 1)
    assert store.dates == {}


@given(ages_s, st.booleans())
def test_a_namespace_counts_as_used_now_at_the_latest(age: int, keeps_time: bool) -> None:
    """Neither a mark nor a keep without a chunk that is dated ahead lasts longer than one of now."""
    store = DatedStore(keeps_time=keeps_time)
    keep = Keep(9).name_of(chunk_of(name_of(1)))
    store.dates = {name: NOW_S - age for name in (mark_of("ns"), name_of(0), keep)}
    sweeps = Sweeps([(store, Limits(unused_namespaces_s=YEAR_S))])
    for now_s in (NOW_S, NOW_S + LONE_KEEP_S + 1):
        sweeps.run(now_s, ("own",))
    assert keep not in store.dates
    sweeps.run(NOW_S + YEAR_S + 1, ("own",))
    assert store.dates == {}


def test_what_a_clock_that_was_ahead_has_left_in_a_folder_is_evicted(tmp_path: Path) -> None:
    store = FileStore(tmp_path, fsync=False)
    aside = tmp_path / Path(name_of(0)).with_name(f"{TEMPORARY_PREFIX}x")
    for number in range(9):
        store.write(name_of(number), (bytes(NBYTES),))
        store.touch(name_of(number), NOW_S + YEAR_S + number)
    aside.write_bytes(b"")
    os.utime(aside, (NOW_S + YEAR_S, NOW_S + YEAR_S))
    for number in range(9, 30):  # Each sweep is that of an engine which has just started.
        now_s = NOW_S + 60 * number
        store.write(name_of(number), (bytes(NBYTES),))
        store.touch(name_of(number), now_s)
        sweep(store, Limits(MAX_CHUNKS * NBYTES), now_s=now_s)
    assert {stored.name for stored in store.scan()} >= {name_of(number) for number in range(22, 30)}
    assert not aside.exists()


@pytest.mark.parametrize("ahead", [1.0, AHEAD_S])
def test_dates_of_clocks_that_differ_a_little_stay(tmp_path: Path, ahead: float) -> None:
    store = FileStore(tmp_path, fsync=False)
    store.write(name_of(0), (b"x",))
    store.touch(name_of(0), NOW_S + ahead)
    assert sweep(store, Limits(10**6, max_age_s=1.0), now_s=NOW_S).num_evicted == 0
    assert [stored.used_s for stored in store.scan()] == [NOW_S + ahead]
    assert sweep(store, Limits(10**6, max_age_s=1.0), now_s=NOW_S + ahead + 2).num_evicted == 1
