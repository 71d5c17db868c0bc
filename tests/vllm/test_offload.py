"""Offload inside a real vLLM of two ranks, whose pool is too small for what it is asked."""

import pytest

from tests.vllm.engines import Server, Site, VllmPlan, transfer
from tests.vllm.prompts import Single, prompts

ASKED = [prompt for prompt in prompts() if 1500 <= len(prompt) <= 3900]


@pytest.fixture(scope="module")
def engine(site: Site, single: Single) -> Server:
    config = transfer("BatonOffloadConnector", "kv_both", "o")
    config["kv_connector_extra_config"] = {"cpu_gib": 0.25, "eviction": "arc"}
    # 40 blocks of 128 tokens: one of these prompts drives out the others.
    plan = VllmPlan("o", config, cores="0|1", extra=("--num-gpu-blocks-override", "40"))
    return site.cast("offload", plan)["o"]


def test_a_prompt_that_returns_is_loaded_from_host_memory_with_equal_tokens(
    engine: Server, single: Single
) -> None:
    for _ in range(2):
        for prompt in ASKED:
            assert engine.tokens(prompt) == single.tokens(prompt), len(prompt)
    hits = engine.wait_metric("baton:kv_offload_hit_tokens_total", lambda count: count > 0)
    # All that the second round had to ask for, but what the pool still had, and the last block of each.
    assert hits > sum(len(prompt) for prompt in ASKED) / 2
    assert engine.metric("vllm:external_prefix_cache_hits_total") == hits
    assert engine.metric("baton:kv_offload_bytes_total", direction="load") > 0
    assert engine.metric("baton:kv_offload_failures_total") == 0


def test_a_request_can_opt_out_and_a_wrong_word_harms_nobody(engine: Server, single: Single) -> None:
    for choice in ("off", "sometimes"):
        before = engine.metric("baton:kv_offload_hit_tokens_total")
        assert engine.tokens(ASKED[0], {"baton_offload": choice}) == single.tokens(ASKED[0])
        assert engine.metric("baton:kv_offload_hit_tokens_total") == before
    assert engine.is_healthy()
