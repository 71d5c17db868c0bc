"""Recurrent states with vLLM's prefix caching (its mode "align"): tables of positions, and states that stay.

No step is longer than a block of states: otherwise vLLM's CPU build ends
(`docs/upstream/vllm-cpu-mamba2-prefix-caching.md`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import (
    TRANSFERS,
    BatonPlan,
    Server,
    Site,
    VllmPlan,
    check_at_once,
    check_handoffs,
    check_last_token,
    in_company,
    transfer,
)
from tests.vllm.prompts import Prompt, prompts
from tests.vllm.test_shared_storage import files_in, wait_files

BLOCK = 128  # vLLM's choice for this model: a page of 128 tokens of a layer can hold a state.
ALIGNED = ("--enable-prefix-caching", "--max-num-batched-tokens", str(BLOCK))
UNCACHED = ("--no-enable-prefix-caching",)
SINGLE = VllmPlan("single", None, extra=UNCACHED)
P = VllmPlan("p", transfer("BatonPushConnector", "kv_producer", "p"), extra=ALIGNED)
D = VllmPlan("d", transfer("BatonPushConnector", "kv_consumer", "d"), extra=ALIGNED)
P_TWO = VllmPlan("p-two", transfer("BatonPushConnector", "kv_producer", "p-two"), num_ranks=2, extra=ALIGNED)
BATON_P = BatonPlan("baton-p", transfer("BatonPushConnector", "kv_producer", "baton-p"))
BATON_D = BatonPlan("baton-d", transfer("BatonPushConnector", "kv_consumer", "baton-d"))
PAIRS = [("p", "d"), ("p-two", "d"), ("p", "baton-d"), ("baton-p", "d")]
SMALL_POOL = (*ALIGNED, "--max-model-len", "1536", "--num-gpu-blocks-override", "24")
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
MOVED = "baton:kv_transfer_bytes_total"
NUM_STATE_LAYERS = 3
STATE_BYTES = 4 * (
    3 * (16 * 32 + 2 * 32) + 16 * 32 * 32
)  # float32: inputs of the convolution, then the heads.
BLOCK_BYTES = BLOCK * 4 * 2 * 32 * 4  # A layer's block: tokens, heads, K and V, elements, float32.
ZEROING = """
from baton.connectors.pull.reads.cache_layout import is_of_states
from baton.hosts.vllm.connector import {connector}
from baton.hosts.vllm.states import with_states_as_bytes


class Zeroing({connector}):
    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        as_bytes = with_states_as_bytes(kv_caches, self._kv_cache_config)
        self.states = [cache for cache in as_bytes.values() if is_of_states(cache)]

    def wait_for_save(self):
        kept = [states.clone() for states in self.states]
        for states in self.states:
            states.zero_()
        super().wait_for_save()
        for states, as_before in zip(self.states, kept):
            states.copy_(as_before)
"""

_LONG = next(prompt for prompt in prompts() if len(prompt) == 1500)
# 129, 257 and 385: the state before the last token is that at the end of a block.
LENGTHS = (2, 7, 127, 128, 129, 130, 255, 256, 257, 300, 385, 600)
STORED_LENGTHS = (129, 300, 385, 600)
FILLER = (3, *_LONG[: 11 * BLOCK])
ASKED = [(7 + length, *_LONG[:length]) for length in (length - 1 for length in LENGTHS)]
STORED = [prompt for prompt in ASKED if len(prompt) in STORED_LENGTHS]


@pytest.fixture(scope="module")
def granite(site_of: Callable[..., Site]) -> Site:
    return site_of("--family", "granite_hybrid", "--layers", "4")


@pytest.fixture(scope="module")
def expected(granite: Site) -> dict[Prompt, list[int]]:
    """The answers of a single vLLM without prefix caching; `test_states` compares it with transformers."""
    engine = granite.cast("single", SINGLE)["single"]
    answers = {prompt: engine.tokens(prompt) for prompt in ASKED}
    granite.dismiss()
    return answers


@pytest.fixture(scope="module")
def engines(granite: Site, expected: dict[Prompt, list[int]]) -> dict[str, Server]:
    return granite.cast("aligned", P, D, P_TWO, BATON_P, BATON_D)


@pytest.fixture(scope="module")
def pair(engines: dict[str, Server]) -> tuple[Server, Server]:
    return engines["p"], engines["d"]


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("names", PAIRS, ids=" to ".join)
def test_tokens_equal_a_single_vllms(
    granite: Site,
    engines: dict[str, Server],
    expected: dict[Prompt, list[int]],
    names: tuple[str, str],
    mode: str,
) -> None:
    p, d = (engines[name] for name in names)
    with granite.router(p, d, mode) as router:
        check_handoffs(router, d, ASKED, expected.__getitem__)
        check_at_once(router, ASKED, expected.__getitem__)


def test_a_stock_proxys_handoff_computes_one_token(
    pair: tuple[Server, Server], expected: dict[Prompt, list[int]]
) -> None:
    check_last_token(*pair, ASKED, expected.__getitem__, "proxy")


def test_unlike_modes_block_sizes_and_lengths_are_converted(
    granite: Site, pair: tuple[Server, Server], expected: dict[Prompt, list[int]]
) -> None:
    """A state has a block of `max_model_len` tokens without prefix caching, and attention another one."""
    wide = (*UNCACHED, "--max-model-len", "2048", "--block-size", "256")
    of_d = transfer("BatonPullConnector", "kv_consumer", "d-wide")
    of_p = transfer("BatonPullConnector", "kv_producer", "p-long")
    unlike = granite.cast(
        "aligned", P, D, VllmPlan("d-wide", of_d, extra=wide), VllmPlan("p-long", of_p, extra=UNCACHED)
    )
    for p, d in (("p", "d-wide"), ("p-long", "d-wide"), ("p-long", "d")):
        check_last_token(unlike[p], unlike[d], ASKED, expected.__getitem__, f"{p} to {d}")


def test_a_consumer_that_lacks_only_the_states_reads_little_more(
    pair: tuple[Server, Server], expected: dict[Prompt, list[int]]
) -> None:
    """D has the blocks of attention without a state: it reads the last block and the states."""
    p, d = pair
    prompt = ASKED[-1]
    moved, hits = [], []
    for _ in range(2):
        before = d.metric(MOVED), d.metric(TRANSFERS), d.num_computed()
        hits_before = p.metric("vllm:prefix_cache_hits_total")
        params = p.prefill(prompt, cache_salt="twice")
        assert d.tokens(prompt, params, cache_salt="twice") == expected[prompt]
        d.wait_metric(TRANSFERS, lambda num, before=before: num == before[1] + 1)
        d.check_computed(lambda expected=before[2] + 1: expected)
        moved.append(d.metric(MOVED) - before[0])
        hits.append(p.metric("vllm:prefix_cache_hits_total") - hits_before)
    num_blocks = -(-(len(prompt) - 1) // BLOCK)
    of_states = NUM_STATE_LAYERS * STATE_BYTES
    assert moved == [num_blocks * BLOCK_BYTES + of_states, BLOCK_BYTES + of_states]
    assert hits == [0, (num_blocks - 1) * BLOCK], "P has the state at the end of the last full block"


# --- Stored states ---------------------------------------------------------------------------------


def after_boundary(prompt: Prompt) -> int:
    """Tokens that an engine computes with the state at the last end of a block that a repetition can use."""
    return len(prompt) - (len(prompt) - 1) // BLOCK * BLOCK


def check_loads(engine: Server, asked: Sequence[Prompt], answer: Callable[[Prompt], list[int]]) -> None:
    for prompt in asked:
        num_computed = engine.num_computed()
        loaded = engine.metric(BY_SOURCE, source="external_kv_transfer")
        assert engine.tokens(prompt) == answer(prompt), len(prompt)
        by_engine = after_boundary(prompt)
        engine.check_computed(lambda expected=num_computed + by_engine: expected)
        of_store = engine.metric(BY_SOURCE, source="external_kv_transfer") - loaded
        assert of_store == len(prompt) - by_engine, "nothing was left in the engine's own cache"


def fill_pool(engine: Server) -> None:
    """Takes every block of a small pool, so that its cache keeps nothing of other prompts."""
    for salt in ("fill", "again"):
        engine.tokens(FILLER, cache_salt=salt, max_tokens=1)


def zeroing(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The settings `config`, with a connector that stores zeros for states."""
    program = ZEROING.format(connector=config["kv_connector"])
    (folder / "zeroing.py").write_text(program)
    return {**config, "kv_connector": "Zeroing", "kv_connector_module_path": "zeroing"}


def test_states_return_from_host_memory(
    granite: Site, expected: dict[Prompt, list[int]], tmp_path: Path
) -> None:
    config = transfer("BatonOffloadConnector", "kv_both", "o", extra={"cpu_gib": 0.1})
    of_zeros = zeroing(tmp_path, config)
    engines = granite.cast(
        "offload",
        VllmPlan("o", config, extra=SMALL_POOL),
        VllmPlan("zeros", of_zeros, extra=SMALL_POOL, path=(str(tmp_path),)),
    )
    for engine in engines.values():
        for prompt in STORED:
            assert engine.tokens(prompt) == expected[prompt]
        fill_pool(engine)
    o, zeros = engines["o"], engines["zeros"]
    for prompt in STORED:
        check_loads(o, [prompt], expected.__getitem__)
        fill_pool(o)
        assert zeros.tokens(prompt) != expected[prompt], "the state is that of the store"
        fill_pool(zeros)
    assert o.metric("baton:kv_offload_failures_total") == 0


def test_states_return_from_a_folder_after_a_restart(
    granite: Site, expected: dict[Prompt, list[int]], tmp_path: Path
) -> None:
    def plan(name: str, folder: str) -> VllmPlan:
        extra = {"path": str(tmp_path / folder)}
        config = transfer("BatonSharedStorageConnector", "kv_both", name, extra=extra)
        if name == "zeros":
            config = zeroing(tmp_path, config)
        return VllmPlan(name, config, extra=ALIGNED, path=(str(tmp_path),))

    engines = granite.cast("storage", plan("a", "kv"), plan("zeros", "zeros"))
    for engine in engines.values():
        for prompt in STORED:
            assert engine.tokens(prompt) == expected[prompt]
    for folder, engine in (("kv", engines["a"]), ("zeros", engines["zeros"])):
        num_blocks = sum((len(prompt) - 1) // BLOCK for prompt in STORED)
        # A file for attention of each block, and one for the states of each prompt.
        wait_files(engine, tmp_path / folder, num_blocks + len(STORED))
    engines = granite.cast("restarted", plan("b", "kv"), plan("c", "zeros"))
    check_loads(engines["b"], STORED, expected.__getitem__)
    for prompt in STORED:
        assert engines["c"].tokens(prompt) != expected[prompt], "the state is that of the store"


def test_handoff_and_stores_in_vllms_multi_connector(
    granite: Site, expected: dict[Prompt, list[int]], tmp_path: Path
) -> None:
    files = {
        "kv_connector": "BatonSharedStorageConnector",
        "kv_connector_extra_config": {"path": str(tmp_path)},
    }
    memory = {"kv_connector": "BatonOffloadConnector", "kv_connector_extra_config": {"cpu_gib": 0.1}}
    of_p = in_company(transfer("BatonPushConnector", "kv_producer", "p"), files)
    of_d = in_company(transfer("BatonPushConnector", "kv_consumer", "d"), memory)
    engines = granite.cast("multi", VllmPlan("p", of_p, extra=ALIGNED), VllmPlan("d", of_d, extra=SMALL_POOL))
    p, d = engines["p"], engines["d"]
    for mode in ("pull", "push"):
        with granite.router(p, d, mode) as router:
            check_handoffs(router, d, ASKED, expected.__getitem__)
    assert files_in(tmp_path), "P has stored what it computed"
    for prompt in STORED:
        assert d.tokens(prompt) == expected[prompt]
    fill_pool(d)
    for prompt in STORED:
        check_loads(d, [prompt], expected.__getitem__)
        fill_pool(d)
