"""Answers of clients: the tokens that a single engine would return, or an error that has a cause.

An answer belongs to one version of the weights, which an engine had while it served the answer. If an engine
takes other weights and keeps a request that has tokens ("keep"), each token of the answer is the one that
some such version gives after the tokens before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.sim.checkers.violation import Violation

if TYPE_CHECKING:
    from lab.sim.host.clients import Ask


def check_tokens(ask: Ask) -> None:
    """Check the answer so far, after each piece of it."""
    if not any(_is_of(ask, weights) for weights in ask.weights) and not (ask.is_mixed and _is_mixed(ask)):
        expected = {one: ask.model.answer(ask.prompt, ask.salt, ask.max_tokens, one) for one in ask.weights}
        raise Violation(
            "I1", "a client was told a wrong token", f"{ask.name}: {ask.answer} instead of {expected}"
        )


def _is_of(ask: Ask, weights: int) -> bool:
    return ask.answer == ask.model.answer(ask.prompt, ask.salt, len(ask.answer), weights)


def _is_mixed(ask: Ask) -> bool:
    return all(
        any(
            [token] == ask.model.answer([*ask.prompt, *ask.answer[:index]], ask.salt, 1, weights)
            for weights in ask.weights
        )
        for index, token in enumerate(ask.answer)
    )


def check_end(ask: Ask) -> None:
    if not ask.is_whole and (ask.answer or not ask.may_be_empty):
        raise Violation("I1", "an answer ended early", ask.name)


def check_error(ask: Ask, message: str) -> None:
    """An error needs a cause: an engine that died, was slow, or has the policy to fail.

    Engines that served it with different weights are a cause too: perhaps no engine can continue after the
    tokens that the client has.
    """
    if not ask.causes and len(ask.weights) < 2:
        raise Violation("I6", "an error without a cause", f"{ask.name}: {message}")
