"""Threads of the pull connector's worker, and the delays between its attempts to connect."""

import threading

import pytest

from baton.connectors.pull.reads import background
from baton.connectors.pull.reads.background import Background
from baton.connectors.pull.reads.link import RETRY_FIRST_S, RETRY_MAX_S, STEADY_S, Attempts

PATIENCE_S = 30.0


def test_a_job_that_raises_does_not_affect_other_jobs() -> None:
    jobs, done = Background("baton-test"), threading.Event()

    def broken() -> None:
        raise ZeroDivisionError("a bug")

    jobs.run(broken)
    jobs.run(done.set)
    assert done.wait(PATIENCE_S)
    jobs.close(PATIENCE_S)


def test_no_more_threads_than_allowed_run_and_no_job_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "JOBS_MAX", 3)
    jobs, go = Background("baton-test"), threading.Event()
    done = threading.Semaphore(0)
    before = threading.active_count()

    def job() -> None:
        assert go.wait(PATIENCE_S)
        done.release()

    for _ in range(20):
        jobs.run(job)
    assert threading.active_count() - before == 3
    go.set()
    assert all(done.acquire(timeout=PATIENCE_S) for _ in range(20))
    jobs.close(PATIENCE_S)
    assert threading.active_count() == before


def test_a_thread_that_cannot_be_started_takes_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "JOBS_MAX", 1)
    jobs, done = Background("baton-test"), threading.Event()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as broken:
        broken.setattr(background, "start_owned_thread", fail)
        with pytest.raises(RuntimeError, match="start new thread"):
            jobs.run(done.set)
    jobs.run(done.set)
    assert done.wait(PATIENCE_S)
    jobs.close(PATIENCE_S)


def test_after_close_jobs_are_dropped() -> None:
    jobs, called = Background("baton-test"), threading.Event()
    jobs.close(0.0)
    jobs.run(called.set)
    assert not called.is_set()


def test_delays_grow_from_the_second_failure_on() -> None:
    attempts = Attempts()
    delays = []
    for _ in range(9):
        attempts.failed(now=100.0)
        delays.append(attempts.next_at - 100.0)
    assert delays[:4] == [0.0, RETRY_FIRST_S, 2 * RETRY_FIRST_S, 4 * RETRY_FIRST_S]
    assert delays[-1] == RETRY_MAX_S
    assert delays == sorted(delays)


def test_after_a_long_connection_delays_start_anew() -> None:
    attempts = Attempts(num_failed=5, next_at=200.0)
    attempts.lost(connected_at=100.0, now=100.0 + STEADY_S - 1)
    assert attempts.num_failed == 6
    attempts.lost(connected_at=100.0, now=100.0 + STEADY_S)
    assert (attempts.num_failed, attempts.next_at) == (1, 100.0 + STEADY_S)


def test_only_a_few_of_many_failures_are_logged() -> None:
    attempts = Attempts()
    logged = 0
    for _ in range(1000):
        attempts.failed(now=0.0)
        logged += attempts.is_news
    assert logged == 10
