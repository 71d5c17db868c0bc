"""Owned threads, and operations that end exactly once."""

import logging
import os
import threading

import pytest

from baton.transport.base.completions import CompletionQueue
from baton.transport.base.threads import Spread, join_all, start_owned_thread

TIMEOUT_S = 30.0


def test_the_owner_is_told_of_its_threads_death(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[BaseException] = []

    def die() -> None:
        raise ZeroDivisionError("a bug")

    thread = start_owned_thread("baton-test", die, on_death=heard.append)
    join_all([thread], TIMEOUT_S)
    assert [type(error) for error in heard] == [ZeroDivisionError]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_thread_started_on_one_core_may_use_all_of_them_again() -> None:
    seen: list[set[int]] = []
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        thread = start_owned_thread(
            "baton-test", lambda: seen.append(os.sched_getaffinity(0)), on_death=lambda _: None
        )
        join_all([thread], TIMEOUT_S)
    finally:
        os.sched_setaffinity(0, before)
    assert seen[0] >= before


def test_the_kernel_knows_a_thread_by_its_name() -> None:
    names: list[str] = []

    def read_name() -> None:
        with open(f"/proc/self/task/{threading.get_native_id()}/comm") as comm:
            names.append(comm.read().strip())

    join_all([start_owned_thread("baton-a-long-name", read_name, on_death=lambda _: None)], TIMEOUT_S)
    assert names == ["baton-a-long-na"]


def test_a_thread_runs_even_if_its_affinity_cannot_be_set(caplog: pytest.LogCaptureFixture) -> None:
    ran = threading.Event()
    thread = start_owned_thread("baton-test", ran.set, on_death=lambda _: None, cpus={4095})
    join_all([thread], TIMEOUT_S)
    assert ran.is_set()
    assert "affinity" in caplog.text


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one CPU")
@pytest.mark.parametrize("num_threads", [1, 2, 1 + len(os.sched_getaffinity(0))])
def test_threads_are_woken_on_cpus_of_their_own_and_may_then_use_all(num_threads: int) -> None:
    spread, go = Spread(), threading.Event()
    asleep = threading.Barrier(num_threads + 1)
    after: list[set[int]] = []

    def run() -> None:
        spread.sleeps()
        asleep.wait(TIMEOUT_S)
        assert go.wait(TIMEOUT_S)
        spread.woke()
        after.append(os.sched_getaffinity(0))

    threads = [
        start_owned_thread(f"baton-test-{number}", run, on_death=lambda _: None)
        for number in range(num_threads)
    ]
    asleep.wait(TIMEOUT_S)
    all_cpus = os.sched_getaffinity(threads[0].native_id or 0)
    spread.before_waking()
    bound = [os.sched_getaffinity(thread.native_id or 0) for thread in threads]
    go.set()
    join_all(threads, TIMEOUT_S)
    if num_threads == 2:
        assert sorted([*bound[0], *bound[1]]) == sorted(all_cpus), "each has its share"
    else:
        assert bound == [all_cpus] * num_threads
    assert after == [all_cpus] * num_threads


def test_an_operation_that_ends_twice_is_a_bug() -> None:
    queue = CompletionQueue()
    op = queue.open()
    queue.finish(op, nbytes=1)
    with pytest.raises(AssertionError, match="ended twice"):
        queue.finish(op, nbytes=1)


def test_a_waiter_is_woken_by_the_end_of_an_operation() -> None:
    queue = CompletionQueue()
    op = queue.open()
    woken: list[bool] = []
    thread = start_owned_thread(
        "baton-test", lambda: woken.append(queue.wait(TIMEOUT_S)), on_death=lambda _: None
    )
    queue.finish(op, nbytes=0, error="why not")
    join_all([thread], TIMEOUT_S)
    assert woken == [True]
    (completion,) = queue.poll()
    assert (completion.op, completion.ok, completion.error) == (op, False, "why not")
    assert completion.duration_s >= 0
