"""One process's copy of the state that the processes of a router share. Notes keep the copies equal.

Pure: notes and time are arguments. `links.py` says which note goes to which process.
"""

from collections.abc import Iterable

import msgspec

from baton.router.fleet.breaker import Probe, ProbeKind
from baton.router.fleet.engine import Engine
from baton.router.fleet.notes import (
    Drains,
    EngineLoad,
    Erred,
    Handoff,
    Introduces,
    Joined,
    LegFailed,
    Load,
    Note,
    Probed,
    TurnKept,
    TurnTaken,
)
from baton.router.fleet.turns import Turn
from baton.router.fleet.view import FleetView
from baton.router.values.identity import Introduced
from baton.router.values.settings import EngineKey, without_credentials


class Replica:
    def __init__(self, view: FleetView) -> None:
        self._view = view
        self._fleet = view.fleet
        self.num_requests_elsewhere = 0

    def apply(self, note: Note, now_s: float) -> None:
        """Apply a note of another process. A note about an engine that is not known here changes nothing."""
        fleet, find = self._fleet, self._fleet.find
        match note:
            case Joined(member):
                fleet.join(member, now_s)
            case Load(num_requests, rows):
                self._learn_load(num_requests, rows)
            case Handoff(producer_key, consumer_key):
                producer, consumer = find(producer_key), find(consumer_key)
                if producer is not None and consumer is not None:
                    self._view.learn_handoff(producer, consumer, note, now_s)
            case TurnKept(session, key, params, kv_identity):
                keeper = find(key)
                turn = None if keeper is None else Turn(keeper, params, kv_identity)
                self._view.turns.learn(session, turn, now_s)
            case TurnTaken(session):
                self._view.turns.learn(session, None, now_s)
            case _:
                if (engine := find(note.engine)) is not None:
                    self._apply_to(engine, note, now_s)

    def _apply_to(
        self, engine: Engine, note: Drains | Probed | Introduces | LegFailed | Erred, now_s: float
    ) -> None:
        fleet = self._fleet
        match note:
            case Drains(_, for_s, is_leaving):
                fleet.drain(engine, now_s + for_s, is_leaving=is_leaving)
                if not for_s:
                    fleet.end_drain(engine, now_s)
            case Probed(_, kind, why, admin_port):
                engine.admin_port = admin_port
                fleet.health.note_probe(engine, Probe(kind, why), now_s)
            case Introduces(_, found):
                engine.was_asked = True
                fleet.models.note_introduced(engine, found)
            case LegFailed(_, why, is_decisive):
                fleet.health.note_leg_failed(engine, why, now_s, is_decisive=is_decisive)
            case Erred(_, why):
                fleet.roster.note_error(engine, why)

    def _learn_load(self, num_requests: int, rows: list[EngineLoad]) -> None:
        self.num_requests_elsewhere = num_requests
        named = {row.engine for row in rows}
        for known in self._fleet.engines:
            if known.key not in named:  # The other processes have removed it, and have no request there.
                none = msgspec.structs.replace(known.elsewhere, in_flight=0, num_queued_tokens=0)
                self._fleet.note_elsewhere(known, none)
        for row in rows:
            if (engine := self._fleet.find(row.engine)) is not None:
                self._fleet.note_elsewhere(engine, row)

    def load(self, num_requests: int) -> Load:
        """The load of this process alone."""
        rows = [
            EngineLoad(
                one.key,
                one.in_flight,
                one.num_requests,
                one.num_failures,
                one.num_heard,
                one.num_queued_tokens,
                one.speeds,
            )
            for one in self._fleet.engines
        ]
        return Load(num_requests, rows)

    def history(self, now_s: float) -> list[Note]:
        """Notes that a new process needs, which starts with the engines of the settings."""
        fleet, settings = self._fleet, self._view.settings
        first: set[EngineKey] = {("prefill", without_credentials(url)) for url in settings.prefill_urls}
        first |= {("decode", without_credentials(url)) for url in settings.decode_urls}
        notes: list[Note] = [Drains(key, 0.0, is_leaving=True) for key in first if fleet.find(key) is None]
        for engine in fleet.engines:
            if engine.key not in first or engine.weight != 1.0 or engine.model is not None:
                notes.append(Joined(engine.member))
            if engine.is_introduced:
                found = Introduced(
                    engine.kind, engine.introduction, engine.max_model_len, engine.identity, engine.cards
                )
                notes.append(Introduces(engine.key, found))
            if engine.status != "unknown":
                kind: ProbeKind = "healthy" if engine.is_up else "unhealthy"
                notes.append(Probed(engine.key, kind, engine.last_error or "", engine.admin_port))
            if engine.drain_until_s is not None:
                for_s = max(0.0, engine.drain_until_s - now_s)
                notes.append(Drains(engine.key, for_s, engine.is_leaving))
        return notes + self.kept_turns()

    def kept_turns(self) -> list[TurnKept]:
        kept = self._view.turns.kept()
        return [TurnKept(name, turn.keeper.key, turn.params, turn.kv_identity) for name, turn in kept]


def sum_of(loads: Iterable[Load]) -> Load:
    num_requests, total = 0, dict[EngineKey, EngineLoad]()
    for load in loads:
        num_requests += load.num_requests
        for row in load.engines:
            _add(total, row)
    return Load(num_requests, list(total.values()))


def _add(total: dict[EngineKey, EngineLoad], row: EngineLoad) -> None:
    before = total.get(row.engine)
    total[row.engine] = (
        row
        if before is None
        else EngineLoad(
            row.engine,
            before.in_flight + row.in_flight,
            before.num_requests + row.num_requests,
            before.num_failures + row.num_failures,
            before.num_heard + row.num_heard,
            before.num_queued_tokens + row.num_queued_tokens,
            before.speeds or row.speeds,  # Processes learn similar speeds of one engine.
        )
    )
