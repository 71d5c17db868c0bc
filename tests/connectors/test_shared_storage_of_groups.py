"""Models with several block tables share files; blocks before a window are not needed.

`test_shared_storage_random_worlds` has the cases of several ranks, preemption and restarts.
"""

import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from baton.core.config import ModelConfig
from baton.core.kv_groups import is_hybrid
from baton.engine.api import SamplingParams
from tests.connectors.engine_world import WINDOW, ModelOf, forget
from tests.connectors.storage_world import (
    CHUNK,
    GREEDY,
    WAIT_S,
    Start,
    by_position,
    config_of,
    files_in,
    fill,
    prompt_of,
    starting,
    storage,
)

pytestmark = pytest.mark.slow
PROMPT = prompt_of(70)  # Eight chunks and six tokens; nine chunks with the answer.
NUM_CHUNKS = 9
NUM_BLOCKS = 200
KINDS = {"gpt_oss": 2, "mistral": 1}  # All layers of a Mistral have a window.
BAD_FILES = [
    pytest.param(family, window, half_written, id=f"{family}-{name}")
    for family in KINDS
    for window, half_written, name in [
        (None, True, "half-written"),
        (WINDOW, True, "half-written-window"),
        (WINDOW, False, "corrupt-window"),
    ]
    if window is not None or family != "mistral"
]
Ask = Callable[..., list[int]]


@pytest.fixture(scope="module", params=KINDS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str, model_of: ModelOf) -> ModelConfig:
    return model_of(family)


@pytest.fixture
def start(model: ModelConfig) -> Iterator[Start]:
    """Engines whose prompts take several steps, so that blocks leave windows meanwhile."""
    with starting(model) as start_engine:
        yield partial(start_engine, num_blocks=NUM_BLOCKS, budget=24)


@pytest.fixture(scope="module")
def expected(model: ModelConfig) -> Iterator[Ask]:
    """What an engine without a connector answers, which keeps everything in one table. Each prompt once."""
    answers: dict[tuple[tuple[int, ...], int | None], list[int]] = {}
    with starting(model) as start_engine:
        alone = start_engine(
            num_blocks=NUM_BLOCKS, cache={"hybrid_kv_cache": "off", "enable_prefix_caching": False}
        )

        def answer(prompt: list[int], sampling: SamplingParams = GREEDY) -> list[int]:
            key = (tuple(prompt), sampling.max_tokens)
            if key not in answers:
                answers[key] = alone.generate([prompt], sampling)[0].token_ids
            return answers[key]

        yield answer


@pytest.fixture
def num_files(family: str) -> int:
    """Number of files of PROMPT and its answer."""
    return NUM_CHUNKS * KINDS[family]


def test_a_new_engine_reads_what_another_has_computed(
    start: Start,
    expected: Ask,
    tmp_path: Path,
    num_files: int,
    model: ModelConfig,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert is_hybrid(config_of(model, storage(tmp_path)).kv_cache_groups)
    with caplog.at_level(logging.WARNING):
        a = start(storage(tmp_path))
    assert "block table" not in caplog.text
    assert a.core.scheduler.kv_cache.is_hybrid
    assert fill(a, tmp_path, PROMPT, num_files) == expected(PROMPT)
    a.close()
    b = start(storage(tmp_path))
    (by_b,) = b.generate([PROMPT], GREEDY)
    assert by_b.token_ids == expected(PROMPT)
    assert by_b.num_transferred_tokens == 64
    for tail in (prompt_of(9, step=3), [], prompt_of(30, step=5)):
        for num_shared in (8, 27, 64):
            forget(b)
            prompt = [*PROMPT[:num_shared], *tail]
            (by_b,) = b.generate([prompt], GREEDY)
            assert by_b.token_ids == expected(prompt)
            least = min(num_shared, len(prompt) - 1) // CHUNK * CHUNK
            assert by_b.num_transferred_tokens >= least or num_shared == len(prompt)
    b.settle(WAIT_S)
    b.core.scheduler.kv_cache.assert_empty()


def test_after_a_local_hit_the_rest_is_loaded(
    start: Start, expected: Ask, tmp_path: Path, num_files: int
) -> None:
    fill(start(storage(tmp_path)), tmp_path, PROMPT, num_files)
    b = start(storage(tmp_path))
    for num_local in (5, 12, 33):
        forget(b)
        b.generate([PROMPT[:num_local]], SamplingParams(max_tokens=1, temperature=0))
        b.settle(WAIT_S)
        (by_b,) = b.generate([PROMPT], GREEDY)
        assert by_b.token_ids == expected(PROMPT)
        assert by_b.num_cached_tokens == 64
        assert by_b.num_transferred_tokens < 64 or num_local < CHUNK


def test_only_the_last_files_of_a_window_are_needed(
    start: Start, expected: Ask, tmp_path: Path, num_files: int
) -> None:
    fill(start(storage(tmp_path)), tmp_path, PROMPT, num_files)
    for file in by_position(tmp_path, PROMPT, WINDOW)[:6]:  # The last ten tokens of 64 are in the other two.
        file.unlink()
    (by_b,) = start(storage(tmp_path, "kv_consumer")).generate([PROMPT], GREEDY)
    assert by_b.token_ids == expected(PROMPT)
    assert by_b.num_transferred_tokens == 64


@pytest.mark.parametrize("missing", [6, 7])
def test_a_hit_ends_where_every_layer_can_be_served(
    start: Start, expected: Ask, tmp_path: Path, num_files: int, missing: int
) -> None:
    fill(start(storage(tmp_path)), tmp_path, PROMPT, num_files)
    by_position(tmp_path, PROMPT, WINDOW)[missing].unlink()
    (by_b,) = start(storage(tmp_path, "kv_consumer")).generate([PROMPT], GREEDY)
    assert by_b.token_ids == expected(PROMPT)
    assert by_b.num_transferred_tokens == missing * CHUNK


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize(("family", "window", "half_written"), BAD_FILES, indirect=["family"])
def test_a_bad_file_changes_no_token_and_is_written_again(
    start: Start,
    expected: Ask,
    tmp_path: Path,
    num_files: int,
    policy: str,
    half_written: bool,
    window: int | None,
) -> None:
    fill(start(storage(tmp_path)), tmp_path, PROMPT, num_files)
    bad = by_position(tmp_path, PROMPT, window)[7]
    whole = bad.read_bytes()
    if half_written:
        os.truncate(bad, len(whole) // 2)
    else:
        bad.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    b = start(storage(tmp_path, policy=policy))
    (by_b, other) = b.generate([PROMPT, PROMPT[:20]], GREEDY)
    assert other.token_ids == expected(PROMPT[:20])
    if policy == "fail":
        assert by_b.finish_reason == "error"
        assert by_b.error is not None
        assert "kv_load_failure_policy is 'fail'" in by_b.error.message
        (by_b,) = b.generate([PROMPT], GREEDY)
    assert by_b.token_ids == expected(PROMPT)
    b.settle(WAIT_S)
    b.core.scheduler.kv_cache.assert_empty()
    b.close()  # Closing waits for the writer.
    assert bad.stat().st_size == len(whole)
    (again,) = start(storage(tmp_path)).generate([PROMPT], GREEDY)
    assert again.token_ids == expected(PROMPT)
    assert again.num_transferred_tokens == 64


def test_another_grouping_or_block_size_finds_nothing(
    start: Start, expected: Ask, tmp_path: Path, num_files: int
) -> None:
    fill(start(storage(tmp_path)), tmp_path, PROMPT, num_files)
    kept = {path: path.read_bytes() for path in files_in(tmp_path)}
    for other in ({"cache": {"hybrid_kv_cache": "off"}}, {"block_size": 8}):
        (by_other,) = start(storage(tmp_path), **other).generate([PROMPT], GREEDY)
        assert by_other.token_ids == expected(PROMPT)
        assert by_other.num_transferred_tokens == 0
    assert all(path.read_bytes() == content for path, content in kept.items())
