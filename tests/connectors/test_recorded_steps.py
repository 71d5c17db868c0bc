"""Engines that replay recorded decode steps keep their connectors' layer hooks, with any executor.

`tests/engine_models/test_graphs.py` counts the replays in rank processes; this file checks the tokens.
"""

from contextlib import ExitStack
from typing import Any

import pytest

from baton.core.config import DeviceConfig, EngineConfig, ModelConfig, ParallelConfig
from tests.connectors import offload_world
from tests.connectors.engine_world import (
    PATIENT,
    Stepped,
    add_pair,
    config_of,
    core_in,
    hands_over,
    prompt_of,
    run_all,
)
from tests.connectors.offload_world import Engine

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.usefixtures("forked_programs")]


def recorded(mode: str, executor: str) -> dict[str, Any]:
    """Fields of an EngineConfig."""
    has_one = executor == "inprocess"
    return {
        "device_config": DeviceConfig(graph_mode=mode),  # type: ignore[arg-type]
        "parallel_config": ParallelConfig(
            tensor_parallel_size=1 if has_one else 2,
            executor=executor,  # type: ignore[arg-type]
            max_concurrent_batches=1 if has_one else 2,
        ),
    }


@pytest.mark.parametrize(("executor", "mode"), [("inprocess", "full"), ("multiprocess", "piecewise")])
def test_a_prompt_is_pushed_layer_by_layer(
    stack: ExitStack, model: ModelConfig, mode: str, executor: str
) -> None:
    def start(engine_id: str | None, **fields: Any) -> Stepped:
        transfer = hands_over(engine_id, "Push", stream="layer", timers=PATIENT, cross_layer_blocks=True)
        return Stepped(core_in(stack, config_of(model, transfer, num_blocks=96, budget=16, **fields)))

    p, d = start("p", **recorded(mode, executor)), start("d", **recorded(mode, "inprocess"))
    alone = start(None)
    decoded, expected = [], []
    for index, prompt in enumerate((prompt_of(50), prompt_of(3), prompt_of(32, step=11))):
        decoded.append(add_pair(p, d, f"r{index}", prompt))
        # P's own request, so that it decodes while it computes what D waits for.
        decoded.append(p.add(f"own{index}", prompt))
        expected += [alone.add(f"{whose}{index}", prompt) for whose in ("r", "own")]
    run_all(p, d, alone)
    assert [c.token_ids for c in decoded] == [c.token_ids for c in expected]
    assert all(c.num_transferred_tokens > 0 for c in decoded[::2])


@pytest.mark.parametrize(("executor", "mode"), [("inprocess", "piecewise"), ("multiprocess", "full")])
def test_offloaded_blocks_are_loaded(stack: ExitStack, model: ModelConfig, mode: str, executor: str) -> None:
    def start(slots: int | None, **fields: Any) -> Engine:
        config: EngineConfig = offload_world.config_of(model, slots=slots, engine=fields)
        return Engine(core_in(stack, config))

    engine, alone = start(30, **recorded(mode, executor)), start(None)
    prompts = [prompt_of(40), prompt_of(33, step=11), prompt_of(60, step=13)]
    for prompt in (*prompts, prompts[2], *prompts):
        engine.forget()
        alone.forget()
        assert engine.tokens(prompt) == alone.tokens(prompt)
    assert engine.counts["hit_tokens"]
    engine.assert_whole()
