"""Engines that replay recorded decode steps keep their connectors' layer hooks, with any executor.

`tests/engine_models/test_graphs.py` counts the replays in rank processes; this file checks the tokens.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

from baton.core.config import (
    ClusterSecret,
    DeviceConfig,
    EngineConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
)
from baton.engine.checkpoints.checkpoint import load_model_config
from baton.engine.checkpoints.random_model import write_checkpoint
from baton.engine.core.engine_core import EngineCore
from tests.connectors.engine_world import PATIENT
from tests.connectors.offload_world import GREEDY, Engine, config_of
from tests.connectors.test_push_in_engines import Legs, legs_of, one_token, prompt_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.parametrize(
        ("executor", "mode"),
        [
            ("inprocess", "piecewise"),
            ("inprocess", "full"),
            ("multiprocess", "full"),
            ("ray", "piecewise"),  # Only the connection to ranks differs, and it starts slowly.
        ],
    ),
]
Start = Callable[[EngineConfig], EngineCore]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, hidden=64, layers=3, heads=4, kv_heads=2, vocab=512)
    return load_model_config(folder, max_model_len=256)


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def start_engine(config: EngineConfig) -> EngineCore:
            core = EngineCore(config, "baton.assemble:connector_factory")
            stack.callback(core.shutdown)
            return core

        yield start_engine


def recorded(mode: str, executor: str) -> dict[str, Any]:
    """Fields of an EngineConfig."""
    # Not imported here, because the executor must import it first.
    if executor == "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    has_one = executor == "inprocess"
    return {
        "device_config": DeviceConfig(graph_mode=mode),  # type: ignore[arg-type]
        "parallel_config": ParallelConfig(
            tensor_parallel_size=1 if has_one else 2,
            executor=executor,  # type: ignore[arg-type]
            max_concurrent_batches=1 if has_one else 2,
        ),
    }


def test_a_prompt_is_pushed_layer_by_layer(
    start: Start, model: ModelConfig, mode: str, executor: str
) -> None:
    alone = start(config_of(model, 96, slots=None))
    pair = []
    for engine_id in ("p", "d"):
        config = config_of(model, 96, slots=None, max_num_batched_tokens=16, engine=recorded(mode, executor))
        transfer = KVTransferConfig(
            kv_connector="BatonPushConnector",
            kv_role="kv_both",
            engine_id=engine_id,
            kv_connector_extra_config={"stream": "layer", "timers": PATIENT},
        )
        secret = ClusterSecret(b"sixteen bytes or more")
        pair.append(
            start(msgspec.structs.replace(config, kv_transfer_config=transfer, cluster_secret=secret))
        )
    p, d = pair
    legs = Legs(p, d, alone)
    decoded, expected = [], []
    for index, prompt in enumerate((prompt_of(50), prompt_of(3), prompt_of(32, step=11))):
        for_p, for_d = legs_of(p, f"t{index}")
        decoded.append(legs.add(d, f"r{index}", prompt, GREEDY, for_d))
        legs.add(p, f"r{index}", prompt, one_token(GREEDY), for_p)
        # P's own request, so that it decodes while it computes what D waits for.
        decoded.append(legs.add(p, f"own{index}", prompt, GREEDY))
        expected += [legs.add(alone, f"{whose}{index}", prompt, GREEDY) for whose in ("r", "own")]
    legs.run()
    assert [c.token_ids for c in decoded] == [c.token_ids for c in expected]
    assert all(c.num_transferred_tokens > 0 for c in decoded[::2])


def test_offloaded_blocks_are_loaded(start: Start, model: ModelConfig, mode: str, executor: str) -> None:
    alone = Engine(start(config_of(model, slots=None)))
    engine = Engine(start(config_of(model, slots=30, engine=recorded(mode, executor))))
    prompts = [prompt_of(40), prompt_of(33, step=11), prompt_of(60, step=13)]
    for prompt in (*prompts, prompts[2], *prompts):
        engine.forget()
        alone.forget()
        assert engine.tokens(prompt) == alone.tokens(prompt)
    assert engine.counts["hit_tokens"]
    engine.assert_whole()
