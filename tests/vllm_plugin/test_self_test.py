"""The self-test of a rank's caches: reads every kind of cache, finds wrong layouts, and leaves no trace."""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from baton.connectors.pull import EngineIdentity
from baton.connectors.pull.reads.cache_layout import layout_of
from baton.core.errors import ConfigError, PeerError, TransferError
from baton.core.layout import PLANES, SLOT, RankLayout
from baton.core.states import StatePart
from baton.hosts.vllm import self_test
from baton.hosts.vllm.self_test import run_self_test
from baton.testing.host.config import model_config
from tests.connectors.pull_world import BLOCK, HEADS, engine_config
from tests.transport.fake_cuda import COMPILER, FakeDevice, FakeDeviceMemory, build
from tests.vllm_plugin.test_connector import PARALLEL, roles
from tests.vllm_plugin.test_start import FullAttentionSpec, groups, vllm_config

CONTENT = 6
BLOCKS = 16
PARTS = (StatePart("conv", 2, (3,), "bfloat16"), StatePart("ssm", 4, (5,), "float32"))
STATE_BYTES = 2 * 3 * 2 + 4 * 5 * 4
IDENTITY = EngineIdentity.of_engine(engine_config("e"))
LATENT = EngineIdentity.of_engine(engine_config("e", model=model_config(num_kv_heads=1)))
WITH_STATES = msgspec.structs.replace(IDENTITY, state_parts=PARTS, state_alignment=1)
LAST_RANK = msgspec.structs.replace(IDENTITY, tp_size=2, tp_rank=1, pp_size=2, pp_rank=1)

Kind = tuple[dict[str, torch.Tensor], RankLayout]


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What was there before the test: any bytes, also those of NaN."""
    nbytes = torch.empty(shape, dtype=dtype).nbytes
    made = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    return made.view(dtype).view(shape)


def heads_first(packing: str = SLOT) -> Kind:
    caches = {name: noise(BLOCKS, HEADS, BLOCK, CONTENT) for name in ("layers.0", "layers.1")}
    return caches, layout_of(caches, IDENTITY, packing)


def tokens_first() -> Kind:
    caches = {"layers.0": noise(BLOCKS, BLOCK, HEADS, CONTENT, dtype=torch.bfloat16).transpose(1, 2)}
    return caches, layout_of(caches, IDENTITY)


def layers_in_blocks() -> Kind:
    caches = dict(
        zip(("layers.0", "layers.1"), noise(BLOCKS, 2, HEADS, BLOCK, CONTENT).unbind(1), strict=True)
    )
    return caches, layout_of(caches, IDENTITY)


def latent() -> Kind:
    caches = {"layers.0": noise(BLOCKS, BLOCK, CONTENT), "layers.0.indexer": noise(BLOCKS, BLOCK, 2)}
    return caches, layout_of(caches, LATENT)


def windows() -> Kind:
    """Two groups that share their memory."""
    caches = dict.fromkeys(("layers.0", "layers.1"), noise(BLOCKS, HEADS, BLOCK, CONTENT))
    return caches, layout_of(caches, IDENTITY, group_of={"layers.0": 0, "layers.1": 1})


def states() -> Kind:
    """The states' pages are those of the attention layer."""
    attention = noise(BLOCKS, HEADS, BLOCK, CONTENT)
    pages = attention.flatten(1).view(torch.uint8)
    caches = {"layers.0": pages[:, :STATE_BYTES], "layers.1": attention}
    return caches, layout_of(caches, WITH_STATES, group_of={"layers.0": 0, "layers.1": 1})


def states_alone() -> Kind:
    caches = {f"layers.{layer}": noise(BLOCKS, STATE_BYTES, dtype=torch.uint8) for layer in range(2)}
    return caches, layout_of(caches, WITH_STATES)


def of_the_last_rank() -> Kind:
    caches = {"layers.1": noise(BLOCKS, HEADS // 2, BLOCK, CONTENT)}
    return caches, layout_of(caches, LAST_RANK)


def shared_by_two_layers() -> Kind:
    caches = dict.fromkeys(("layers.0", "layers.1"), noise(BLOCKS, HEADS, BLOCK, CONTENT))
    return caches, layout_of(caches, IDENTITY)


KINDS: list[Callable[[], Kind]] = [
    heads_first,
    partial(heads_first, PLANES),
    partial(heads_first, "vllm OTHER auto"),
    tokens_first,
    layers_in_blocks,
    latent,
    windows,
    states,
    states_alone,
    of_the_last_rank,
    shared_by_two_layers,
]


def content_of(caches: dict[str, torch.Tensor]) -> list[bytes]:
    return [bytes(cache.untyped_storage()) for cache in caches.values()]  # type: ignore[call-overload]


@pytest.mark.parametrize("make", KINDS)
def test_every_kind_of_cache_is_read_and_restored(make: Callable[[], Kind]) -> None:
    caches, layout = make()
    before = content_of(caches)
    checked = run_self_test(layout, caches)
    for group in {cache.group for cache in layout.caches}:
        assert f"group {group} (" in checked
    assert "by local" in checked
    assert content_of(caches) == before


def test_all_bytes_of_a_block_are_read() -> None:
    caches, layout = states()
    assert run_self_test(layout, caches) == (
        f"group 0 (1 layers), {STATE_BYTES} bytes by local:cross-memory; "
        f"group 1 (1 layers), {HEADS * BLOCK * CONTENT * 4} bytes by local:cross-memory"
    )


def wrong_layer(layout: RankLayout, **change: Callable[[int], int]) -> RankLayout:
    def changed(cache: Any) -> Any:
        return msgspec.structs.replace(
            cache, **{name: change_one(getattr(cache, name)) for name, change_one in change.items()}
        )

    if layout.states:
        return msgspec.structs.replace(layout, states=tuple(map(changed, layout.states)))
    return msgspec.structs.replace(layout, layers=tuple(map(changed, layout.layers)))


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (heads_first, {"block_stride": lambda nbytes: nbytes - 24}),
        (heads_first, {"block_stride": lambda nbytes: nbytes // 2}),
        (heads_first, {"block_stride": lambda nbytes: nbytes * 2}),
        (layers_in_blocks, {"block_stride": lambda nbytes: nbytes // 2}),
        (layers_in_blocks, {"offset": lambda nbytes: 0}),
        (heads_first, {"head_bytes": lambda nbytes: nbytes // 2}),
        (tokens_first, {"token_stride": lambda nbytes: 0}),
        (tokens_first, {"head_stride": lambda nbytes: nbytes + 2}),
        (states_alone, {"block_stride": lambda nbytes: nbytes - 1}),
        (states_alone, {"parts": lambda parts: parts[:1]}),
    ],
)
def test_a_layout_that_does_not_describe_the_memory_is_found(
    make: Callable[[], Kind], change: dict[str, Callable[[Any], Any]]
) -> None:
    caches, layout = make()
    with pytest.raises((TransferError, PeerError), match="layer"):
        run_self_test(wrong_layer(layout, **change), caches)


def test_a_cache_of_too_few_blocks_is_not_tested() -> None:
    caches = {"layers.0": noise(4, HEADS, BLOCK, CONTENT)}
    with pytest.raises(TransferError, match="has 4 blocks, and the self-test needs 5"):
        run_self_test(layout_of(caches, IDENTITY), caches)


def test_a_host_without_cross_memory_attach_is_tested_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError(1, os.strerror(1))

    monkeypatch.setattr("baton.transport.base.identity_page.read_process_memory", forbidden)
    caches, layout = heads_first()
    assert "by memory" in run_self_test(layout, caches)


def test_a_read_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(*_: object) -> int:
        raise OSError(14, os.strerror(14))

    monkeypatch.setattr("baton.transport.local.transport.read_process_memory", torn)
    caches, layout = heads_first()
    before = content_of(caches)
    with pytest.raises(TransferError, match="process"):
        run_self_test(layout, caches)
    assert content_of(caches) == before


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler for the driver's double")
def test_a_cache_on_a_gpu_is_read_in_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A double replaces CUDA's driver; a process cannot open its own handles in it either."""
    library = build(tmp_path)
    content = noise(BLOCKS, HEADS, BLOCK, CONTENT).view(torch.uint8).flatten().numpy()
    memory = FakeDeviceMemory(FakeDevice(library), np.array([content]))
    cache = torch.from_numpy(memory[0]).view(torch.float32).view(BLOCKS, HEADS, BLOCK, CONTENT)
    monkeypatch.setattr(self_test, "_OwnAllocations", partial(self_test._OwnAllocations, library))
    layout = msgspec.structs.replace(layout_of({"layers.0": cache}, IDENTITY), regions=tuple(memory.regions))
    assert "by cuda_ipc" in run_self_test(layout, {"layers.0": cache})
    assert (memory[0] == content).all()
    with pytest.raises((TransferError, PeerError), match="layer"):
        run_self_test(wrong_layer(layout, block_stride=lambda nbytes: nbytes // 2), {"layers.0": cache})


# --- In a connector ----------------------------------------------------------------------------------


@pytest.fixture
def worker(plugin: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    kind, config = plugin.BatonPullConnector, groups(FullAttentionSpec())
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.40.0")
    config.num_blocks = BLOCKS
    monkeypatch.setattr("baton.hosts.vllm.view.find_packing", lambda config, caches: SLOT)
    connector = kind(vllm_config(folder, parallel=PARALLEL), roles().WORKER, config)
    yield connector
    connector.shutdown()


def test_an_unlisted_vllm_starts_with_one_warning(worker: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        worker.register_kv_caches({"l0": noise(BLOCKS, 2, 128, 16)})
    (record,) = (one for one in caplog.records if one.levelname == "WARNING")
    assert record.getMessage() == (
        "vLLM 0.40.0 is not among the tested versions (0.31, 0.32 and 0.33); it fits the record of one, and "
        f"passes the self-test: FullAttentionSpec; group 0 (1 layers), {2 * 128 * 16 * 4} bytes by "
        "local:cross-memory"
    )


def test_an_unlisted_vllm_whose_layout_is_wrong_is_refused(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misreported(*arguments: Any) -> RankLayout:
        return wrong_layer(layout_of(*arguments), block_stride=lambda nbytes: nbytes // 2)

    monkeypatch.setattr("baton.connectors.pull.worker.layout_of", misreported)
    with pytest.raises(
        ConfigError, match=r"vLLM 0\.40\.0.*fails the self-test: .*l0.*Install 0\.31, 0\.32 or"
    ):
        worker.register_kv_caches({"l0": noise(BLOCKS, 2, 128, 16)})


def test_tables_of_other_blocks_than_the_caches_are_refused(worker: Any) -> None:
    with pytest.raises(ConfigError, match="have 8 blocks, and vLLM's tables 16"):
        worker.register_kv_caches({"l0": noise(8, 2, 128, 16)})
