"""The queue in front of the engines: caps, order, shares, deadlines; beside a brute-force twin."""

from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import UserError
from baton.router.fleet.admission import (
    OUTPUT_WEIGHT,
    Admission,
    Capacity,
    Ended,
    Objective,
    Ticket,
    objective_of,
)
from baton.router.request.events import Admitted, Rejected, tell_ended
from baton.router.values.errors import RouterError
from baton.router.values.settings import AdmissionSettings

SETTINGS = AdmissionSettings(max_running=1)


def ticket(tenant: str = "", priority: int = 0, *, ends_s: float = inf, num_tokens: int = 1) -> Ticket:
    return Ticket("", priority, tenant, 0.0, ends_s, num_tokens, 0.0)


def admission(num_requests: float = 1, num_with_room: float = inf, **settings: Any) -> Admission:
    chosen = AdmissionSettings(**{"max_running": 1, **settings})
    return Admission(chosen, lambda pool, priority: Capacity(num_requests, 0, num_with_room))


def order_of(queue: Admission, tickets: list[Ticket]) -> list[Ticket]:
    """One place that is taken at first; each one that gets it leaves at once."""
    first = ticket("the first")
    assert queue.ask(first, 0.0) is None
    for one in tickets:
        assert queue.ask(one, 0.0) == []
    queue.leave(first, 0.0)
    found = []
    while ended := queue.pump(0.0):
        assert [error for _, error in ended] == [None]
        found.append(ended[0].ticket)
        queue.leave(ended[0].ticket, 0.0)
    return found


def test_with_room_nobody_waits() -> None:
    queue = admission(num_requests=2)
    assert queue.ask(ticket(), 0.0) is None
    assert queue.ask(ticket(), 0.0) is None
    assert queue.ask(ticket(), 0.0) == []
    assert queue.num_waiting == 1


def test_less_priority_goes_earlier() -> None:
    tickets = [ticket(priority=priority) for priority in (5, 0, -3, 5)]
    assert order_of(admission(), tickets) == [tickets[2], tickets[1], tickets[0], tickets[3]]


def test_the_earliest_deadline_of_a_tenant_goes_first() -> None:
    tickets = [ticket(ends_s=ends_s) for ends_s in (30.0, 10.0, 20.0)]
    assert order_of(admission(), tickets) == [tickets[1], tickets[2], tickets[0]]


def test_tenants_take_turns_whatever_they_send() -> None:
    many, few = [ticket("many") for _ in range(6)], [ticket("few") for _ in range(3)]
    found = order_of(admission(), many + few)
    assert [one.tenant for one in found[:6]].count("few") == 3


def test_a_tenant_with_a_double_share_gets_twice_the_tokens() -> None:
    tickets = [ticket(name, num_tokens=10) for name in "ab" for _ in range(12)]
    found = order_of(admission(shares=(("a", 2.0),)), tickets)
    assert [one.tenant for one in found[:12]].count("a") == 8


def test_long_answers_count() -> None:
    """A tenant whose answers are longer than expected waits longer the next time."""
    queue = admission()
    first, *later = [ticket("long"), ticket("long"), ticket("short")]
    assert queue.ask(first, 0.0) is None
    for one in later:
        queue.ask(one, 0.0)
    queue.leave(first, 1.0, num_output=1000)
    (ended,) = queue.pump(1.0)
    assert ended.ticket is later[1]


def test_an_engine_with_room_gets_one_prompt_until_it_is_known_to_have_it() -> None:
    queue = admission(num_requests=inf, num_with_room=1)
    first, second = ticket(), ticket()
    assert queue.ask(first, 0.0) is None
    assert queue.ask(second, 0.0) == []
    assert queue.pump(0.0) == []
    queue.note_start(first)  # The capacity says from now on whether there is room for another one.
    assert queue.pump(0.0) == [Ended(second, None)]


def test_engines_by_priority_have_room_for_an_urgent_prompt() -> None:
    room_for = {0: 1, 1: 0}
    settings = AdmissionSettings(max_tokens=1, by_priority=True)
    queue = Admission(settings, lambda pool, priority: Capacity(inf, 0, room_for[priority]))
    late, urgent = ticket(priority=1), ticket(priority=0)
    assert queue.ask(late, 0.0) == []
    assert queue.ask(urgent, 0.0) is None
    assert queue.ask(ticket(priority=0), 0.0) == [], "the room is taken"


def test_the_first_in_the_queue_is_not_passed() -> None:
    queue = admission(num_requests=inf, num_with_room=1)
    running = ticket()
    queue.ask(running, 0.0)
    long, short = ticket(num_tokens=1000, ends_s=5.0), ticket(num_tokens=1, ends_s=6.0)
    for one in (long, short):
        queue.ask(one, 0.0)
    queue.note_start(running)
    assert queue.pump(0.0) == [Ended(long, None)]


def test_a_request_that_would_be_late_is_refused_at_once() -> None:
    capacity = Capacity(inf, 0, 0, 1000, num_computing=2, tokens_per_s=100.0)
    queue = Admission(AdmissionSettings(max_tokens=500), lambda pool, priority: capacity)
    with pytest.raises(RouterError, match=r"predicted in 6\.0 s, 1\.0 s too late") as caught:
        queue.ask(ticket(num_tokens=100, ends_s=5.0), 0.0)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
    assert queue.ask(ticket(num_tokens=100, ends_s=6.0), 0.0) == []


def test_less_important_requests_do_not_make_others_late() -> None:
    capacity = Capacity(inf, 0, 0, 1000, tokens_per_s=100.0)
    queue = Admission(AdmissionSettings(max_tokens=1000), lambda pool, priority: capacity)
    for _ in range(10):
        queue.ask(ticket(priority=1, num_tokens=1000), 0.0)
    assert queue.ask(ticket(num_tokens=100, ends_s=11.0), 0.0) == []
    with pytest.raises(RouterError):
        queue.ask(ticket(priority=1, num_tokens=100, ends_s=11.0), 0.0)


def test_another_tenants_requests_make_a_tenant_late_by_its_turn_only() -> None:
    capacity = Capacity(inf, 0, 0, 1000, tokens_per_s=100.0)
    queue = Admission(AdmissionSettings(max_tokens=1000), lambda pool, priority: capacity)
    for _ in range(10):
        queue.ask(ticket("many", num_tokens=100), 0.0)
    assert queue.ask(ticket("few", num_tokens=100, ends_s=12.0), 0.0) == []
    with pytest.raises(RouterError):
        queue.ask(ticket("many", num_tokens=100, ends_s=12.0), 0.0)


def test_places_that_become_free_late_are_counted() -> None:
    queue = admission(num_requests=2)
    for _ in range(2):
        one = ticket()
        queue.ask(one, 0.0)
        queue.leave(one, 10.0)  # Requests last 10 s.
    for _ in range(2):
        queue.ask(ticket(), 10.0)
    with pytest.raises(RouterError, match=r"predicted in 5\.0 s"):
        queue.ask(ticket(ends_s=14.0), 10.0)
    assert queue.ask(ticket(ends_s=15.0), 10.0) == []


def test_a_deadline_ends_the_wait() -> None:
    queue = admission()
    queue.ask(ticket(), 0.0)
    late, heard = ticket(ends_s=5.0), []
    late.tell = heard.append
    queue.ask(late, 0.0)
    assert queue.wakes_at_s == 5.0
    tell_ended(queue.pump(4.9))
    assert heard == []
    tell_ended(queue.pump(5.0))
    assert [type(event) for event in heard] == [Rejected]
    assert queue.wakes_at_s == inf
    queue.leave(late, 5.0)
    assert queue.snapshot() == [{"pool": "", "running": 1, "waiting": {}}]


def test_a_full_queue_drops_the_least_important_request() -> None:
    queue = admission(max_waiting=2)
    queue.ask(ticket(), 0.0)
    first, second = ticket(priority=1), ticket(priority=2)
    for one in (first, second):
        queue.ask(one, 0.0)
    with pytest.raises(RouterError, match="too many requests wait"):
        queue.ask(ticket(priority=2), 0.0)
    displaced = queue.ask(ticket(priority=0), 0.0)
    assert displaced is not None
    assert [one.ticket for one in displaced] == [second]
    assert displaced[0].error is not None
    assert displaced[0].error.status == 429
    assert queue.num_waiting == 2


def test_a_full_queue_says_when_to_come_again() -> None:
    queue = admission(num_requests=2, max_waiting=1)
    for _ in range(2):
        one = ticket()
        queue.ask(one, 0.0)
        queue.leave(one, 10.0)  # Requests last 10 s.
    for _ in range(3):
        queue.ask(ticket(), 10.0)
    with pytest.raises(RouterError, match="too many requests wait") as caught:
        queue.ask(ticket(), 10.0)
    assert caught.value.retry_after_s == 10


def test_without_a_decode_engine_nobody_waits() -> None:
    """The request fails as it does without a queue: with 503."""
    capacities: list[Capacity | None] = [Capacity(1)]
    queue = Admission(SETTINGS, lambda pool, priority: capacities[0])
    queue.ask(ticket(), 0.0)
    waiting = ticket()
    queue.ask(waiting, 0.0)
    capacities[0] = None
    assert queue.pump(0.0) == [Ended(waiting, None)]
    assert queue.ask(ticket(), 0.0) is None


def test_load_of_other_processes_takes_room() -> None:
    queue = Admission(SETTINGS, lambda pool, priority: Capacity(2, 1))
    assert queue.ask(ticket(), 0.0) is None
    assert queue.ask(ticket(), 0.0) == []


def test_pools_do_not_wait_for_each_other() -> None:
    queue = admission()
    queue.ask(Ticket("a", 0, "", 0.0, inf, 1, 1.0), 0.0)
    assert queue.ask(Ticket("b", 0, "", 0.0, inf, 1, 1.0), 0.0) is None
    assert queue.ask(Ticket("a", 0, "", 0.0, inf, 1, 1.0), 0.0) == []


# --- The twin ------------------------------------------------------------------------------------------


@dataclass
class Twin:
    """Lists, and a search through all of them for each step."""

    num_requests: int
    num_with_room: int
    waiting: list[Ticket] = field(default_factory=list)
    running: list[Ticket] = field(default_factory=list)
    starting: list[Ticket] = field(default_factory=list)
    had: dict[str, float] = field(default_factory=dict)
    clock: float = 0.0

    @property
    def has_room(self) -> bool:
        return len(self.running) < self.num_requests and len(self.starting) < self.num_with_room

    def ask(self, one: Ticket) -> bool:
        if self.has_room and all(other.priority > one.priority for other in self.waiting):
            if not self.waiting:
                self.had, self.clock = {}, 0.0
            self._admit(one)
            return True
        same = [
            other for other in self.waiting if (other.tenant, other.priority) == (one.tenant, one.priority)
        ]
        if not same:
            self.had[one.tenant] = max(self.had.get(one.tenant, 0.0), self.clock)
        self.waiting.append(one)
        return False

    def pump(self, now_s: float) -> list[tuple[Ticket, bool]]:
        late = sorted(
            (one for one in self.waiting if one.deadline_s <= now_s), key=lambda one: one.deadline_s
        )
        self.waiting = [one for one in self.waiting if one not in late]
        ended = [(one, False) for one in late]
        while self.waiting and self.has_room:
            least = min(one.priority for one in self.waiting)
            able = [one for one in self.waiting if one.priority == least]
            firsts = [
                min((one for one in able if one.tenant == name), key=self._rank) for name in _names(able)
            ]
            first = min(firsts, key=lambda one: (self.had[one.tenant], *self._rank(one)))
            self.waiting.remove(first)
            self._admit(first)
            ended.append((first, True))
        return ended

    def _rank(self, one: Ticket) -> tuple[float, int]:
        return one.deadline_s, self.waiting.index(one)

    def _admit(self, one: Ticket) -> None:
        self.clock = max(self.had.get(one.tenant, 0.0), self.clock)
        self.had[one.tenant] = self.clock + one.num_tokens + OUTPUT_WEIGHT * one.num_output
        self.running.append(one)
        self.starting.append(one)

    def leave(self, one: Ticket) -> None:
        for group in (self.waiting, self.running, self.starting):
            if one in group:
                group.remove(one)


def _names(tickets: list[Ticket]) -> list[str]:
    return sorted({one.tenant for one in tickets})


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"), st.integers(0, 2), st.sampled_from("abc"), st.integers(1, 50), st.integers(1, 40)
        ),
        st.tuples(st.sampled_from(["leave", "start", "pass"]), st.integers(0, 30)),
    ),
    max_size=60,
)


@settings(max_examples=400, deadline=None)
@given(STEPS, st.integers(1, 4), st.integers(1, 3))
def test_the_queue_does_what_its_twin_does(steps: list[Any], num_requests: int, num_with_room: int) -> None:
    queue, twin = admission(num_requests, num_with_room, max_waiting=10**6), Twin(num_requests, num_with_room)
    now_s, all_tickets = 0.0, list[Ticket]()
    for number, step in enumerate(steps):
        match step:
            case "ask", priority, tenant, size, wait_s:
                # Deadlines differ, so that the order of the late ones is known.
                ends_s = now_s + wait_s + number / 1e3
                one = Ticket("", priority, tenant, now_s, ends_s, size, 1.0)
                try:
                    is_admitted = queue.ask(one, now_s) is None
                except RouterError:
                    continue  # Refused early, with nothing kept.
                all_tickets.append(one)
                assert is_admitted == twin.ask(one)
            case "leave", which if all_tickets:
                one = all_tickets.pop(which % len(all_tickets))
                queue.leave(one, now_s)
                twin.leave(one)
            case "start", which if twin.starting:
                one = twin.starting.pop(which % len(twin.starting))
                queue.note_start(one)
            case "pass", seconds:
                now_s += seconds
        found = [(one, error is None) for one, error in queue.pump(now_s)]
        assert found == twin.pump(now_s)
        assert queue.num_waiting == len(twin.waiting)
        for row in queue.snapshot():
            assert row["running"] == len(twin.running)
    for one in all_tickets:
        queue.leave(one, now_s)
        tell_ended(queue.pump(now_s))
    for row in queue.snapshot():
        assert (row["running"], row["waiting"]) == (0, {})


def test_the_news_are_events_of_the_machine() -> None:
    one, heard = ticket(), list[Any]()
    one.tell = heard.append
    tell_ended([Ended(one, None), Ended(one, RouterError(429, "busy"))])
    assert heard[0] == Admitted()
    assert heard[1].error.status == 429


# --- What clients ask for ------------------------------------------------------------------------------


def test_an_objective_is_read_once() -> None:
    headers = {"authorization": "Bearer one", "x-slo-ttft-ms": "250"}
    body = {"priority": 7, "max_tokens": 12}
    objective = objective_of(SETTINGS, body, headers)
    assert (objective.priority, objective.ttft_s, objective.max_output) == (7, 0.25, 12)
    assert objective.tenant not in ("", "Bearer one")
    assert objective.tenant != objective_of(SETTINGS, body, {"authorization": "Bearer two"}).tenant
    assert objective_of(SETTINGS, {}, {}) == Objective(0, "", SETTINGS.ttft_s, inf)


def test_a_gateway_names_the_tenant() -> None:
    settings = AdmissionSettings(max_running=1, tenant_header="X-Tenant")
    assert objective_of(settings, {}, {"x-tenant": "blue", "authorization": "Bearer one"}).tenant == "blue"


@pytest.mark.parametrize(
    ("body", "headers", "field"),
    [
        ({"priority": "high"}, {}, "priority"),
        ({"priority": True}, {}, "priority"),
        ({"priority": 1 << 31}, {}, "priority"),
        ({"priority": -1}, {}, "priority"),
        ({}, {"x-slo-ttft-ms": "soon"}, "x-slo-ttft-ms"),
        ({}, {"x-slo-ttft-ms": "0"}, "x-slo-ttft-ms"),
        ({}, {"x-slo-ttft-ms": "nan"}, "x-slo-ttft-ms"),
    ],
)
def test_a_bad_objective_names_its_field(body: dict[str, Any], headers: dict[str, str], field: str) -> None:
    with pytest.raises(UserError) as caught:
        objective_of(SETTINGS, body, headers)
    assert caught.value.field == field
