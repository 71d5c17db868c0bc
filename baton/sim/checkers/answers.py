"""What a client is told: the tokens that a single engine would have said, or an error that has a cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.sim.checkers.violation import Violation

if TYPE_CHECKING:
    from baton.sim.hosts.full.clients import Ask


def check_tokens(ask: Ask, said: Sequence[int], expected: Sequence[int]) -> None:
    """After each piece of the answer."""
    if list(said) != list(expected[: len(said)]):
        raise Violation("I1", "a client was told a wrong token", f"{ask.name}: {said} instead of {expected}")


def check_end(ask: Ask, said: Sequence[int], expected: Sequence[int]) -> None:
    if list(said) != list(expected):
        raise Violation("I1", "an answer ended early", ask.name)


def check_error(ask: Ask, message: str) -> None:
    """An error needs a cause: an engine that died, was slow, or has the policy to fail."""
    if not ask.causes:
        raise Violation("I6", "an error without a cause", f"{ask.name}: {message}")
