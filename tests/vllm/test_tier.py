"""`BatonTier` under vLLM's OffloadingConnector, with two ranks: what a killed engine has stored is loaded."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockStored

from baton.cli.processes import free_ports
from tests.vllm.engines import Server, Site, VllmPlan, transfer
from tests.vllm.prompts import Single, prompts
from tests.vllm.test_kv_events import replayed
from tests.vllm.test_shared_storage import files_in, wait_files

ASKED = [prompt for prompt in prompts() if len(prompt) in (300, 777, 1500)]
BLOCK = 128
NUM_CHUNKS = len({tuple(p[: end * BLOCK]) for p in ASKED for end in range(1, len(p) // BLOCK + 1)})
SHARED_MEMORY = Path("/dev/shm")


def plan(name: str, folder: Path, endpoints: tuple[str, str]) -> VllmPlan:
    tier = {
        "type": "BatonTier",
        "module_path": "baton.hosts.vllm.tier",
        "enable_kv_events": True,
        "tiers": [{"type": "files", "path": str(folder), "max_gib": 1}],
        "backpressure": {
            "backpressure_cls": "vllm.v1.kv_offload.tiering.backpressure.EMABackpressureDetector"
        },
    }
    extra: dict[str, Any] = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "baton.hosts.vllm.tier",
        "cpu_bytes_to_use": 1 << 26,
        "secondary_tiers": [tier],
    }
    endpoint, replay_endpoint = endpoints
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint,
        "replay_endpoint": replay_endpoint,
    }
    options = ("--kv-events-config", json.dumps(events))
    config = transfer("OffloadingConnector", "kv_both", name, extra=extra)
    return VllmPlan(name, config, extra=options, num_ranks=2)


@pytest.fixture
def endpoints() -> tuple[str, str]:
    first, second = free_ports(2)
    return f"tcp://127.0.0.1:{first}", f"tcp://127.0.0.1:{second}"


def regions() -> list[Path]:
    """vLLM's host memory for offloading."""
    return list(SHARED_MEMORY.glob("vllm_offload_*"))


def answer_all(engine: Server, single: Single) -> None:
    for prompt in ASKED:
        assert engine.tokens(prompt) == single.tokens(prompt), len(prompt)


def test_a_prompt_is_loaded_from_files_after_the_engine_was_killed(
    site: Site, single: Single, tmp_path: Path, endpoints: tuple[str, str]
) -> None:
    folder = tmp_path / "kv"
    first = site.cast("tier", plan("t1", folder, endpoints))["t1"]
    answer_all(first, single)
    wait_files(first, folder, NUM_CHUNKS)
    assert len(files_in(folder)) == NUM_CHUNKS
    first.tokens(ASKED[0][:BLOCK])  # Events leave with a step.
    events = [event for batch in replayed(endpoints[1]) for event in batch.events]
    stored = [e for e in events if isinstance(e, BlockStored) and e.medium == "STORAGE"]
    assert sum(len(event.block_hashes) for event in stored) == NUM_CHUNKS
    assert not regions()
    os.killpg(first.child.pid, signal.SIGKILL)
    site.dismiss()

    second = site.cast("tier again", plan("t2", folder, endpoints))["t2"]
    (damaged,) = (path for path in sorted(files_in(folder))[:1])
    content = bytearray(damaged.read_bytes())
    content[-9] ^= 1
    damaged.write_bytes(content)
    answer_all(second, single)
    hits = second.wait_metric("vllm:external_prefix_cache_hits_total", lambda count: count > 0)
    assert hits >= BLOCK * (NUM_CHUNKS - max(len(prompt) for prompt in ASKED) // BLOCK)
    assert second.metric("vllm:kv_offload_baton_failed_loads_total", reason="corrupt") == 1
    assert second.metric("vllm:kv_offload_tiering_read_bytes_total") > 0
    site.dismiss()
    assert not regions()
