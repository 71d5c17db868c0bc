"""Tests of the threads that the kit reports as leaked."""

import _thread
import threading

from baton.testing.contract.leaks import new_threads, running_threads


def test_a_running_thread_is_named() -> None:
    before, end = running_threads(), threading.Event()
    thread = threading.Thread(target=end.wait, name="saver")
    thread.start()
    try:
        assert new_threads(before, 0.0) == ["saver"]
    finally:
        end.set()
        thread.join()
    assert new_threads(before, 0.0) == []


def test_a_thread_that_python_did_not_start_is_ignored() -> None:
    before, known, end = running_threads(), threading.Event(), threading.Event()

    def run_a_method() -> None:
        threading.current_thread()  # Python now lists the thread, and it cannot be joined.
        known.set()
        end.wait()

    _thread.start_new_thread(run_a_method, ())
    assert known.wait(60.0)
    try:
        assert running_threads() - before
        assert new_threads(before, 0.0) == []
    finally:
        end.set()
