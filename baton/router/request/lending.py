"""Lending of one request: P's loan until a D has come for it, and the turn of the session.

    P's answer --take--> lent --note_used--> (D has come)
                          +---take_back----> TakeBack, once
    TurnTable  --params_of_turn--> in a prefill leg --settle_turn--> (P has come for it)
                                                    +--leave_turn--> the table again, or TakeBack

A loan is taken back exactly once, unless a D has come for it. A turn that a prefill leg may have brought to
its engine is taken back and never sent again.
"""

from collections.abc import Mapping
from typing import Any

from baton.core.identity import KVIdentity
from baton.router.fleet.engine import Engine
from baton.router.fleet.turns import Turn, TurnTable
from baton.router.request.answers import (
    Complete,
    DecodeAnswer,
    FirstTokenRead,
    Prefilled,
    PrefillOutcome,
)
from baton.router.request.events import Leg, TakeBack
from baton.router.request.step import Outbox
from baton.router.values.errors import LegFailure
from baton.router.values.legs import PARAMS


class Lending:
    def __init__(self, turns: TurnTable, session: str | None, outbox: Outbox) -> None:
        self._turns, self._session, self._outbox = turns, session, outbox
        self._lent: tuple[Engine, Mapping[str, Any]] | None = None  # The loan, until a D has come for it.
        self._lender: Leg | None = None  # The leg that has lent it.
        self._has_come = False  # The D of the running decode leg has come for what P lends.
        self._turn: Turn | None = None  # The turn of the session's last answer, until a P has it.
        self._is_turn_out = False  # A prefill leg whose outcome is not known has it.
        self._was_turn_sent = False  # A prefill leg that failed or was closed had it: its P may have it.

    # --- P's loan

    def begin_leg(self) -> None:
        """A leg begins: no D has come for what it lends."""
        self._has_come = False

    def take(self, leg: Leg, params: Mapping[str, Any], *, is_wanted: bool, is_over: bool) -> None:
        """P has lent.

        Args:
            is_wanted: the leg is one of those that the request waits for; another P was faster otherwise.
            is_over: the request has ended, so no D will come.
        """
        if not is_wanted:
            self._outbox.emit(TakeBack(leg.engine, params))
            return
        if self._has_come:
            return  # D had the blocks before P's leg ended.
        self.take_back()
        self._lent, self._lender = (leg.engine, params), leg
        if is_over:
            self.take_back()

    def take_back(self) -> None:
        """No D will come any more. If one has come all the same, P takes nothing away."""
        lent, self._lent = self._lent, None
        if lent is not None:
            self._outbox.emit(TakeBack(*lent))

    def take_back_unseen(self, leg: Leg, *, is_last: bool) -> None:
        """The leg has ended before its answer was read, which may be on its way, with a ticket.

        `is_last`: it is the last prefill leg, the one that a D may have come for.
        """
        transfer_id = (leg.body.get(PARAMS) or {}).get("transfer_id")
        is_known = leg.has_told or leg.outcome == "unreachable" or (self._has_come and is_last)
        if leg.role == "prefill" and transfer_id and not is_known:
            self._outbox.emit(TakeBack(leg.engine, {"transfer_id": transfer_id}))

    def note_used(self, prefill: Leg | None) -> None:
        """D has loaded what the prefill leg has lent, or will never do so."""
        if self._lender is not prefill:
            self.take_back()  # The loan is of an attempt before this one.
        self._lent, self._has_come = None, True

    # --- The session's turn

    @property
    def has_turn(self) -> bool:
        return self._turn is not None

    def params_of_turn(self, kv: KVIdentity | None) -> Mapping[str, Any]:
        """Return what a prefill leg brings of the turn to an engine with this identity; empty: nothing."""
        self._turn = turn = self._turn or self._turns.take(self._session, self._outbox.now_s, kv)
        self._was_turn_sent = self._was_turn_sent or self._is_turn_out
        self._is_turn_out = turn is not None and turn.fits(kv)
        return turn.params if turn is not None and self._is_turn_out else {}

    def settle_turn(self, outcome: PrefillOutcome | LegFailure) -> None:
        """The prefill leg that has the turn has its outcome."""
        if not self._is_turn_out:
            return
        self._is_turn_out = False
        match outcome:
            case LegFailure():
                self._was_turn_sent = self._was_turn_sent or outcome.was_sent
            case Prefilled() | Complete() | FirstTokenRead():
                self._turn = None  # This P has come for it.

    def leave_turn(self) -> None:
        """The request ends: the turn goes to the session's next request, if no P can have it."""
        turn, self._turn = self._turn, None
        if turn is None:
            return
        if self._was_turn_sent or self._is_turn_out:
            self._outbox.emit(TakeBack(turn.keeper, turn.params))
        else:
            self._turns.put(self._session, turn, self._outbox.now_s)

    def keep_turn(self, leg: Leg, answer: DecodeAnswer) -> None:
        """D keeps blocks of this answer for the session's next request."""
        if answer.kept_params is not None:
            turn = Turn(leg.engine, answer.kept_params, leg.kv_identity)
            # The keeper takes back what it has kept with old weights.
            self._turns.put(None if turn.is_old else self._session, turn, self._outbox.now_s)
