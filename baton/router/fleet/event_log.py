"""Log of the last events in the fleet, with their reasons, for operators.

Equal entries within JOIN_S are one entry with a count, so a flood of refusals does not push out the rest.
Pure: the time is an argument.
"""

from collections import deque
from typing import Any, Literal, TypeAlias

import msgspec

from baton.router.values.settings import EngineKey, Role

Kind: TypeAlias = Literal[
    "added",
    "up",
    "slow",
    "down",
    "refused",  # The engine gets no requests because of its model.
    "accepted",
    "updated",  # The engine has other weights.
    "draining",
    "drained",
    "removed",
    "pair_stopped",
    "model_down",
    "hedge",
    "resume",
    "broken_stream",
    "refusal",  # The router has refused a request.
]

EVENTS_MAX = 512
JOIN_S = 10.0
TELL_EVERY_S = 0.5
WHY_MAX_CHARS = 400


class Happened(msgspec.Struct, frozen=True, array_like=True, tag="Happened"):
    """An event that a request has met in a worker process; the coordinator logs it."""

    kind: Kind
    engine: EngineKey | None
    why: str
    request_id: str | None = None  # Request of the last of `count` events.
    count: int = 1


class Entry(msgspec.Struct):
    number: int
    unix_s: float  # Time of the first of `count` events.
    last_unix_s: float
    kind: Kind
    role: Role | None
    engine: str | None  # URL.
    why: str
    request_id: str | None
    count: int


class EventLog:
    def __init__(self, max_entries: int = EVENTS_MAX) -> None:
        self._entries: deque[Entry] = deque()
        self._max_entries = max_entries
        self._last: dict[tuple[Kind, EngineKey | None, str], Entry] = {}
        self._num_entries = 0
        self._untold: dict[tuple[Kind, EngineKey | None, str], Happened] = {}
        self._told_unix_s = 0.0

    def note(self, happened: Happened, unix_s: float) -> None:
        why = happened.why[:WHY_MAX_CHARS]
        key = happened.kind, happened.engine, why
        last = self._last.get(key)
        if last is not None and 0.0 <= unix_s - last.unix_s < JOIN_S:
            last.count += happened.count
            last.last_unix_s, last.request_id = unix_s, happened.request_id
            return
        self._num_entries += 1
        role, url = happened.engine or (None, None)
        entry = Entry(
            self._num_entries,
            unix_s,
            unix_s,
            happened.kind,
            role,
            url,
            why,
            happened.request_id,
            happened.count,
        )
        self._last[key] = entry
        self._entries.append(entry)
        if len(self._entries) > self._max_entries:
            old = self._entries.popleft()
            engine = None if old.role is None or old.engine is None else (old.role, old.engine)
            if self._last.get(old_key := (old.kind, engine, old.why)) is old:
                del self._last[old_key]

    def report(self, happened: Happened, unix_s: float) -> None:
        """Note an event that only this process has seen, and keep it for `take_untold`."""
        self.note(happened, unix_s)
        key = happened.kind, happened.engine, happened.why
        before = self._untold.get(key)
        if before is None and len(self._untold) >= self._max_entries:
            return  # This is the only process, or the coordinator hangs.
        count = happened.count + (before.count if before is not None else 0)
        self._untold[key] = msgspec.structs.replace(happened, count=count)

    def take_untold(self, unix_s: float) -> list[Happened]:
        """Take the events that the coordinator does not know yet.

        Returns nothing within TELL_EVERY_S of the last call that returned something.
        """
        if not self._untold or 0.0 <= unix_s - self._told_unix_s < TELL_EVERY_S:
            return []
        untold, self._untold, self._told_unix_s = list(self._untold.values()), {}, unix_s
        return untold

    def last(self, num_max: int = EVENTS_MAX) -> list[dict[str, Any]]:
        """The last entries, oldest first."""
        entries = list(self._entries)[-num_max:] if num_max else []
        return [msgspec.structs.asdict(entry) for entry in entries]
