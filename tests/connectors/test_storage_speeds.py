"""Measured speeds of stores and of prefill, and the decision between loading and computing."""

from pathlib import Path

import pytest

from baton.connectors.storage.stores.speeds import IN_FLIGHT_MAX, STALE_S, Line, Read, Speeds, is_load_better
from baton.connectors.storage.stores.stats import StorageStats
from baton.stores.backends.tiers import Place
from tests.connectors.storage_world import CHUNK, files_in, wait_for
from tests.connectors.test_shared_storage_halves import EMPTY, TABLE, Halves, prefill_of, request_of

MIB = 1 << 20


def line_of(*points: tuple[float, float]) -> Line:
    line = Line()
    for amount, seconds in points:
        line.note(amount, seconds, now_s=0.0)
    return line


def test_latency_and_rate_are_told_apart_by_unlike_amounts() -> None:
    line = line_of((1, 0.11), (2, 0.12), (4, 0.14), (8, 0.18))  # 100 ms, and 10 ms for each.
    assert line.seconds_for(16, 0.0) == pytest.approx(0.26)
    assert line.seconds_for(0, 0.0) == pytest.approx(0.1)


def test_equal_amounts_give_a_ratio() -> None:
    assert line_of(*[(4, 0.2)] * 4).seconds_for(8, 0.0) == pytest.approx(0.4)


def test_a_line_that_would_have_a_negative_latency_is_a_ratio() -> None:
    line = line_of((1, 0.0), (2, 0.0), (4, 0.4), (8, 0.8))
    assert line.seconds_for(0, 0.0) == 0


def test_few_or_old_measurements_are_none() -> None:
    assert line_of(*[(4, 0.2)] * 3).seconds_for(8, 0.0) is None
    line = line_of(*[(4, 0.2)] * 4)
    assert line.seconds_for(8, STALE_S) is not None
    assert line.seconds_for(8, STALE_S + 1) is None
    line.note(4, 0.1, STALE_S + 1)
    assert line.seconds_for(8, STALE_S + 1) is None, "the old ones do not count again"


def test_what_was_measured_last_counts_most() -> None:
    line = line_of(*[(1, 1.0)] * 100)
    for second in range(1, 101):
        line.note(1, 0.1, now_s=float(second))
    seconds = line.seconds_for(1, 100.0)
    assert seconds is not None
    assert 0.1 < seconds < 0.4


def test_the_decision() -> None:
    assert is_load_better(None, 1.0, 0.0)
    assert is_load_better(1.0, None, 0.0)
    assert is_load_better(1.0, 0.1, None)
    assert is_load_better(1.0, 1.0, 0.1)
    assert not is_load_better(1.0, 0.8, 0.1)


def test_a_transcript_of_two_stores_and_a_prefill() -> None:
    speeds = Speeds(num_stores=2, num_threads=2)
    chunks = [Place(0, MIB), Place(0, MIB), Place(1, MIB)]
    speeds.note_reads([Read(0, MIB, 0.01)] * 4, now_s=0.0)
    assert speeds.load_s(chunks[:2], 1.0) == pytest.approx(0.01)
    assert speeds.load_s(chunks[:1], 1.0) == pytest.approx(0.01), "one thread reads it"
    assert speeds.load_s(chunks, 1.0) is None, "the second store was not measured"
    speeds.note_reads([Read(1, MIB, 0.4)] * 4, now_s=1.0)
    assert speeds.load_s(chunks, 2.0) == pytest.approx(0.4), "the slowest value"
    assert speeds.load_s([], 2.0) == 0

    assert speeds.compute_s(100, 2.0) is None
    now = 2.0
    for step in range(4):  # Each is planned while the one before it runs, and takes 100 ms.
        assert speeds.step_planned(step, [100], now_s=now)
        if step:
            speeds.step_ended([step - 1], now)
        now += 0.1
    speeds.step_ended([3], now)
    assert speeds.compute_s(50, now) == pytest.approx(0.05)


def test_steps_that_decode_or_fail_are_not_measured() -> None:
    speeds = Speeds(1, 1)
    assert not speeds.step_planned(1, [1, 1, 1], 0.0)
    assert not speeds.step_planned(2, [8], 0.0)
    assert not speeds.step_planned(3, [20, *[1] * 30], 0.0)
    assert speeds.step_planned(4, [100], 0.0)  # The ranks never report this step.
    assert speeds.step_planned(5, [100, 1], 1.0)
    speeds.step_ended([5], 2.0)
    assert not speeds._planned
    for step in range(100, 1000):
        speeds.step_planned(step, [100], 3.0)
    assert len(speeds._planned) <= IN_FLIGHT_MAX


def test_a_slow_store_is_computed_until_it_was_not_measured_for_long(tmp_path: Path) -> None:
    now = [1000.0]
    halves = Halves.start(tmp_path, recompute_if_faster_by_s=0.05, clock=lambda: now[0])
    halves.shake_hands()
    half = halves.scheduler
    first = request_of("first", 3 * CHUNK + 1)
    half.on_new_request(first)
    halves.step(prefill_of(first, first.num_tokens))
    halves.step(EMPTY)
    wait_for(lambda: len(files_in(tmp_path)) == 3)

    def num_matched(name: str) -> int | None:
        request = request_of(name, 3 * CHUNK + 1)
        half.on_new_request(request)
        wait_for(lambda: half.get_num_new_matched_tokens(request, 0)[0] is not None)
        matched, _ = half.get_num_new_matched_tokens(request, 0)
        half.update_state_after_alloc(request, TABLE, matched or 0)
        half.request_finished(request, [])
        return matched

    assert num_matched("new engine") == 3 * CHUNK
    for step in range(100, 104):
        half._speeds.step_planned(step, [3 * CHUNK], now[0])
        now[0] += 0.1
        half._speeds.step_ended([step], now[0])
    half._speeds.note_reads([Read(0, 100_000, 10.0)] * 4, now[0])
    assert num_matched("slow store") == 0
    counted = half.get_kv_connector_stats()
    assert isinstance(counted, StorageStats)
    assert counted.data["recomputed_tokens"] == 3 * CHUNK
    assert num_matched("again") == 0
    now[0] += STALE_S + 1
    assert num_matched("later") == 3 * CHUNK
    halves.close()
