"""Of models whose layers have windows, push reads nothing early, and all of it at the end, by groups."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from baton.core.config import (
    CacheConfig,
    ClusterSecret,
    EngineConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
)
from baton.engine.checkpoint import load_model_config
from baton.engine.core import EngineCore
from baton.engine.new_model import write_checkpoint
from tests.connectors.test_push_in_engines import GREEDY, QUICK, Legs, legs_of, one_token, prompt_of

Start = Callable[..., EngineCore]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(
        folder, family="gemma3", hidden=64, layers=6, heads=4, kv_heads=2, vocab=512, sliding_window=10
    )
    return load_model_config(folder, max_model_len=256)


@pytest.fixture
def start(model: ModelConfig) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_engine(
            engine_id: str | None = None, *, stream: str = "chunk", hybrid: str = "auto"
        ) -> EngineCore:
            transfer = None
            if engine_id is not None:
                transfer = KVTransferConfig(
                    kv_connector="BatonPushConnector",
                    kv_role="kv_both",
                    engine_id=engine_id,
                    kv_connector_extra_config={"stream": stream, "timers": QUICK},
                )
            config = EngineConfig(
                model_config=model,
                cache_config=CacheConfig(num_gpu_blocks=200, block_size=4, hybrid_kv_cache=hybrid),  # type: ignore[arg-type]
                scheduler_config=SchedulerConfig(max_num_batched_tokens=16),
                kv_transfer_config=transfer,
                cluster_secret=ClusterSecret(b"sixteen bytes or more"),
            )
            core = EngineCore(config, "baton.assemble:connector_factory")
            stack.callback(core.shutdown)
            return core

        yield start_engine


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["chunk", "layer"])
def test_the_tokens_are_those_of_a_single_engine(start: Start, stream: str) -> None:
    p, d, alone = start("p", stream=stream), start("d", stream=stream), start()
    assert d.scheduler.kv_cache.is_hybrid
    legs = Legs(p, d, alone)
    decoded, expected = [], []
    for index, prompt in enumerate((prompt_of(70), prompt_of(3), prompt_of(32, step=11))):
        for_p, for_d = legs_of(p, f"t{index}")
        decoded.append(legs.add(d, f"r{index}", prompt, GREEDY, for_d))
        legs.add(p, f"r{index}", prompt, one_token(GREEDY), for_p)
        expected.append(legs.add(alone, f"r{index}", prompt, GREEDY))
    legs.run()
    assert [c.token_ids for c in decoded] == [c.token_ids for c in expected]
    assert all(c.num_transferred_tokens > 0 for c in decoded)
    assert legs.early_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize(("one_table", "num_moved"), [("p", 70), ("d", 0)])
def test_announced_blocks_of_one_table_are_never_read_into_several(
    start: Start, one_table: str, num_moved: int
) -> None:
    """Who keeps everything serves whoever needs less, when it is computed; not the other way."""
    p = start("p", hybrid="off" if one_table == "p" else "auto")
    d = start("d", hybrid="off" if one_table == "d" else "auto")
    alone = start()
    legs = Legs(p, d, alone)
    for_p, for_d = legs_of(p, "t")
    decoded = legs.add(d, "r", prompt_of(70), GREEDY, for_d)
    legs.add(p, "r", prompt_of(70), one_token(GREEDY), for_p)
    expected = legs.add(alone, "r", prompt_of(70), GREEDY)
    legs.run()
    assert decoded.token_ids == expected.token_ids
    assert decoded.num_transferred_tokens == num_moved
    assert legs.early_tokens == 0
