"""Offload in a real vLLM of two ranks, whose pool is too small for the test's prompts."""

import json

import pytest
from vllm.distributed.kv_events import BlockStored

from baton.cli.processes import free_ports
from tests.vllm.engines import Server, Site, VllmPlan, transfer
from tests.vllm.prompts import Single, prompts
from tests.vllm.test_kv_events import replayed

ASKED = [prompt for prompt in prompts() if 1500 <= len(prompt) <= 3900]


@pytest.fixture(scope="module")
def replay_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_ports(1)[0]}"


@pytest.fixture(scope="module")
def engine(site: Site, single: Single, replay_endpoint: str) -> Server:
    settings = {"cpu_gib": 0.25, "eviction": "arc"}
    config = transfer("BatonOffloadConnector", "kv_both", "o", extra=settings)
    # 40 blocks of 128 tokens: one of these prompts evicts the others.
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://127.0.0.1:{free_ports(1)[0]}",
        "replay_endpoint": replay_endpoint,
    }
    extra = ("--num-gpu-blocks-override", "40", "--kv-events-config", json.dumps(events))
    plan = VllmPlan("o", config, num_ranks=2, extra=extra)
    return site.cast("offload", plan)["o"]


def test_a_prompt_that_returns_is_loaded_from_host_memory_with_equal_tokens(
    engine: Server, single: Single
) -> None:
    for _ in range(2):
        for prompt in ASKED:
            assert engine.tokens(prompt) == single.tokens(prompt), len(prompt)
    hits = engine.wait_metric("baton:kv_offload_hit_tokens_total", lambda count: count > 0)
    # All tokens of the second round except those still in the pool and each prompt's last block.
    assert hits > sum(len(prompt) for prompt in ASKED) / 2
    assert engine.metric("vllm:external_prefix_cache_hits_total") == hits
    assert engine.metric("baton:kv_offload_bytes_total", direction="load") > 0
    assert engine.metric("baton:kv_offload_failures_total") == 0


def test_a_consumer_can_join_events_of_host_memory_and_of_the_cache(
    engine: Server, single: Single, replay_endpoint: str
) -> None:
    for prompt in ASKED:
        assert engine.tokens(prompt) == single.tokens(prompt), len(prompt)
    events = [event for batch in replayed(replay_endpoint) for event in batch.events]
    stored = [event for event in events if isinstance(event, BlockStored)]
    by_medium = {
        medium: {
            (block, *event.token_ids[place * event.block_size : (place + 1) * event.block_size])
            for event in stored
            if event.medium == medium
            for place, block in enumerate(event.block_hashes)
        }
        for medium in ("CPU", "GPU")
    }
    assert by_medium["CPU"]
    assert by_medium["CPU"] <= by_medium["GPU"], "the same hashes, of the same tokens"


def test_a_request_can_opt_out_and_bad_params_do_no_harm(engine: Server, single: Single) -> None:
    for choice in ("off", "sometimes"):
        before = engine.metric("baton:kv_offload_hit_tokens_total")
        assert engine.tokens(ASKED[0], {"baton_offload": choice}) == single.tokens(ASKED[0])
        assert engine.metric("baton:kv_offload_hit_tokens_total") == before
    assert engine.is_healthy()
