"""Stored dates, compared with the clock: a date ahead of now counts as now.

A clock that was wrong for a while leaves such dates. As they stand, limits would keep their values and remove
all newer ones until the clock gets there, perhaps for years.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from baton.stores.base.store import Store, Stored, StoreError

AHEAD_S: Final = 60.0
"""The clocks of hosts differ by less, and dates this far ahead are soon past. They stay as they are."""
STEP_S: Final = 1e-6  # Step between values that count as now; so they keep their order.


def age_s(dated_s: float, now_s: float) -> float:
    return max(0.0, now_s - dated_s)


def is_ahead(dated_s: float, now_s: float) -> bool:
    return dated_s > now_s + AHEAD_S


class Dates:
    """The dates of one store's values, as its sweeps count them."""

    def __init__(self) -> None:
        self._counted: dict[str, tuple[float, float]] = {}
        """Values whose dates were found ahead and could not be changed: the date, and the one that counts."""

    def settle(self, store: Store, found: Sequence[Stored], now_s: float) -> list[Stored]:
        """`found`, with each date that is ahead replaced by now: in the store, if it can be touched.

        Otherwise, for example in a bucket, the value counts as of the first sweep that has found it.
        """
        counted: dict[str, tuple[float, float]] = {}
        ahead = []
        for stored in found:
            known = self._counted.get(stored.name)
            if known is not None and known[0] == stored.used_s and not is_ahead(known[1], now_s):
                counted[stored.name] = known
            elif is_ahead(stored.used_s, now_s):
                ahead.append(stored)
        for number, stored in enumerate(sorted(ahead, key=operator.attrgetter("used_s"))):
            date_s = now_s - (len(ahead) - number) * STEP_S
            counted[stored.name] = stored.used_s, date_s
            with suppress(StoreError):
                store.touch(stored.name, date_s)
        self._counted = counted
        return [
            replace(stored, used_s=counted[stored.name][1]) if stored.name in counted else stored
            for stored in found
        ]
