"""The log of what happened in the fleet: bounded, joined, and told once to the coordinator."""

from baton.router.fleet.breaker import Probe
from baton.router.fleet.event_log import JOIN_S, TELL_EVERY_S, EventLog, Happened
from baton.router.fleet.fleet import Fleet
from baton.router.values.members import Member
from baton.router.values.settings import RouterSettings

D = ("decode", "http://d:1")


def refusal(why: str = "503: full", request_id: str = "r", count: int = 1) -> Happened:
    return Happened("refusal", None, why, request_id, count)


def test_equal_events_that_come_soon_are_one_entry_with_a_count() -> None:
    log = EventLog()
    for second in range(5):
        log.note(refusal(request_id=f"r{second}"), float(second))
    log.note(refusal(), JOIN_S + 1.0)
    first, second = log.last()
    assert (first["count"], first["unix_s"], first["last_unix_s"], first["request_id"]) == (5, 0.0, 4.0, "r4")
    assert (second["number"], second["count"]) == (2, 1)


def test_other_reasons_and_engines_have_entries_of_their_own() -> None:
    log = EventLog()
    for why in ("a", "b"):
        log.note(Happened("hedge", D, why), 1.0)
    log.note(Happened("hedge", ("decode", "http://e:1"), "b"), 1.0)
    assert [(one["engine"], one["why"]) for one in log.last()] == [
        ("http://d:1", "a"),
        ("http://d:1", "b"),
        ("http://e:1", "b"),
    ]


def test_the_log_forgets_its_oldest_entries() -> None:
    log = EventLog(max_entries=3)
    for number in range(10):
        log.note(refusal(f"{number}"), float(number))
    assert [one["number"] for one in log.last()] == [8, 9, 10]
    assert [one["number"] for one in log.last(1)] == [10]
    assert log.last(0) == []
    log.note(refusal("0"), 9.5)
    assert log.last()[-1]["count"] == 1  # The first entry of "0" was forgotten, so this is a new one.


def test_what_only_a_worker_has_seen_is_told_once_and_added_up() -> None:
    worker, coordinator = EventLog(), EventLog()
    for _ in range(3):
        worker.report(refusal(), 100.0)
    for happened in worker.take_untold(100.0):
        coordinator.note(happened, 100.0)
    assert coordinator.last()[0]["count"] == 3
    worker.report(refusal(), 100.1)
    assert worker.take_untold(100.0 + TELL_EVERY_S / 2) == []
    assert [one.count for one in worker.take_untold(100.0 + TELL_EVERY_S)] == [1]
    assert worker.take_untold(200.0) == []


def test_a_log_that_is_not_asked_keeps_a_bounded_number_of_reports() -> None:
    log = EventLog(max_entries=3)
    for number in range(10):
        log.report(refusal(f"{number}"), 1.0)
    assert len(log.take_untold(1.0)) == 3


def test_a_fleet_logs_what_becomes_of_its_engines() -> None:
    settings = RouterSettings(prefill_urls=("http://p:1",), decode_urls=("http://d:1",))
    fleet = Fleet(settings, unix_clock=lambda: 7.0)
    engine = fleet.find(("decode", "http://d:1"))
    assert engine is not None
    fleet.health.note_probe(engine, Probe("healthy"), 1.0)
    fleet.health.note_probe(engine, Probe("refused", "no connection"), 2.0)
    fleet.health.note_probe(engine, Probe("healthy"), 9.0)
    fleet.note_start(engine)
    fleet.drain(engine, 99.0, is_leaving=True)
    fleet.note_end(engine)
    fleet.add(Member("decode", "http://e:1"), 10.0)
    shown = [(one["kind"], one["engine"], one["why"]) for one in fleet.roster.log.last()]
    assert shown == [
        ("up", "http://d:1", ""),
        ("down", "http://d:1", "no connection"),
        ("up", "http://d:1", "answers again"),
        ("draining", "http://d:1", "then it is removed"),
        ("drained", "http://d:1", ""),
        ("removed", "http://d:1", ""),
        ("added", "http://e:1", ""),
    ]
