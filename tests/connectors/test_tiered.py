"""The tiered connector: its children, the stores as one, and engines that keep their KV through a restart."""

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.connectors.registry import connector_class
from baton.connectors.storage.connectors import BatonTieredConnector
from baton.core.config import KVRole, KVTransferConfig, ModelConfig
from baton.core.errors import ConfigError
from baton.stores.backends.objects import ObjectStore
from tests.connectors.storage_world import (
    CHUNK,
    FOR_BUSY_MACHINES,
    GREEDY,
    WAIT_S,
    Start,
    by_position,
    files_in,
    fill,
    prompt_of,
    starting,
    wait_for,
)
from tests.stores.servers import S3_OPTIONS, rclone_server, redis_server

HOST: dict[str, Any] = {"type": "host", "cpu_gib": 1e-3}
PROMPT = prompt_of(43)
NUM_CHUNKS = len(PROMPT) // CHUNK


def tiered(*tiers: dict[str, Any], role: KVRole = "kv_both", **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="BatonTieredConnector",
        kv_role=role,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"tiers": list(tiers), **extra},
    )


def stored(*tiers: dict[str, Any], **extra: Any) -> KVTransferConfig:
    """`extra`: may have the `role`."""
    return tiered(*tiers, chunk_tokens=CHUNK, **FOR_BUSY_MACHINES, **extra)


def files(folder: Path) -> dict[str, Any]:
    return {"type": "files", "path": str(folder), "fsync": False}


@pytest.mark.parametrize(
    ("tiers", "extra", "problem"),
    [
        ([], {}, "tiers: must list at least one tier"),
        ([{"type": "tape"}], {}, r"connectors\[0\]|tiers"),
        ([files(Path("relative"))], {}, "must be an absolute path"),
        ([files(Path("/kv")), HOST], {}, "may have one tier of type 'host', the first"),
        ([HOST, HOST], {}, "may have one tier of type 'host', the first"),
        ([HOST], {"chunk_tokens": 8}, "chunk_tokens: is for tiers of other types than 'host'"),
        ([{"type": "host"}], {}, "cpu_gib: is required"),
        ([files(Path("/kv"))], {"path": "/kv"}, "path: is required, or tiers instead of it"),
        ([{**files(Path("/kv")), "tenant_max_share": 0.5}], {}, "tenant_max_share: is a share of max_gib"),
        ([{**HOST, "tenant_max_share": 1.5}], {}, "tenant_max_share: must be above 0 and at most 1"),
        ([{**files(Path("/kv")), "write_max_mib_s": 0}], {}, "write_max_mib_s: must be positive"),
        ([{"type": "redis", "url": "http://x"}], {}, "is not the URL of a Redis server"),
    ],
)
def test_wrong_tiers_are_named(
    tiers: list[dict[str, Any]], extra: dict[str, Any], problem: str, start: Start
) -> None:
    with pytest.raises(ConfigError, match=problem):
        start(tiered(*tiers, **extra))


def test_the_name_is_known() -> None:
    assert connector_class(tiered(HOST)) is BatonTieredConnector


@pytest.fixture
def start(model: ModelConfig) -> Any:
    with starting(model) as start:
        yield start


def answers(start: Start) -> list[int]:
    (expected,) = start().generate([PROMPT], GREEDY)
    return expected.token_ids


def test_a_restarted_engine_loads_what_is_stored(start: Start, tmp_path: Path) -> None:
    expected = answers(start)
    transfer = stored(HOST, files(tmp_path))
    assert fill(start(transfer), tmp_path, PROMPT, NUM_CHUNKS) == expected
    again = start(transfer)  # Nothing is in its host memory.
    (loaded,) = again.generate([PROMPT], GREEDY)
    assert loaded.token_ids == expected
    assert loaded.num_transferred_tokens == NUM_CHUNKS * CHUNK
    again.settle(WAIT_S)
    again.core.scheduler.reset_prefix_cache()
    for path in files_in(tmp_path):
        path.unlink()
    (from_memory,) = again.generate([PROMPT], GREEDY)
    assert from_memory.token_ids == expected
    assert from_memory.num_transferred_tokens >= NUM_CHUNKS * CHUNK, "the load has put it into host memory"


@pytest.mark.parametrize("encrypt", [False, True])
def test_what_a_slower_store_had_is_then_in_the_faster_one(
    start: Start, tmp_path: Path, encrypt: bool
) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    expected = fill(start(stored(files(slow), encrypt=encrypt)), slow, PROMPT, NUM_CHUNKS)
    both = start(stored(files(fast), files(slow), encrypt=encrypt))
    assert fill(both, fast, PROMPT, NUM_CHUNKS) == expected == answers(start)
    both.settle(WAIT_S)
    of_fast = start(stored(files(fast), encrypt=encrypt))
    (loaded,) = of_fast.generate([PROMPT], GREEDY)
    assert loaded.token_ids == expected
    assert loaded.num_transferred_tokens == NUM_CHUNKS * CHUNK


def test_a_damaged_copy_is_replaced_by_the_slower_stores(start: Start, tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    transfer = stored(files(fast), files(slow))
    expected = fill(start(transfer), slow, PROMPT, NUM_CHUNKS)
    damage(files_in(fast), lambda content: content[:-1] + bytes([content[-1] ^ 1]))
    again = start(transfer)
    (loaded,) = again.generate([PROMPT], GREEDY)
    assert loaded.token_ids == expected
    assert loaded.num_transferred_tokens == NUM_CHUNKS * CHUNK, "the slow store has good copies"


def damage(paths: list[Path], change: Callable[[bytes], bytes]) -> None:
    assert paths
    for path in paths:
        path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(("num_tokens", "num_loaded"), [(47, 44), (46, 44), (60, 44), (43, 40), (44, 43)])
def test_the_blocks_after_the_last_chunk_are_stored_too(
    start: Start, tmp_path: Path, num_tokens: int, num_loaded: int
) -> None:
    """47 tokens are five chunks of 8, a tail of one block of 4, and 3 tokens."""
    transfer = stored(files(tmp_path))
    fill(start(transfer), tmp_path, prompt_of(47), 6)
    prompt = prompt_of(num_tokens)
    (expected,) = start().generate([prompt], GREEDY)
    (loaded,) = start(transfer).generate([prompt], GREEDY)
    assert loaded.token_ids == expected.token_ids
    assert loaded.num_transferred_tokens == num_loaded


def test_a_prompt_of_less_than_a_chunk_is_stored(start: Start, tmp_path: Path) -> None:
    transfer = stored(files(tmp_path))
    expected = fill(start(transfer), tmp_path, prompt_of(6), 1)
    (loaded,) = start(transfer).generate([prompt_of(6)], GREEDY)
    assert (loaded.token_ids, loaded.num_transferred_tokens) == (expected, 4)


def test_a_damaged_tail_costs_only_itself(start: Start, tmp_path: Path) -> None:
    transfer = stored(files(tmp_path))
    prompt = prompt_of(47)
    expected = fill(start(transfer), tmp_path, prompt, 6)
    chunks = by_position(tmp_path, prompt)
    damage([path for path in files_in(tmp_path) if path not in chunks], lambda content: content[:-1] + b"!")
    (loaded,) = start(transfer).generate([prompt], GREEDY)
    assert loaded.token_ids == expected


def test_a_restarted_engine_loads_from_a_bucket_that_it_may_only_read(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket's server is then stopped: in the middle of a load, and before a lookup. No token differs."""

    def bucket(port: int, timeout_s: float) -> dict[str, Any]:
        options = {**S3_OPTIONS, "endpoint": f"http://127.0.0.1:{port}"}
        return {"type": "objects", "url": "s3://bucket/kv", "options": options, "timeout_s": timeout_s}

    (tmp_path / "bucket").mkdir()
    with rclone_server(tmp_path) as (port, _):
        expected = fill(start(stored(bucket(port, WAIT_S))), tmp_path / "bucket" / "kv", PROMPT, NUM_CHUNKS)
    with rclone_server(tmp_path, "--read-only") as (port, process):
        with pytest.raises(ConfigError, match="cannot be used"):
            start(stored(bucket(port, WAIT_S)))
        consumer = start(stored(bucket(port, 1.0), role="kv_consumer"))
        (loaded,) = consumer.generate([PROMPT], GREEDY)
        assert (loaded.token_ids, loaded.num_transferred_tokens) == (expected, NUM_CHUNKS * CHUNK)

        read, num_reads = ObjectStore.read, itertools.count(1)

        def stop_at_third(store: ObjectStore, name: str, into: memoryview) -> int:
            if next(num_reads) == 3:
                process.send_signal(signal.SIGSTOP)
                os.waitpid(process.pid, os.WUNTRACED)
            return read(store, name, into)

        monkeypatch.setattr(ObjectStore, "read", stop_at_third)
        for _ in range(2):
            consumer.core.scheduler.reset_prefix_cache()
            (computed,) = consumer.generate([PROMPT], GREEDY)
            assert computed.token_ids == expected
            assert computed.num_transferred_tokens < NUM_CHUNKS * CHUNK
        assert next(num_reads) > 3


def test_a_restarted_engine_loads_from_a_server_and_computes_without_it(start: Start) -> None:
    with redis_server("valkey") as (port, _):
        url = f"redis://127.0.0.1:{port}/0"
        transfer = stored({"type": "redis", "url": url})
        first = start(transfer)
        (computed,) = first.generate([PROMPT], GREEDY)
        first.settle(WAIT_S)
        first.close()  # The engine's writer has ended.
        again = start(transfer)
        (loaded,) = again.generate([PROMPT], GREEDY)
        assert (loaded.token_ids, loaded.num_transferred_tokens) == (computed.token_ids, NUM_CHUNKS * CHUNK)
    again.core.scheduler.reset_prefix_cache()
    (alone,) = again.generate([PROMPT], GREEDY)
    assert (alone.token_ids, alone.num_transferred_tokens) == (computed.token_ids, 0)


def test_retention_of_a_request_reaches_the_stores(start: Start, tmp_path: Path) -> None:
    engine = start(stored({**HOST, "tenant_max_share": 0.5}, {**files(tmp_path), "max_gib": 1}))
    params = {"baton_retention": {"priority": 3, "ttl_s": 60}, "baton_tenant": "search"}
    engine.generate([PROMPT], GREEDY, kv_transfer_params=[params])
    engine.settle(WAIT_S)
    wait_for(lambda: len(list(tmp_path.glob("*/*/*.3.60..keep"))) >= NUM_CHUNKS)
