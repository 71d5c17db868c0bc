"""Report of a rank's jobs, filled while they end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from baton.contract import RankReport


@dataclass(kw_only=True)
class JobReport(RankReport):
    def add(self, **ids: Iterable[Any]) -> None:
        """Adds ids to fields that are sets, or None so far."""
        for name, added in ids.items():
            if getattr(self, name) is None:
                setattr(self, name, set())
            getattr(self, name).update(added)

    def take(self) -> Self | None:
        """Returns what is reported, and resets it. None: nothing."""
        taken, names = replace(self), {field.name for field in fields(self)} - {"rank", "others"}
        for name in names:
            setattr(self, name, None)
        return taken if any(getattr(taken, name) for name in names) else None
