"""Ownership of chunks by sessions: those that only one has used can go first when it has ended. Pure.

    stored by A, used by A                A's
    then used by B, or without a session  shared
    used by A, stored by another one      shared

Only a session's own chunks are remembered.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

# Keys of all sessions. The key that was stored first is forgotten first, and is then shared.
KEYS_MAX = 1 << 17


class Sessions(Generic[K]):
    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        self._keys_max = keys_max
        self._owners: OrderedDict[K, str] = OrderedDict()
        # Keys of each session, in the order of storing.
        self._owned: defaultdict[str, dict[K, None]] = defaultdict(dict)

    def stored(self, session: str, keys: Iterable[K]) -> None:
        """`session`: "" for a request without one."""
        for key in keys:
            if key in self._owners:
                self.used(session, (key,))
            elif session:
                self._owners[key] = session
                self._owned[session][key] = None
        while len(self._owners) > self._keys_max:
            self._disown(next(iter(self._owners)))

    def used(self, session: str, keys: Iterable[K]) -> None:
        if not self._owners:
            return
        for key in keys:
            if self._owners.get(key, session) != session:
                self._disown(key)

    def end(self, session: str) -> list[K]:
        """Keys that only this session has used."""
        keys = list(self._owned.get(session, ()))
        for key in keys:
            self._disown(key)
        return keys

    def _disown(self, key: K) -> None:
        session = self._owners.pop(key)
        del self._owned[session][key]
        if not self._owned[session]:
            del self._owned[session]
