"""vLLM engines that share a folder share prompts; damaged files cost time and no token."""

import time
from pathlib import Path

import pytest

from tests.vllm.engines import ANSWER_S, Server, Site, VllmPlan, transfer
from tests.vllm.prompts import Single, prompts

CHUNK = 256  # Two of vLLM's blocks.
ASKED = [prompt for prompt in prompts() if len(prompt) in (300, 513, 1500)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def pair(site: Site, single: Single, folder: Path) -> tuple[Server, Server]:
    def plan(name: str) -> VllmPlan:
        extra = {"path": str(folder)}
        return VllmPlan(name, transfer("BatonSharedStorageConnector", "kv_both", name, extra=extra))

    servers = site.cast("storage", plan("a"), plan("b"))
    return servers["a"], servers["b"]


def files_in(folder: Path) -> set[Path]:
    return set(folder.glob("*/*/*.safetensors"))


def wait_files(engine: Server, folder: Path, num_files: int) -> set[Path]:
    """Wait for the files: they appear a step and a write after the answer, their counts with a later step."""
    deadline_s = time.monotonic() + ANSWER_S
    while len(found := files_in(folder)) < num_files:
        assert time.monotonic() < deadline_s, f"{len(found)} of {num_files}"
        assert engine.is_healthy()
    return found


def test_one_engine_computes_and_the_other_reads(
    pair: tuple[Server, Server], single: Single, folder: Path
) -> None:
    a, b = pair
    for prompt in ASKED:
        assert a.tokens(prompt) == single.tokens(prompt), len(prompt)
    num_chunks = len({tuple(p[: end * CHUNK]) for p in ASKED for end in range(1, len(p) // CHUNK + 1)})
    wait_files(a, folder, num_chunks)
    for prompt in ASKED:
        assert b.tokens(prompt) == single.tokens(prompt), len(prompt)
    b.wait_metric("baton:storage_loaded_chunks_total", lambda count: count >= len(ASKED))
    assert b.metric("baton:storage_unusable_files_total") == 0


def test_damaged_files_are_recomputed(pair: tuple[Server, Server], single: Single, folder: Path) -> None:
    a, b = pair
    (prompt,) = (prompt for prompt in prompts() if len(prompt) == 777)
    before = files_in(folder)
    assert a.tokens(prompt) == single.tokens(prompt)
    for path in wait_files(a, folder, len(before) + len(prompt) // CHUNK) - before:
        content = bytearray(path.read_bytes())
        content[-9] ^= 1
        path.write_bytes(content)
    assert b.tokens(prompt) == single.tokens(prompt)
    assert b.tokens(prompt, cache_salt="mine") == single.tokens(prompt), "under other keys"
    b.wait_metric("baton:storage_unusable_files_total", lambda count: count == 1, reason="corrupt")
