"""P's sampled token reaches the host of D once, and only for the whole prompt."""

import pytest

from baton.core.prefilled import PrefilledLogprob, PrefilledLogprobs, PrefilledTokens
from tests.connectors.pull_world import World

TOKENS = [3, 1, 4, 1, 5, 9]
LOGPROBS = PrefilledLogprobs(PrefilledLogprob(7, -0.5, 1), (PrefilledLogprob(7, -0.5, 1),))
SAMPLED = PrefilledTokens((7,), (LOGPROBS,), b"digest")


@pytest.mark.parametrize(
    ("tokens", "fails", "is_good"),
    [
        (TOKENS, False, True),
        (TOKENS, True, True),  # The load failed, the token is good.
        ([*TOKENS, 2, 6], False, False),  # The ticket says nothing of what follows its prompt.
    ],
)
def test_the_hosts_first_token_travels_in_the_ticket(
    world: World, tokens: list[int], fails: bool, is_good: bool
) -> None:
    p, d = world.engine("p"), world.engine("d")
    params = p.prefill("r", TOKENS, prefilled_tokens=SAMPLED)
    if fails:
        world.network.fail_next("cable pulled")
    request = d.fetch("r", tokens, params)
    world.settle()
    assert d.half.take_prefilled_tokens("r") == (SAMPLED if is_good else None)
    assert d.half.take_prefilled_tokens("r") is None
    assert bool(d.read_out(request).valid_tokens) == (not fails)


def test_a_refused_ticket_gives_no_token(world: World) -> None:
    p, d = world.engine("p"), world.engine("d")
    d.fetch("r", [9] * 6, p.prefill("r", TOKENS, prefilled_tokens=SAMPLED))
    assert d.half.take_prefilled_tokens("r") is None
