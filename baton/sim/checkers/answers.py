"""Answers of clients: the tokens that a single engine would return, or an error that has a cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.sim.checkers.violation import Violation

if TYPE_CHECKING:
    from baton.sim.hosts.full.clients import Ask


def check_tokens(ask: Ask, answer: Sequence[int], expected: Sequence[int]) -> None:
    """After each piece of the answer."""
    if list(answer) != list(expected[: len(answer)]):
        raise Violation(
            "I1", "a client was told a wrong token", f"{ask.name}: {answer} instead of {expected}"
        )


def check_end(ask: Ask, answer: Sequence[int], expected: Sequence[int]) -> None:
    if list(answer) != list(expected) and (answer or not ask.may_be_empty):
        raise Violation("I1", "an answer ended early", ask.name)


def check_error(ask: Ask, message: str) -> None:
    """An error needs a cause: an engine that died, was slow, or has the policy to fail."""
    if not ask.causes:
        raise Violation("I6", "an error without a cause", f"{ask.name}: {message}")
