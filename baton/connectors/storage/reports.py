"""Report of a rank's jobs, filled while they end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from baton.contract import RankReport


@dataclass(kw_only=True)
class JobReport(RankReport):
    def add(self, **ids: Iterable[Any]) -> None:
        """Adds ids to fields that are sets, or None so far."""
        for name, added in ids.items():
            if getattr(self, name) is None:
                setattr(self, name, set())
            getattr(self, name).update(added)

    @property
    def is_empty(self) -> bool:
        """Whether the rank reports nothing."""
        names = {field.name for field in fields(self)} - {"rank", "others"}
        return all(getattr(self, name) is None for name in names)
