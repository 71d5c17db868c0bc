"""The machine of one request in simulated worlds, and the mutants that they notice."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from baton.router.fleet import pairs
from baton.router.fleet.turns import Turn
from baton.router.request import decode, engines
from baton.router.request.answers import DecodeAnswer, FirstTokenRead, LegAnswer
from baton.router.request.attempt import Attempt
from baton.router.request.decode import Decode
from baton.router.request.engines import Engines
from baton.router.request.events import ClientGone, Doubt
from baton.router.request.lending import Lending
from baton.router.request.machine import TABLE, Machine
from baton.router.request.open_legs import OpenLegs
from baton.router.request.prefill import Prefill
from baton.router.request.reply import Reply
from baton.router.request.step import AfterClosing, Next, State
from baton.router.request.tokens.first_tokens import FirstTokens, Given
from baton.router.request.tokens.stream import TokenRecord
from tests.router.machine_world import World

WORLDS = 500
MUTANT_WORLDS_MAX = 5000
WORLDS_OF_FAULTS = 5000
NO_LEG = ("QUEUED", "LOOKING", "MEETING")
NO_CLOSED = (*NO_LEG, "HELD", "PUSHING", "BORROWING", "ENDING")  # A leg's last event ends these states.


def test_every_request_ends_and_leaves_nothing() -> None:
    for seed in range(WORLDS):
        World(seed).run()


def test_in_health_every_answer_is_complete() -> None:
    for seed in range(WORLDS):
        World(seed, is_healthy=True).run()


def test_faults_end_some_requests_and_not_all() -> None:
    worlds = [World(seed) for seed in range(WORLDS)]
    for world in worlds:
        world.run()
    rest = [world for world in worlds if not world.is_ending]
    num_right = sum(world.client.is_right for world in rest)
    assert 0.3 * len(rest) < num_right < len(rest)


def test_every_fault_occurs() -> None:
    """A fault that is never drawn proves nothing."""
    faults: Counter[str] = Counter()
    for seed in range(WORLDS_OF_FAULTS):
        world = World(seed)
        world.run()
        faults += world.faults
    states = [state.name for state in State if state is not State.OVER]
    wanted = {f"the client leaves in {name}" for name in states}
    wanted |= {f"the router stops in {name}" for name in states}
    wanted |= {f"Failed in {name}" for name in states if name not in NO_LEG}
    wanted |= {f"Closed in {name}" for name in states if name not in NO_CLOSED}
    wanted |= {f"failure {number}" for number in range(8)}
    wanted |= {f"a stream: {fault}" for fault in ("cut", "ends early", "garbage")}
    wanted |= {"no introduction", "an introduction is refused", "other tokens", "a stream is resumed"}
    wanted |= {"an engine drains", "waits for too long", "hedges", "hedges_won", "no retry is left"}
    wanted |= {
        "a loan of what is stored is asked for",
        "an update",
        "an update that the router does not know",
    }
    wanted |= {"a prompt is computed because of other weights"}
    wanted.add("an event of a leg that is being closed")
    assert wanted - faults.keys() == set()


def test_every_state_can_end_early() -> None:
    for state in State:
        is_late = TABLE[state, ClientGone, None].step is Machine.ignore
        assert is_late == (state is State.OVER)


def test_an_event_of_an_ended_request_changes_nothing() -> None:
    world = World(3, is_healthy=True)
    world.run()
    assert not world.machine.on(ClientGone(), world.now_s)


# --- Mutants ------------------------------------------------------------------------------------------


def _without_a_wait_for_legs(self: Machine, then: AfterClosing) -> Next:
    CLOSE(self, then)
    return self._after_closing()


def _again_with_the_ticket(self: Decode, event: Any) -> Next:
    event.failure.was_sent = False
    return ON_DECODE_FAILED(self, event)


def _take_without_comparing(self: FirstTokens, first: Any) -> bool:
    is_new, self._first = self._first is None, self._first or first
    return is_new


def _keep_used_loan(self: Decode, engine: Any, answer: Any) -> None:
    pass


def _late_loan_is_kept(self: Lending, leg: Any, params: Any, **_: bool) -> None:
    self._lent, self._lender = (leg.engine, params), leg


def _forget_older_loan(self: Lending, leg: Any, params: Any, *, is_wanted: bool, is_over: bool) -> None:
    if not is_over:
        self._lent = None
    TAKE_LOAN(self, leg, params, is_wanted=is_wanted, is_over=is_over)


def _any_loan_counts(self: Lending, leg: Any, params: Any, *, is_wanted: bool, is_over: bool) -> None:
    TAKE_LOAN(self, leg, params, is_wanted=True, is_over=is_over)


def _tell_late_token(self: Prefill, event: Any) -> Next:
    outcome = self.read(event)
    if isinstance(outcome, FirstTokenRead):
        self._reply.send(outcome.first.events)
    return None


def _forget_first_leg(self: Prefill, leg: Any, *, is_failed: bool) -> bool:
    END_HEDGE(self, leg, is_failed=is_failed)
    return False


def _blame_nobody(answer: LegAnswer) -> bool:
    return False


def _gone_is_ignored(self: Machine, event: Any) -> Next:
    return None if self._state is State.CLOSING else ON_CLIENT_GONE(self, event)


def _any_hold_counts(self: Attempt, event: Any) -> Next:
    return self._push("late")


def _tell_again(self: Reply, head: LegAnswer, first: Any, where: str) -> bool:
    if self.status is None:
        return TELL_FIRST(self, head, first, where)
    self.send(first.events)
    return False


def _relay_all(self: DecodeAnswer, lent: Any) -> bytes:
    ready = bytearray()
    while (event := self._events.next()) is not None:
        ready += event
    self.is_done = True
    return bytes(ready)


def _believe_the_end(self: DecodeAnswer) -> None:
    self.is_done = True


def _resume_one_token_early(self: FirstTokens, given: Given) -> None:
    RESUME_AFTER(self, replace(given, token_ids=given.token_ids[:-1]))


def _resume_with_what_came_from_d(self: FirstTokens, given: Given) -> None:
    assert self._record is not None
    RESUME_AFTER(self, replace(given, token_ids=list(self._record.token_ids)))


def _resume_as_if_nothing_was_told(self: FirstTokens, given: Given) -> None:
    pass


def _show_ids(self: TokenRecord, event: bytes) -> bytes:
    self._shows_token_ids = True
    return RECORD_EVENT(self, event)


def _admitted_again(self: Machine, event: Any) -> Next:
    return self._ask_admission()


RESUME_AFTER = FirstTokens.resume_after
RECORD_EVENT = TokenRecord.event
CLOSE = Machine._close
ON_DECODE_FAILED = Decode.on_failed
ON_CLIENT_GONE = Machine.on_client_gone
TAKE_LOAN = Lending.take
TELL_FIRST = Reply.tell_first
END_HEDGE = Prefill._end_hedge

MUTANTS: Mapping[str, tuple[Any, str, Any]] = {
    "nothing is taken back": (Lending, "take_back", lambda self: setattr(self, "_lent", None)),
    "a loan that comes late is kept": (Lending, "take", _late_loan_is_kept),
    "a second loan replaces the first": (Lending, "take", _forget_older_loan),
    "a used loan is taken back": (Decode, "_note_loaded", _keep_used_loan),
    "a turn is forgotten": (Lending, "leave_turn", lambda self: None),
    "a loan of the slower of two prefill engines counts": (Lending, "take", _any_loan_counts),
    "the tokens of both prefill engines are shown": (Prefill, "on_unawaited", _tell_late_token),
    "a hedge that fails ends the first leg": (Prefill, "_end_hedge", _forget_first_leg),
    "the next attempt does not wait for legs": (Machine, "_close", _without_a_wait_for_legs),
    "a ticket that may be in use is used again": (Decode, "on_failed", _again_with_the_ticket),
    "first tokens are not compared": (FirstTokens, "take", _take_without_comparing),
    "a refused ticket is the client's error": (decode, "blames_params", _blame_nobody),
    "a client that leaves between attempts is ignored": (Machine, "on_client_gone", _gone_is_ignored),
    "the end of an earlier hold counts": (Attempt, "on_hold_over", _any_hold_counts),
    "the first token is told twice": (Reply, "tell_first", _tell_again),
    "a router that stops is ignored": (Machine, "on_stopped", lambda self, event: None),
    "the client sees what is for the router": (DecodeAnswer, "ready", _relay_all),
    "a stream without [DONE] is complete": (DecodeAnswer, "finish", _believe_the_end),
    "introductions are offered without end": (decode, "INTRODUCTIONS_MAX", 10**9),
    "a stream that breaks is begun again": (Decode, "_break_off", lambda self, *_: self._again()),
    "a stream is resumed one token early": (FirstTokens, "resume_after", _resume_one_token_early),
    "a stream is resumed without P's token": (FirstTokens, "resume_after", _resume_with_what_came_from_d),
    "a stream is resumed from its beginning": (FirstTokens, "resume_after", _resume_as_if_nothing_was_told),
    "token ids that the client did not want are shown": (TokenRecord, "event", _show_ids),
    "a place in the engines is never free again": (OpenLegs, "leave_queue", lambda self, num_output: None),
    "a request that is too late goes on": (Machine, "on_rejected", lambda self, event: self._look()),
    "engines with other weights are a pair": (pairs, "differences", lambda *_: []),
    "a turn goes to an engine with other weights": (Turn, "fits", lambda self, kv: True),
    "a stream is continued with other weights": (engines, "is_continued_alike", lambda *_: True),
    "an engine with other weights follows the first token": (Engines, "_is_alike", lambda self, one: True),
    "other weights are a pair's fault": (Doubt, "has_other_weights", False),
    "a request that has waited gets two places": (Machine, "on_admitted", _admitted_again),
}


@contextmanager
def mutated(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    owner, attribute, replacement = MUTANTS[name]
    original = getattr(owner, attribute)
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, replacement)
        for key, transition in TABLE.items():
            if transition.step is original:
                patch.setitem(TABLE, key, transition._replace(step=replacement))  # type: ignore[arg-type]
        yield


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with mutated(name, monkeypatch):
        for seed in range(MUTANT_WORLDS_MAX):
            try:
                World(seed).run()
            except AssertionError:
                return
    pytest.fail(f"no world notices that {name}")
