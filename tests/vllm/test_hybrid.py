"""A model with sliding windows in a real vLLM: a block table for each group of layers (hybrid KV cache).

A small Gemma 3 of six layers: vLLM groups them as 0 3 | 1 4 | 2 5, Baton's engine as 2 5 | 0 1 | 3 4.
"""

import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from tests.vllm.engines import (
    ANSWER_S,
    TRANSFERS,
    BatonPlan,
    Server,
    Site,
    VllmPlan,
    check_handoffs,
    in_company,
    transfer,
)
from tests.vllm.prompts import Prompt, prompts

BLOCK, WINDOW = 32, 100
GROUPS = "hybrid"
SIZES = ("--block-size", str(BLOCK))
SINGLE = VllmPlan("single", None, extra=SIZES)
# Longer prompts take several steps, so that a push announces progress between them.
IN_STEPS = (*SIZES, "--max-num-batched-tokens", "256")
P = VllmPlan("p", transfer("BatonPushConnector", "kv_producer", "p"), extra=IN_STEPS)
D = VllmPlan("d", transfer("BatonPushConnector", "kv_consumer", "d"), extra=SIZES)
BATON_P = BatonPlan("baton-p", transfer("BatonPushConnector", "kv_producer", "baton-p"), IN_STEPS)
BATON_D = BatonPlan("baton-d", transfer("BatonPushConnector", "kv_consumer", "baton-d"), SIZES)
ONE_TABLE = BatonPlan(
    "one-table",
    transfer("BatonPushConnector", "kv_producer", "one-table"),
    (*SIZES, "--hybrid-kv-cache", "off"),
)
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
PAIRS = [("p", "d"), ("p", "baton-d"), ("baton-p", "d")]

_LONG = next(prompt for prompt in prompts() if len(prompt) == 1500)
# Prompts of 131 and 1,027 tokens: the window of the last token begins with a block's last token. An engine
# that keeps only the next token's window has freed that block.
ASKED = [_LONG[:length] for length in (8, 32, 100, 131, 132, 300, 513, 1027, 1500)]
_LONGEST = next(prompt for prompt in prompts() if len(prompt) == 3900)  # Sixteen steps of P.


@pytest.fixture(scope="module")
def windows(site_of: Callable[..., Site]) -> Site:
    return site_of("--family", "gemma3", "--layers", "6", "--sliding-window", str(WINDOW))


@pytest.fixture(scope="module")
def expected(windows: Site) -> dict[Prompt, list[int]]:
    """The answers of a single vLLM, which keeps only what its groups need."""
    engine = windows.cast("single", SINGLE)["single"]
    answers = {prompt: engine.tokens(prompt) for prompt in (*ASKED, _LONGEST)}
    windows.dismiss()
    return answers


@pytest.fixture(scope="module")
def engines(windows: Site, expected: dict[Prompt, list[int]]) -> dict[str, Server]:
    return windows.cast(GROUPS, P, D, BATON_P, BATON_D)


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("names", PAIRS, ids=" to ".join)
def test_tokens_equal_a_single_vllms(
    windows: Site,
    engines: dict[str, Server],
    expected: dict[Prompt, list[int]],
    names: tuple[str, str],
    mode: str,
) -> None:
    """Each prompt extends the one before it, so D has its beginning, and never all of it."""
    p, d = (engines[name] for name in names)
    with windows.router(p, d, mode) as router:
        check_handoffs(router, d, ASKED, expected.__getitem__)


@pytest.mark.parametrize("names", PAIRS, ids=" to ".join)
def test_a_push_is_read_while_its_prompt_is_computed(
    windows: Site, engines: dict[str, Server], expected: dict[Prompt, list[int]], names: tuple[str, str]
) -> None:
    """Reads begin before there is a ticket. On a busy machine D may be too late for some prompts, not for
    all.
    """
    p, d = (engines[name] for name in names)
    before = d.metric("baton:kv_early_tokens_total")
    deadline_s = time.monotonic() + ANSWER_S
    with windows.router(p, d, "push") as router:
        while d.metric("baton:kv_early_tokens_total") == before:
            assert time.monotonic() < deadline_s, "D has read nothing before P's answer"
            salt = f"{router.name} {time.monotonic()}"
            assert router.tokens(_LONGEST, cache_salt=salt) == expected[_LONGEST]
        assert router.metric("baton:router_prefills_total", where="local") == 0


def test_only_the_blocks_in_windows_are_transferred(
    engines: dict[str, Server], expected: dict[Prompt, list[int]]
) -> None:
    p, d = engines["p"], engines["d"]
    before = d.metric("baton:kv_transfer_bytes_total")
    params = p.prefill(_LONG, cache_salt="bytes")
    num_blocks = -(-len(_LONG) // BLOCK)
    num_seen = num_blocks - (len(_LONG) - WINDOW) // BLOCK
    assert sorted(map(len, params["remote_block_ids"])) == [num_seen, num_seen, num_blocks]
    assert not any(0 in table for table in params["remote_block_ids"]), "the null block must not be lent"
    assert d.tokens(_LONG, params, cache_salt="bytes") == expected[_LONG]
    bytes_of_block = BLOCK * 4 * 2 * 32 * 4  # Per layer: tokens, heads, K and V, elements, float32.
    moved = d.wait_metric("baton:kv_transfer_bytes_total", lambda count: count > before) - before
    assert moved == (2 * num_blocks + 4 * num_seen) * bytes_of_block


def test_a_producer_that_keeps_everything_serves_one_that_does_not(
    windows: Site, engines: dict[str, Server], expected: dict[Prompt, list[int]]
) -> None:
    d = engines["d"]
    p = windows.cast(GROUPS, P, D, BATON_P, BATON_D, ONE_TABLE)["one-table"]
    before = d.metric(TRANSFERS)
    for prompt in ASKED:
        params = p.prefill(prompt, cache_salt="one table")
        assert d.tokens(prompt, params, cache_salt="one table") == expected[prompt], len(prompt)
    d.wait_metric(TRANSFERS, lambda num: num >= before + len(ASKED))
    windows.dismiss("one-table")


def test_a_failed_load_is_computed_and_the_engine_continues(
    windows: Site, engines: dict[str, Server], expected: dict[Prompt, list[int]]
) -> None:
    """vLLM does not accept bad blocks of several groups; the request is reported instead."""
    d, p = engines["d"], engines["baton-p"]
    params = p.prefill(_LONG, cache_salt="gone")
    processes = psutil.Process(p.child.pid).children(recursive=True)
    os.killpg(p.child.pid, signal.SIGKILL)
    # The core leads a group of its own and dies after its parent. Until then D can still read from it.
    _, alive = psutil.wait_procs(processes, timeout=ANSWER_S)
    assert not alive
    assert d.tokens(_LONG, params, cache_salt="gone") == expected[_LONG]
    d.wait_metric("baton:kv_transfer_failures_total", lambda count: count >= 1)
    assert d.tokens(ASKED[3], cache_salt="after") == expected[ASKED[3]]
    assert d.is_healthy()
    windows.dismiss("baton-p")


@pytest.fixture(scope="module")
def company(
    windows: Site, expected: dict[Prompt, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Server, Server]:
    """A producer of two ranks that keeps KV in memory, a consumer of one that keeps it in files.

    They have no prefix cache, so that every repeated prompt is loaded from its first token.
    """
    offload = {"kv_connector": "BatonOffloadConnector", "kv_connector_extra_config": {"cpu_gib": 0.25}}
    files = {
        "kv_connector": "BatonSharedStorageConnector",
        "kv_connector_extra_config": {"path": str(tmp_path_factory.mktemp("kv"))},
    }
    no_cache = "--no-enable-prefix-caching"
    of_p = in_company(transfer("BatonPushConnector", "kv_producer", "p-two"), offload)
    of_d = in_company(transfer("BatonPushConnector", "kv_consumer", "d-files"), files)
    p = VllmPlan("p-two", of_p, num_ranks=2, extra=(*IN_STEPS, no_cache))
    d = VllmPlan("d-files", of_d, extra=(*SIZES, no_cache))
    servers = windows.cast("company", p, d)
    return servers[p.name], servers[d.name]


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_two_ranks_hand_over_to_one_beside_stores(
    windows: Site, company: tuple[Server, Server], expected: dict[Prompt, list[int]], mode: str
) -> None:
    p, d = company
    with windows.router(p, d, mode) as router:
        check_handoffs(router, d, ASKED, expected.__getitem__)
    assert p.prefill(_LONG, cache_salt=f"{mode} ticket")["tp_size"] == 2


@pytest.mark.parametrize(
    ("index", "failures"), [(0, "baton:kv_offload_failures_total"), (1, "baton:storage_unusable_files_total")]
)
def test_stored_blocks_are_loaded_by_groups(
    company: tuple[Server, Server], expected: dict[Prompt, list[int]], index: int, failures: str
) -> None:
    engine = company[index]
    before = engine.metric(EXTERNAL_HITS)
    for _ in range(2):
        for prompt in ASKED:
            assert engine.tokens(prompt) == expected[prompt], len(prompt)
    engine.wait_metric(EXTERNAL_HITS, lambda count: count > before + sum(map(len, ASKED)) / 2)
    assert engine.metric(failures) == 0
