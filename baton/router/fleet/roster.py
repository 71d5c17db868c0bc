"""The engines by role and address, and the log of what happens to them, for operators."""

from collections.abc import Callable, Sequence
from typing import Final, get_args

from baton.router.fleet.breaker import Health
from baton.router.fleet.engine import Engine
from baton.router.fleet.event_log import EventLog, Happened
from baton.router.fleet.event_log import Kind as EventKind
from baton.router.fleet.shortlist import Idle
from baton.router.values.settings import EngineKey, Role, RouterSettings

ROLES: Final[tuple[Role, ...]] = get_args(Role)


class Roster:
    def __init__(self, settings: RouterSettings, unix_clock: Callable[[], float]) -> None:
        self._engines: dict[Role, list[Engine]] = {
            "prefill": [Engine(url, "prefill", Health(settings.probe)) for url in settings.prefill_urls],
            "decode": [Engine(url, "decode", Health(settings.probe)) for url in settings.decode_urls],
        }
        self._by_key = {engine.key: engine for engine in self.engines}
        self.idle = {role: Idle(engines) for role, engines in self._engines.items()}
        self.log = EventLog()
        self._unix_clock = unix_clock

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def engines(self) -> Sequence[Engine]:
        return [engine for engines in self._engines.values() for engine in engines]

    def of(self, role: Role) -> Sequence[Engine]:
        return self._engines[role]

    def find(self, key: EngineKey) -> Engine | None:
        return self._by_key.get(key)

    def add(self, engine: Engine) -> None:
        self._engines[engine.role].append(engine)
        self._by_key[engine.key] = engine
        self.idle[engine.role].add(engine)

    def remove(self, engine: Engine) -> None:
        self._engines[engine.role].remove(engine)
        del self._by_key[engine.key]

    def note_event(self, kind: EventKind, engine: Engine | None, why: str = "") -> None:
        """What each process of this router sees by itself, so that the coordinator has it as well."""
        self.log.note(Happened(kind, engine.key if engine else None, why), self._unix_clock())

    def report_event(
        self, kind: EventKind, engine: Engine | None, why: str = "", request_id: str | None = None
    ) -> None:
        """What only this process has seen."""
        key = engine.key if engine else None
        self.log.report(Happened(kind, key, why, request_id), self._unix_clock())

    def note_error(self, engine: Engine, error: str) -> None:
        engine.last_error = error
        engine.last_error_unix_s = self._unix_clock()
