"""Why a goal is missed: what has been found out, beside each missed row of the page. Pure.

Kept here, because the page is made anew from every journal. A reason belongs to a goal and to systems; the
log says how it was found. Whoever mends the cause takes the reason out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

NOT_KNOWN = "not yet known"
BOTH_SIDES = "the rounds lie on both sides of the limit: not more than this session's noise"


@dataclass(frozen=True, slots=True)
class Reason:
    """`systems`: beginnings of names. `settings`: beginnings, too; none: all."""

    goal: str
    systems: Sequence[str]
    text: str
    settings: Sequence[str] = ()

    def explains(self, goal: str, system: str, setting: str) -> bool:
        return (
            goal == self.goal
            and system.startswith(tuple(self.systems))
            and (not self.settings or setting.startswith(tuple(self.settings)))
        )


REASONS = (
    Reason(
        "b",
        ["vllm baton pull tcp"],
        "the bytes go through a socket and a checksum, 4 GB/s: 3 ms for 513 tokens, 24 ms for 3,841; on one "
        "host Baton chooses `local` by itself",
        ["513 ", "3841 "],
    ),
    Reason(
        "d",
        ["baton"],
        "both engines multiply with oneDNN, and at 16 rows that is most of a step",
        ["128 tokens, 16 at once"],
    ),
)


def why(goal: str, system: str, setting: str, *, is_on_both_sides: bool) -> str:
    """Of a missed goal. `is_on_both_sides`: some rounds met it."""
    if is_on_both_sides:
        return BOTH_SIDES
    found = [reason.text for reason in REASONS if reason.explains(goal, system, setting)]
    return found[0] if found else NOT_KNOWN
