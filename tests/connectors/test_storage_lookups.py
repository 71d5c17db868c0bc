"""The thread of lookups: one that hangs, fails or is cancelled."""

import threading

import pytest

from baton.connectors.storage.stores.lookup_thread import LookupThread
from baton.stores.base.store import StoreError
from baton.stores.chunks.transfers import TransferSettings
from tests.connectors.storage_world import WAIT_S, wait_for

SETTINGS = TransferSettings(lookup_timeout_s=1.0)


def test_while_a_lookup_hangs_beyond_its_deadline_no_other_begins() -> None:
    thread, goes_on = LookupThread("nothing", SETTINGS), threading.Event()

    def hang() -> str:
        goes_on.wait(WAIT_S)
        return "late"

    first = thread.begin(hang, now=0.0)
    second = thread.begin(lambda: "in turn", now=0.5)
    assert not thread.is_overdue(1.4)
    assert thread.begin(lambda: "never", now=1.5).result(1.5) == "nothing"
    assert (first.result(0.9), first.result(1.0)) == (None, "nothing")
    goes_on.set()
    wait_for(lambda: not thread.is_overdue(1.5))
    assert (first.found, second.found) == ("late", "in turn")
    third = thread.begin(lambda: "again", now=1.5)
    thread.close()
    assert third.found == "again"


@pytest.mark.parametrize("error", [StoreError("no answer"), TypeError("a bug")])
def test_a_lookup_that_fails_finds_nothing(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    thread = LookupThread("nothing", SETTINGS)

    def fail() -> str:
        raise error

    failed, cancelled, good = (thread.begin(find, now=0.0) for find in (fail, fail, lambda: "found"))
    cancelled.is_cancelled = True
    thread.close()
    assert (failed.found, cancelled.found, good.found) == ("nothing", "nothing", "found")
    assert "a lookup failed" in caplog.text
