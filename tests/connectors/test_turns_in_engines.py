"""A conversation of three turns between two engines: the tokens are one engine's, the past travels back."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from baton.core.config import CacheConfig, ClusterSecret, EngineConfig, KVTransferConfig, ModelConfig
from baton.engine.api import SamplingParams
from baton.engine.llm import LLM

GREEDY = SamplingParams(max_tokens=11, temperature=0, ignore_eos=True)
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)
Start = Callable[..., LLM]


@pytest.fixture
def start(model: ModelConfig) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_engine(engine_id: str | None = None, connector: str = "BatonPullConnector") -> LLM:
            transfer = None
            if engine_id is not None:
                transfer = KVTransferConfig(
                    kv_connector=connector,
                    kv_role="kv_both",
                    engine_id=engine_id,
                    kv_connector_extra_config={"turns": {"min_tokens": 8}},
                )
            config = EngineConfig(
                model_config=model,
                cache_config=CacheConfig(num_gpu_blocks=96, block_size=4),
                kv_transfer_config=transfer,
                cluster_secret=ClusterSecret(b"sixteen bytes or more"),
            )
            return stack.enter_context(LLM(config, "baton.assemble:connector_factory"))

        yield start_engine


@pytest.mark.slow
@pytest.mark.parametrize("connector", ["BatonPullConnector", "BatonPushConnector"])
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
