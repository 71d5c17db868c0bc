"""P's sampled token reaches the host of D once, and only for the whole prompt."""

from collections.abc import Iterator

import pytest

from baton.core.prefilled import PrefilledLogprob, PrefilledLogprobs, PrefilledTokens
from tests.connectors.pull_world import World

TOKENS = [3, 1, 4, 1, 5, 9]
LOGPROBS = PrefilledLogprobs(PrefilledLogprob(7, -0.5, 1), (PrefilledLogprob(7, -0.5, 1),))
SAMPLED = PrefilledTokens((7,), (LOGPROBS,), b"digest")


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def test_the_hosts_first_token_travels_in_the_ticket(world: World) -> None:
    p, d = world.engine("p"), world.engine("d")
    request = d.fetch("r", TOKENS, p.prefill("r", TOKENS, prefilled_tokens=SAMPLED))
    world.settle()
    assert d.half.take_prefilled_tokens("r") == SAMPLED
    assert d.half.take_prefilled_tokens("r") is None
    d.read_out(request)


def test_a_load_that_failed_leaves_the_token_good(world: World) -> None:
    p, d = world.engine("p"), world.engine("d")
    params = p.prefill("r", TOKENS, prefilled_tokens=SAMPLED)
    world.network.fail_next("cable pulled")
    request = d.fetch("r", TOKENS, params)
    world.settle()
    assert d.outcomes["r"].valid_tokens == 0
    assert d.half.take_prefilled_tokens("r") == SAMPLED
    d.read_out(request)


def test_a_ticket_for_less_than_the_prompt_says_nothing_of_what_follows_it(world: World) -> None:
    p, d = world.engine("p"), world.engine("d")
    request = d.fetch("r", [*TOKENS, 2, 6], p.prefill("r", TOKENS, prefilled_tokens=SAMPLED))
    world.settle()
    assert d.half.take_prefilled_tokens("r") is None
    d.read_out(request)


def test_a_refused_ticket_gives_no_token(world: World) -> None:
    p, d = world.engine("p"), world.engine("d")
    d.fetch("r", [9] * 6, p.prefill("r", TOKENS, prefilled_tokens=SAMPLED))
    assert d.half.take_prefilled_tokens("r") is None
