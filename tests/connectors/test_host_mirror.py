"""A cache on a device whose peers see a copy in host memory: right tokens, also when a copy fails."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
import torch

from baton.connectors.pull import EngineIdentity
from baton.connectors.pull.metadata import ReadBlocks
from baton.connectors.pull.reads.host_mirror import HostMirror
from baton.core.config import (
    DeviceConfig,
    ModelConfig,
)
from baton.core.errors import ConfigError
from baton.core.ids import Address, EngineId, Epoch
from baton.engine.attention.cuda import why_unavailable
from baton.engine.attention.kv_memory import KVCacheLayout, allocate_kv_cache
from baton.engine.forward_context import build_attention_metadata
from baton.engine.llm import LLM
from baton.engine.runner.cache_setup import copy_blocks
from tests.connectors import mirrored
from tests.connectors.engine_world import (
    GREEDY,
    Start,
    config_of,
    engines,
    hand_over,
    hands_over,
    start_in,
)
from tests.connectors.mirrored import COUNTED
from tests.connectors.pull_world import BLOCK, engine_config

PROMPT = [(7 * i) % 500 + 5 for i in range(50)]
# The same beginning, so that P finds some of it computed.
PROMPTS = [PROMPT, [*PROMPT[:30], *range(100, 117)], [(11 * i) % 500 + 5 for i in range(31)]]

# --- The mirror ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_it_has_the_shape_of_the_cache_and_what_was_saved(layout: KVCacheLayout) -> None:
    config = engine_config("e")
    caches = allocate_kv_cache(config.model_config, config.cache_config, 0, 1, "cpu", layout=layout)
    for cache in caches.values():
        cache.copy_(torch.rand(cache.shape))
    mirror = HostMirror(caches, BLOCK)
    mirror.bind(copy_blocks)
    storages = {cache.untyped_storage().data_ptr() for cache in mirror.caches.values()}
    assert len(storages) == 1
    # Tokens 3 to 6 of a request in blocks 9 and 2; block 5 was there before.
    metadata = build_attention_metadata([3], [3], [[9, 2]], BLOCK)
    mirror.save([metadata], [5])
    for name, copied in mirror.caches.items():
        assert copied.stride() == caches[name].stride()
        for block, cache in enumerate(caches[name]):
            assert copied[block].equal(cache) is (block in (2, 5, 9))
    mirror.save((), ())


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_what_a_claim_has_read_goes_to_the_device_and_nothing_else(layout: KVCacheLayout) -> None:
    config = engine_config("e")
    caches = allocate_kv_cache(config.model_config, config.cache_config, 0, 1, "cpu", layout=layout)
    mirror = HostMirror(caches, BLOCK)
    mirror.bind(copy_blocks)
    for cache in mirror.caches.values():
        cache.fill_(1)
    p = Address(EngineId("p"), Epoch(1))
    # |  block 3, a local hit  |  7  |  1  |  a block after the prompt   |
    mirror.expect(ReadBlocks(4, p, (), BLOCK, BLOCK + 1, (3, 7, 1, 8), (0, 1, 2, 3)))
    mirror.expect(ReadBlocks(5, p, (), 0, BLOCK, (6,), (0,)))
    mirror.load(4)
    mirror.forget(4)
    for cache in caches.values():
        assert [block for block in range(len(cache)) if cache[block].any()] == [1, 7]
    mirror.load(4)
    assert not any(cache[6].any() for cache in caches.values())


def test_a_host_that_cannot_copy_is_told_so() -> None:
    config = engine_config("e")
    caches = allocate_kv_cache(config.model_config, config.cache_config, 0, 1, "cpu")
    with pytest.raises(ConfigError, match="kv_buffer_device"):
        HostMirror(caches, BLOCK).save((), [1])


@pytest.mark.parametrize(
    ("buffer", "device", "expected"),
    [
        (None, "cpu", False),
        ("cpu", "cpu", False),
        (None, "cuda", False),
        ("cuda", "cuda", False),
        ("cpu", "cuda", True),
    ],
)
def test_the_configuration_says_where_the_buffer_is(buffer: str | None, device: Any, expected: bool) -> None:
    config = engine_config("e")
    transfer = msgspec.structs.replace(config.kv_transfer_config, kv_buffer_device=buffer)
    config = msgspec.structs.replace(
        config, kv_transfer_config=transfer, device_config=DeviceConfig(device=device)
    )
    assert EngineIdentity.of_engine(config).has_host_mirror is expected


def test_a_buffer_on_a_device_that_is_not_the_caches_is_refused() -> None:
    config = engine_config("e")
    transfer = msgspec.structs.replace(config.kv_transfer_config, kv_buffer_device="cuda")
    with pytest.raises(ConfigError, match="kv_buffer_device"):
        EngineIdentity.of_engine(msgspec.structs.replace(config, kv_transfer_config=transfer))


@pytest.mark.gpu
def test_blocks_cross_between_a_gpu_and_its_mirror() -> None:
    if (reason := why_unavailable()) is not None:
        pytest.skip(reason)
    config = engine_config("e")
    caches = allocate_kv_cache(config.model_config, config.cache_config, 0, 1, "cuda")
    for cache in caches.values():
        cache.copy_(torch.rand(cache.shape))
    mirror = HostMirror(caches, BLOCK)
    mirror.bind(copy_blocks)
    mirror.save((), [1, 7])
    expected = {name: cache[[1, 7]].cpu() for name, cache in caches.items()}
    for name, cache in caches.items():
        assert mirror.caches[name].is_pinned()
        assert mirror.caches[name][[1, 7]].equal(expected[name])
        cache.zero_()
    mirror.expect(ReadBlocks(1, Address(EngineId("p"), Epoch(1)), (), 0, 2 * BLOCK, (1, 7), (0, 1)))
    mirror.load(1)
    for name, cache in caches.items():
        assert cache[[1, 7]].cpu().equal(expected[name])


# --- Engines ---------------------------------------------------------------------------------------------


@pytest.fixture
def start(model: ModelConfig) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_engine(
            engine_id: str | None = None,
            connector: str = "MirroredPull",
            of_model: ModelConfig = model,
            budget: int = 24,  # Prompts come in chunks.
            **extra: Any,
        ) -> LLM:
            transfer = hands_over(engine_id, **extra)
            if transfer is not None:
                module = mirrored.__name__ if connector.startswith("Mirrored") else None
                transfer |= {"kv_connector": connector, "kv_connector_module_path": module}
            return start_in(stack, config_of(of_model, transfer, budget=budget))

        yield start_engine
        COUNTED.fails = None
        COUNTED.blocks.clear()


def hand_all_over(p: LLM, d: LLM) -> list[list[int]]:
    return [hand_over(p, d, prompt).token_ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(model: ModelConfig) -> list[list[int]]:
    with engines(model) as start:
        return [completion.token_ids for completion in start().generate(PROMPTS, GREEDY)]


@pytest.mark.slow
@pytest.mark.parametrize(("connector", "together"), [("MirroredPull", False), ("MirroredPush", True)])
def test_the_tokens_are_those_of_a_single_engine(
    start: Start, expected: list[list[int]], connector: str, together: bool
) -> None:
    p, d = start("p", connector, cross_layer_blocks=together), start("d", connector)
    assert hand_all_over(p, d) == expected
    half: Any = d.core.executor.only_half()
    assert half.worker_half.mirror._expected == {}, "claims that are still being read"
    assert COUNTED.blocks["d2h"] > 0
    # Whole prompts, but for what the second shares with the first.
    assert COUNTED.blocks["h2d"] == 13 + 5 + 8


@pytest.mark.slow
def test_engines_with_and_without_understand_each_other(start: Start, expected: list[list[int]]) -> None:
    assert hand_all_over(start("p1"), start("d1", "BatonPullConnector")) == expected
    assert hand_all_over(start("p2", "BatonPullConnector"), start("d2")) == expected


@pytest.mark.slow
def test_what_could_not_be_copied_to_the_device_is_computed_there(
    start: Start, expected: list[list[int]]
) -> None:
    p, d = start("p"), start("d")
    COUNTED.fails = "h2d"
    assert hand_all_over(p, d) == expected


@pytest.mark.slow
def test_a_mirror_that_could_not_be_written_is_not_read(start: Start, expected: list[list[int]]) -> None:
    """P sends the ticket before it could withdraw it, because one step computes the whole prompt."""
    p, d = start("p", budget=64), start("d")
    COUNTED.fails = "d2h"
    answer = hand_over(p, d, PROMPT)
    assert answer.token_ids == expected[0]
    assert answer.num_transferred_tokens == 0
    assert COUNTED.blocks["h2d"] == 0


def test_layers_cannot_be_streamed_from_a_mirror(start: Start) -> None:
    with pytest.raises(ConfigError, match="stream: layer cannot go with kv_buffer_device cpu"):
        start("p", "MirroredPush", stream="layer")
