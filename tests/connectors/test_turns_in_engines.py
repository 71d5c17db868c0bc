"""A conversation of three turns between two engines: the tokens are one engine's, the past travels back."""

from collections.abc import Iterator
from typing import Any

import pytest

from baton.core.config import ModelConfig
from baton.engine.api import SamplingParams
from tests.connectors.engine_world import ONE_TOKEN, Start, engines, hands_over

GREEDY = SamplingParams(max_tokens=11, temperature=0, ignore_eos=True)


@pytest.fixture
def start(model: ModelConfig) -> Iterator[Start]:
    with engines(model) as start_engine:
        yield lambda engine_id=None, kind="Pull": start_engine(
            hands_over(engine_id, kind, turns={"min_tokens": 8}), num_blocks=96
        )


@pytest.mark.slow
@pytest.mark.parametrize("connector", ["Pull", "Push"])
def test_three_turns_give_the_tokens_of_one_engine_and_p_computes_only_what_is_new(
    start: Start, connector: str
) -> None:
    p, d, alone = start("p", connector), start("d", connector), start()
    history: list[int] = []
    of_last_turn: dict[str, Any] | None = None
    for turn in range(3):
        prompt = [*history, *((7 * i + turn) % 500 + 5 for i in range(13))]
        leg = {**(of_last_turn or {"do_remote_decode": True}), "transfer_id": f"turn-{turn}"}
        (prefilled,) = p.generate([prompt], ONE_TOKEN, kv_transfer_params=[leg])
        assert prefilled.kv_transfer_params is not None
        if turn:
            # P has its own prefix cache of the last prompt; the answer's tokens come from D.
            assert prefilled.num_transferred_tokens > 8
            assert prefilled.num_cached_tokens == len(history) - 1
        (decoded,) = d.generate([prompt], GREEDY, kv_transfer_params=[prefilled.kv_transfer_params])
        (expected,) = alone.generate([prompt], GREEDY)
        assert decoded.token_ids == expected.token_ids
        of_last_turn = decoded.kv_transfer_params
        assert of_last_turn is not None
        history = [*prompt, *decoded.token_ids]
