"""Known reasons for missed goals, shown with each missed row of the page. Pure.

They are kept here because the page is generated from every journal. A reason belongs to a goal and to
systems; docs/log.md describes how it was found. Remove a reason when its cause is fixed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

NOT_KNOWN = "not yet known"
BOTH_SIDES = "the rounds are on both sides of the limit: within this session's noise"


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason for a goal. `systems` and `settings` are prefixes of names; no settings: all."""

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
        ["vllm baton pull local"],
        "vLLM's caches cannot be mapped; cross-memory attach takes 7 ms for 1,921 tokens at its rate below",
        ["1921 "],
    ),
    Reason(
        "b",
        ["vllm baton pull tcp"],
        "the bytes pass a socket and a checksum at 3 GB/s: 4 ms for 513 tokens, 15 for 1,921, 31 for 3,841; "
        "on one host Baton selects `local` by default",
        ["513 ", "1921 ", "3841 "],
    ),
    Reason(
        "b",
        ["vllm baton pull nixl"],
        "the bytes take longer over NIXL: vLLM's own connector, which does not check them, misses it too",
        ["1921 ", "3841 "],
    ),
)


def why(goal: str, system: str, setting: str, *, is_on_both_sides: bool) -> str:
    """Return the reason for a missed goal. `is_on_both_sides`: some rounds met it."""
    if is_on_both_sides:
        return BOTH_SIDES
    found = [reason.text for reason in REASONS if reason.explains(goal, system, setting)]
    return found[0] if found else NOT_KNOWN
