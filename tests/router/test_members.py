"""Members that several sources name, merged into orders: without a clock, and without a source."""

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import UserError
from baton.router.values.members import (
    HELD_S,
    REGISTRATIONS_MAX,
    ROLES,
    Hold,
    Join,
    Leave,
    Member,
    Membership,
    Order,
    Registrations,
)

A, B, C = (Member("decode", f"http://d:{number}") for number in (1, 2, 3))
P = Member("prefill", "http://p:1")
EVERY = [(role, f"http://{letter}:{number}") for role in ROLES for letter in "dp" for number in (1, 2, 3)]


def test_what_a_source_names_joins_and_what_it_drops_leaves() -> None:
    membership = Membership(["dns"])
    assert membership.hear("dns", [A, B], 0.0, EVERY) == [Join(A), Join(B)]
    assert membership.hear("dns", [A, B], 1.0, EVERY) == []
    assert membership.hear("dns", [B, C], 2.0, EVERY) == [Join(C), Leave(A.key)]
    assert set(membership.members) == {B, C}


def test_a_member_of_two_sources_leaves_when_both_have_dropped_it() -> None:
    membership = Membership(["file", "dns"], [C])
    heavy = Member("decode", A.address, "m", 0.5)
    assert membership.hear("dns", [A, C], 0.0, EVERY) == [Join(A)]
    assert membership.hear("file", [heavy, C], 0.0, EVERY) == [Join(heavy)], "the first source decides"
    assert membership.hear("dns", [C], 0.0, EVERY) == []
    assert membership.hear("file", [C], 0.0, EVERY) == [Leave(A.key)]


def test_the_last_members_of_a_role_stay_until_others_have_had_time_to_return() -> None:
    membership = Membership(["redis"])
    membership.hear("redis", [A, B, P], 0.0, EVERY)
    assert membership.hear("redis", [P], 1.0, EVERY) == [Hold(A.key), Hold(B.key)]
    assert membership.hear("redis", [P], 2.0, EVERY) == []
    assert membership.held_until_s == inf
    assert membership.hear("redis", [P, A], 3.0, EVERY) == []
    assert set(membership.held) == {B.key}
    assert membership.held_until_s == 3.0 + HELD_S
    assert membership.hear("redis", [P, A, B], 4.0, EVERY) == [], "it is back"
    membership.hear("redis", [P], 5.0, EVERY)
    assert membership.hear("redis", [P, C], 6.0, EVERY) == [Join(C)]
    assert membership.look(6.0 + HELD_S - 0.1, EVERY) == []
    assert membership.look(6.0 + HELD_S, EVERY) == [Leave(A.key), Leave(B.key)]


def test_an_engine_leaves_when_another_one_has_served_for_a_while() -> None:
    membership = Membership(["dns"], [A, B])
    serving = [A.key]
    assert membership.hear("dns", [C], 0.0, serving) == [Join(C), Hold(A.key), Leave(B.key)]
    assert membership.look(HELD_S, serving) == [], "the new one does not serve yet"
    assert membership.look(HELD_S, [A.key, C.key]) == []
    assert membership.look(2 * HELD_S, [A.key, C.key]) == [Leave(A.key)]


def test_an_administrator_may_remove_the_last_one_and_it_stays_away() -> None:
    membership = Membership(["dns"])
    membership.hear("dns", [A], 0.0, EVERY)
    assert membership.remove(A.key, 1.0, EVERY) == [Leave(A.key)]
    assert membership.hear("dns", [A], 2.0, EVERY) == [], "DNS still names it"
    assert membership.add(A, 3.0, EVERY) == [Join(A)]
    assert membership.remove(A.key, 4.0, EVERY) == [Leave(A.key)]
    membership.hear("dns", [], 5.0, EVERY)
    assert membership.hear("dns", [A], 6.0, EVERY) == [Join(A)], "it left DNS, and is another one"


def test_a_changed_role_holds_for_as_long_as_a_source_names_the_engine() -> None:
    membership = Membership(["dns"], [B])
    membership.hear("dns", [A, B], 0.0, EVERY)
    changed = Member("prefill", A.address)
    assert membership.change_role(A.url, "prefill", 1.0, EVERY) == [Join(changed), Leave(A.key)]
    assert membership.hear("dns", [A, B], 2.0, EVERY) == []
    assert membership.change_role(A.url, "decode", 3.0, EVERY) == [Join(A), Leave(changed.key)]
    membership.change_role(A.url, "prefill", 4.0, EVERY)
    membership.hear("dns", [B], 5.0, EVERY)
    assert Join(A) in membership.hear("dns", [A, B], 6.0, EVERY)


# --- Random histories -----------------------------------------------------------------------------

SOURCES = ("file", "dns")
SOME = st.frozensets(st.sampled_from([A, B, C, P, Member("decode", P.address)]))
STEPS: Any = st.lists(
    st.one_of(
        st.tuples(st.just("hear"), st.sampled_from(SOURCES), SOME),
        st.tuples(st.just("remove"), st.sampled_from([A, B, P]), st.none()),
        st.tuples(st.just("add"), st.sampled_from([A, C, P]), st.none()),
        st.tuples(st.just("role"), st.sampled_from([A, P]), st.sampled_from(ROLES)),
        st.tuples(st.just("wait"), st.sampled_from([1.0, HELD_S]), st.none()),
    ),
    max_size=40,
)


@given(STEPS)
def test_orders_lead_to_what_is_named_and_never_to_an_empty_role(steps: Any) -> None:
    membership, now_s = Membership(SOURCES), 0.0
    fleet: dict[Any, Member] = {}  # Members that result from the orders.

    def carry_out(orders: list[Order]) -> None:
        for order in orders:
            match order:
                case Join(member):
                    fleet[member.key] = member
                case Leave(key):
                    del fleet[key]
                case Hold(key):
                    assert key in fleet

    for what, first, second in steps:
        before = {role for role, _ in fleet}
        match what:
            case "hear":
                carry_out(membership.hear(first, second, now_s, EVERY))
            case "remove":
                carry_out(membership.remove(first.key, now_s, EVERY))
            case "add":
                carry_out(membership.add(first, now_s, EVERY))
            case "role":
                carry_out(membership.change_role(first.url, second, now_s, EVERY))
            case "wait":
                now_s += first
                carry_out(membership.look(now_s, EVERY))
        assert set(fleet.values()) == set(membership.members)
        if what in ("hear", "wait"):
            assert before <= {role for role, _ in fleet}, "a source has emptied a role"
        if what == "add":
            assert first.key in fleet
        if what == "remove":
            assert first.key not in fleet
    # Sources that agree decide alone, with time.
    for source in SOURCES:
        carry_out(membership.hear(source, [B, P], now_s, EVERY))
    carry_out(membership.look(now_s + HELD_S, EVERY))
    carry_out(membership.look(now_s + 2 * HELD_S, EVERY))
    assert membership.held_until_s == inf
    assert {one.url for one in fleet.values()} <= {one.url for one in (A, B, C, P)}


# --- Registrations ----------------------------------------------------------------------------------


def test_the_number_of_registrations_is_bounded() -> None:
    found = Registrations()
    for number in range(REGISTRATIONS_MAX):
        assert found.note(Member("decode", f"http://d:{number}"), 10.0, 0.0)
    with pytest.raises(UserError, match="registered already"):
        found.note(Member("decode", "http://one.more"), 10.0, 0.0)
    assert not found.note(Member("decode", "http://d:7"), 10.0, 1.0)  # One that is there beats.
    assert found.note(Member("decode", "http://d:8"), 0.0, 1.0)
    assert found.note(Member("decode", "http://one.more"), 10.0, 1.0)


def test_a_registration_ends_with_its_time_unless_it_is_repeated() -> None:
    found = Registrations()
    assert found.note(A, 10.0, 0.0)
    assert not found.note(A, 10.0, 5.0), "a heartbeat changes nothing"
    assert found.note(B, 10.0, 5.0)
    assert found.note(B, 0.0, 6.0), "it leaves"
    assert not found.note(B, 0.0, 6.0)
    for now_s in range(5, 15):
        assert not found.expire(float(now_s), 1.0)
    assert found.members == {A}
    assert found.expire(15.0, 1.0)
    assert found.members == frozenset()


@pytest.mark.parametrize("stopped_s", [2.5, 60.0])
def test_a_router_that_stood_still_gives_engines_that_time(stopped_s: float) -> None:
    found = Registrations()
    found.expire(0.0, 1.0)
    found.note(A, 10.0, 0.0)
    assert not found.expire(stopped_s, 1.0)
    now_s = stopped_s
    while now_s + 1.0 < 9.0 + stopped_s:
        now_s += 1.0
        assert not found.expire(now_s, 1.0)
    assert found.expire(now_s + 1.0, 1.0)
