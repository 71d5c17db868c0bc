"""Loads layer by layer in engines: the forward pass begins before the last section is read."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.checkpoints.checkpoint import load_model_config
from baton.checkpoints.random_model import write_checkpoint
from baton.connectors.storage.stores.worker import StorageWorkerHalf
from baton.core.config import ModelConfig
from baton.stores.backends.files import FileStore
from tests.connectors import storage_world
from tests.connectors.engine_world import forget
from tests.connectors.storage_world import (
    GREEDY,
    WAIT_S,
    Start,
    by_position,
    files_in,
    fill,
    prompt_of,
    starting,
    storage,
)

pytestmark = pytest.mark.slow

CHUNK = 64
LAYERWISE = {"chunk_tokens": CHUNK, "layerwise": True, "layer_wait_s": WAIT_S, "prefetch_max_mib": 0}
NUM_TOKENS, NUM_LOADED = 3 * CHUNK + 30, 3 * CHUNK + 28


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """A chunk has 1 MiB, in four sections of two layers; of a rank of two, two sections of four."""
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, hidden=256, layers=8, heads=2, kv_heads=2, vocab=512, max_position=512)
    return load_model_config(folder, max_model_len=512)


@pytest.fixture
def start(model: ModelConfig) -> Iterator[Start]:
    with starting(model) as start_engine:
        yield start_engine


def damage(path: Path) -> None:
    """Flips a bit in the file's last section."""
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.parametrize("encrypt", [False, True])
def test_later_sections_are_read_while_the_step_runs(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool, encrypt: bool
) -> None:
    settings = {**LAYERWISE, "encrypt": encrypt}
    a, alone = start(storage(tmp_path, **settings), num_blocks=128), start(num_blocks=128)
    prompt = prompt_of(NUM_TOKENS)
    fill(a, tmp_path, prompt, num_files=4)
    if is_damaged:
        monkeypatch.setattr(storage_world, "CHUNK", CHUNK)
        damage(by_position(tmp_path, prompt)[1])
    is_running = threading.Event()
    read_part, wait_for_layer = FileStore.read_part, StorageWorkerHalf.wait_for_layer_load
    num_held = 0

    def hold(self: FileStore, name: str, into: memoryview, start: int, nbytes: int) -> None:
        nonlocal num_held
        if start > 0:
            num_held += 1
            assert is_running.wait(WAIT_S)
        read_part(self, name, into, start, nbytes)

    def note(self: StorageWorkerHalf, layer_name: str) -> None:
        is_running.set()
        wait_for_layer(self, layer_name)

    b = start(storage(tmp_path, **settings), num_blocks=128)
    monkeypatch.setattr(FileStore, "read_part", hold)
    monkeypatch.setattr(StorageWorkerHalf, "wait_for_layer_load", note)
    (by_b,) = b.generate([prompt], GREEDY)
    (expected,) = alone.generate([prompt], GREEDY)
    assert by_b.token_ids == expected.token_ids
    assert num_held > 0
    assert by_b.num_transferred_tokens == (0 if is_damaged else NUM_LOADED)


@pytest.mark.processes
@pytest.mark.usefixtures("forked_programs")
def test_on_two_ranks_of_which_one_finds_a_damaged_section(start: Start, tmp_path: Path) -> None:
    transfer = storage(tmp_path, **LAYERWISE)
    engine, alone = start(transfer, num_blocks=80, tp_size=2), start(num_blocks=80)
    prompt = prompt_of(NUM_TOKENS)
    fill(engine, tmp_path, prompt, num_files=8)
    (expected,) = alone.generate([prompt], GREEDY)
    (bad, *_) = (path for path in files_in(tmp_path) if ".1." in path.name)
    for is_damaged in (False, True):
        forget(engine)
        if is_damaged:
            damage(bad)
        (completion,) = engine.generate([prompt], GREEDY)
        assert completion.token_ids == expected.token_ids
        # Chunks before the bad one are of use if it was found before the request ran.
        assert (completion.num_transferred_tokens == NUM_LOADED) != is_damaged
