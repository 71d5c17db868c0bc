"""Engines with one folder share prompts. With any defect of the folder, the tokens are right."""

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from baton.checkpoints.checkpoint import load_model_config
from baton.checkpoints.random_model import write_checkpoint
from baton.core.config import ClusterSecret, ModelConfig
from tests.connectors.engine_world import forget
from tests.connectors.storage_world import (
    CHUNK,
    GREEDY,
    WAIT_S,
    Start,
    by_position,
    files_in,
    fill,
    keys_of,
    prompt_of,
    starting,
    storage,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def start(model: ModelConfig) -> Iterator[Start]:
    with starting(model) as start_engine:
        yield start_engine


def test_one_engine_reads_what_another_has_computed(start: Start, tmp_path: Path) -> None:
    a, b, alone = start(storage(tmp_path)), start(storage(tmp_path)), start()
    prompt = prompt_of(43)
    answer_of_a = fill(a, tmp_path, prompt, num_files=6)  # 48 of its 49 tokens: answers are stored too.
    (by_b,) = b.generate([prompt], GREEDY)
    (expected,) = alone.generate([prompt], GREEDY)
    assert answer_of_a == by_b.token_ids == expected.token_ids
    assert by_b.num_transferred_tokens == 40


# --- Defects of the folder - --------------------------------------------------------------


def corrupt(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)  # A plain open blocks until there is a writer.


def replace_by_link(path: Path) -> None:
    aside = path.rename(path.with_suffix(".aside"))
    path.symlink_to(aside)


@pytest.mark.parametrize(
    "damage",
    [corrupt, truncate, replace_by_fifo, replace_by_link],
    ids=["corrupted", "half-written", "fifo", "symbolic-link"],
)
def test_a_bad_file_is_computed_removed_and_stored_again(
    start: Start, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    a, b, alone = start(storage(tmp_path)), start(storage(tmp_path)), start()
    prompt = prompt_of(43)
    fill(a, tmp_path, prompt, num_files=6)
    bad = by_position(tmp_path, prompt)[2]
    whole = bad.read_bytes()
    damage(bad)
    (by_b,) = b.generate([prompt], GREEDY)
    (expected,) = alone.generate([prompt], GREEDY)
    assert by_b.token_ids == expected.token_ids
    assert by_b.num_transferred_tokens == 2 * CHUNK, "chunks before it must be used"
    b.settle(WAIT_S)
    b.close()  # Closing waits for the writer.
    assert bad.stat().st_size == len(whole)
    (again,) = start(storage(tmp_path)).generate([prompt], GREEDY)
    assert again.token_ids == expected.token_ids
    assert again.num_transferred_tokens == 40


def test_during_a_rotation_files_of_the_old_secret_are_read(start: Start, tmp_path: Path) -> None:
    old, new = b"the old secret of the cluster", b"the new secret of the cluster"
    prompt = prompt_of(43)
    answer_of_a = fill(start(storage(tmp_path), secret=ClusterSecret(old)), tmp_path, prompt, num_files=6)
    (by_both,) = start(storage(tmp_path), secret=ClusterSecret(new, old)).generate([prompt], GREEDY)
    assert by_both.token_ids == answer_of_a
    assert by_both.num_transferred_tokens == 40
    (by_new,) = start(storage(tmp_path), secret=ClusterSecret(new)).generate([prompt], GREEDY)
    assert by_new.token_ids == answer_of_a
    assert by_new.num_transferred_tokens == 0


def test_another_model_secret_or_chunk_size_finds_nothing(
    start: Start, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prompt = prompt_of(43)
    fill(start(storage(tmp_path)), tmp_path, prompt, num_files=6)
    kept = {path: path.read_bytes() for path in files_in(tmp_path)}
    folder = tmp_path_factory.mktemp("other")
    write_checkpoint(folder, hidden=64, layers=2, heads=4, kv_heads=2, vocab=512, seed=1)
    strangers = [
        start(storage(tmp_path), secret=ClusterSecret(b"another one of 16 bytes")),
        start(storage(tmp_path), secret=None),
        start(storage(tmp_path, chunk_tokens=4)),
    ]
    with starting(load_model_config(folder, max_model_len=256)) as start_other:
        for stranger in (*strangers, start_other(storage(tmp_path))):
            (completion,) = stranger.generate([prompt], GREEDY)
            assert completion.num_transferred_tokens == 0
    assert all(path.read_bytes() == content for path, content in kept.items())


def test_under_policy_fail_only_that_request_fails(start: Start, tmp_path: Path) -> None:
    a, b = start(storage(tmp_path)), start(storage(tmp_path, policy="fail"))
    prompt = prompt_of(20)
    fill(a, tmp_path, prompt, num_files=3)
    corrupt(by_position(tmp_path, prompt)[0])
    wrong, right = b.generate([prompt, prompt_of(7, step=3)], GREEDY)
    assert wrong.finish_reason == "error"
    assert right.finish_reason == "length"
    (again,) = b.generate([prompt], GREEDY)
    assert again.finish_reason == "length"


def test_roles_decide_which_engine_writes_and_reads(start: Start, tmp_path: Path) -> None:
    prompt = prompt_of(20)
    consumer = start(storage(tmp_path, "kv_consumer"))
    consumer.generate([prompt], GREEDY)
    consumer.settle(WAIT_S)
    consumer.close()
    assert files_in(tmp_path) == []
    producer = start(storage(tmp_path, "kv_producer"))
    fill(producer, tmp_path, prompt, num_files=3)
    other = start(storage(tmp_path, "kv_producer"))
    assert other.generate([prompt], GREEDY)[0].num_transferred_tokens == 0
    (read,) = start(storage(tmp_path, "kv_consumer")).generate([prompt], GREEDY)
    assert read.num_transferred_tokens == 19, "all but the last token, which is computed again"


def test_loaded_chunks_stay_longest_and_their_beginning_longest(start: Start, tmp_path: Path) -> None:
    a, b = start(storage(tmp_path)), start(storage(tmp_path))
    prompt = prompt_of(43)
    fill(a, tmp_path, prompt, num_files=6)
    paths = by_position(tmp_path, prompt)
    other = prompt_of(43, step=3)
    fill(a, tmp_path, other, num_files=12)
    for path in files_in(tmp_path):
        os.utime(path, (1000.0, 1000.0))
    (by_b,) = b.generate([prompt], GREEDY)
    assert by_b.num_transferred_tokens == 5 * CHUNK
    b.close()  # The engine's threads have ended.
    used = [path.stat().st_mtime for path in paths]
    assert len(used) == 5
    assert all(earlier > later > 1000.0 for earlier, later in pairwise(used))
    assert all(path.stat().st_mtime == 1000.0 for path in by_position(tmp_path, other))


def test_one_engine_evicts_while_the_other_loads(start: Start, tmp_path: Path) -> None:
    alone = start()
    sweeping = storage(tmp_path, max_gib=100_000 / (1 << 30), sweep_every_s=0.001)
    a, b = start(sweeping), start(sweeping)
    prompts = [prompt_of(43, step=step) for step in (3, 7, 11)]
    expected = [completion.token_ids for completion in alone.generate(prompts, GREEDY)]
    num_transferred = 0
    for _ in range(6):
        for engine in (a, b):
            engine.core.scheduler.reset_prefix_cache()
            completions = engine.generate(prompts, GREEDY)
            engine.settle(WAIT_S)
            assert [completion.token_ids for completion in completions] == expected
            num_transferred += sum(completion.num_transferred_tokens for completion in completions)
    assert num_transferred > 0


@pytest.mark.processes
@pytest.mark.usefixtures("forked_programs")
def test_two_ranks_share_files_with_two_ranks_only(start: Start, tmp_path: Path) -> None:
    a, alone = start(storage(tmp_path), tp_size=2), start()
    prompt = prompt_of(43)
    fill(a, tmp_path, prompt, num_files=12)
    (expected,) = alone.generate([prompt], GREEDY)
    (by_one,) = start(storage(tmp_path)).generate([prompt], GREEDY)
    assert by_one.num_transferred_tokens == 0
    (of_one_rank,) = {path for path in files_in(tmp_path) if path.stem == f"{keys_of(prompt)[0]}.1"}
    of_one_rank.unlink()
    for num_loaded in (0, 40):  # A chunk needs the files of all ranks, and is stored again.
        forget(a)
        (again,) = a.generate([prompt], GREEDY)
        assert again.token_ids == expected.token_ids
        assert again.num_transferred_tokens == num_loaded
        fill(a, tmp_path, prompt, num_files=12)
