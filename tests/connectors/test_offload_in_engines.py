"""Embedded engines with offload give the answers of an engine that computes everything.

Worlds of `lab.sim` have copies that are late or fail, also while blocks are overwritten.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

from baton.core.config import ModelConfig
from baton.core.kv_events import BlockRemoved, BlockStored
from baton.core.kv_groups import is_hybrid
from baton.engine.api import SamplingParams
from baton.engine.core.engine_core import EngineCore
from tests.connectors.engine_world import FACTORY, GREEDY, ModelOf, core_in, prompt_of
from tests.connectors.offload_world import (
    BLOCK,
    Engine,
    config_of,
)

pytestmark = pytest.mark.slow
Start = Callable[..., Engine]


@pytest.fixture
def start(model: ModelConfig) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_engine(num_blocks: int = 40, **fields: Any) -> Engine:
            return Engine(core_in(stack, config_of(model, num_blocks, **fields)))

        yield start_engine


@pytest.fixture
def expected(start: Start) -> Callable[..., list[int]]:
    """The answer of an engine without a connector and with an empty cache."""
    alone = start(64, slots=None)

    def ask(prompt: list[int], sampling: SamplingParams = GREEDY) -> list[int]:
        alone.forget()
        return alone.tokens(prompt, sampling=sampling)

    return ask


@pytest.mark.parametrize(("eviction", "blocks_per_chunk"), [("lru", 1), ("arc", 3), ("learned", 1)])
def test_a_repeated_prompt_is_loaded_with_the_same_tokens(
    start: Start, expected: Callable[..., list[int]], eviction: str, blocks_per_chunk: int
) -> None:
    engine = start(extra={"eviction": eviction, "blocks_per_chunk": blocks_per_chunk})
    prompts = [prompt_of(50), prompt_of(3), prompt_of(32, step=11), [*prompt_of(30), 9, 9, 9], prompt_of(50)]
    for prompt in (*prompts, *prompts):
        engine.forget()
        assert engine.tokens(prompt) == expected(prompt)
    assert engine.counts["hit_tokens"] > 100
    loaded = engine.ask(prompt_of(40, step=3))
    assert loaded.num_transferred_tokens == 0
    engine.assert_whole()


def test_hits_with_twice_the_memory_are_those_of_an_engine_that_has_it(start: Start) -> None:
    small, large = start(slots=20), start(slots=40)
    prompts = [prompt_of(30, step=3 + index) for index in range(5)]
    for prompt in (*prompts, prompts[4], prompts[0], *prompts):
        for engine in (small, large):
            engine.forget()
            engine.tokens(prompt)
    assert small.counts["hit_tokens"] < large.counts["hit_tokens"]
    assert small.counts["twice_hit_tokens"] == large.counts["hit_tokens"]


def test_answers_are_found_too_unless_only_prompts_are_stored(start: Start) -> None:
    for prompt_only in (False, True):
        engine = start(extra={"prompt_only": prompt_only})
        prompt = prompt_of(16)
        answer = engine.tokens(prompt)
        engine.forget()
        again = engine.ask([*prompt, *answer, 7])
        assert again.num_transferred_tokens == (16 if prompt_only else 24)


def test_blocks_can_be_found_while_the_request_that_computes_them_still_runs(start: Start) -> None:
    engine = start(max_num_batched_tokens=8)
    engine.add("long", prompt_of(60))
    for _ in range(4):
        engine.step()
    assert engine.half._index.num_found(engine.half._prompts["long"].keys) == 8
    engine.run()


def test_the_rest_of_a_prompt_is_loaded_after_a_local_hit(
    start: Start, expected: Callable[..., list[int]]
) -> None:
    """The pool evicts the end of a prompt first, so its local hit is the beginning."""
    engine = start(24, extra={"blocks_per_chunk": 2})
    prompt = prompt_of(60)
    assert engine.tokens(prompt) == expected(prompt)
    engine.tokens(prompt_of(35, step=11))  # The prompt takes some of the blocks.
    again = engine.ask(prompt)
    assert again.token_ids == expected(prompt)
    assert 0 < again.num_transferred_tokens < again.num_cached_tokens
    engine.assert_whole()


@pytest.mark.parametrize("eviction", ["lru", "arc", "learned"])
def test_a_small_host_memory_evicts_and_tokens_stay_right(
    start: Start, expected: Callable[..., list[int]], eviction: str
) -> None:
    engine = start(slots=14, extra={"eviction": eviction})
    prompts = [prompt_of(30, step=3 + index) for index in range(5)] + [prompt_of(90, step=13)]
    for prompt in (*prompts, prompts[4], prompts[4], *prompts):
        engine.forget()
        assert engine.tokens(prompt) == expected(prompt)
    assert engine.counts["evicted_chunks"]
    assert engine.counts["hit_tokens"]
    assert engine.counts["not_stored_chunks"], "the prompt must be longer than the memory"
    engine.assert_whole()


@pytest.mark.parametrize(
    ("choice", "loads", "stores"),
    [("off", False, False), ("load_only", True, False), ("store_only", False, True)],
)
def test_a_request_can_opt_out(start: Start, choice: str, loads: bool, stores: bool) -> None:
    params = {"baton_offload": choice}
    engine = start()
    engine.tokens(prompt_of(40))
    engine.forget()
    assert bool(engine.ask(prompt_of(40), params=params).num_transferred_tokens) == loads
    engine.tokens(prompt_of(40, step=11), params=params)
    engine.forget()
    assert bool(engine.ask(prompt_of(40, step=11)).num_transferred_tokens) == stores


def test_an_unknown_choice_fails_the_request(start: Start) -> None:
    completion = start().ask(prompt_of(8), params={"baton_offload": "sometimes"})
    assert completion.finish_reason == "error"
    assert completion.error is not None
    assert "kv_transfer_params.baton_offload" in completion.error.message


def test_a_cache_salt_separates_users(start: Start) -> None:
    engine = start()
    engine.tokens(prompt_of(40), cache_salt="a")
    engine.forget()
    assert engine.ask(prompt_of(40), cache_salt="b").num_transferred_tokens == 0
    engine.forget()
    assert engine.ask(prompt_of(40), cache_salt="a").num_transferred_tokens == 36


def test_resetting_the_cache_clears_host_memory_too(start: Start) -> None:
    engine = start()
    engine.tokens(prompt_of(40))
    assert engine.core.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.ask(prompt_of(40)).num_transferred_tokens == 0


def test_events_describe_host_memory(start: Start) -> None:
    engine = start(slots=12, events=True)
    heard, held = engine.hear_events(), set[Any]()
    for step in (7, 11, 13, 7):
        engine.forget()
        engine.tokens(prompt_of(33, step=step))
        events, heard[:] = list(heard), []
        for event in events:
            if isinstance(event, BlockStored) and event.medium == "CPU":
                assert len(event.token_ids) == BLOCK * len(event.block_hashes)
                assert held.isdisjoint(event.block_hashes)
                held.update(event.block_hashes)
            elif isinstance(event, BlockRemoved) and event.medium == "CPU":
                assert held.issuperset(event.block_hashes)
                held.difference_update(event.block_hashes)
        index = engine.half._index
        ready, names = [key for key in index._entries if index.is_ready(key)], engine.half._events._announced
        assert held == {block for key in ready for block in names[key]}
    assert held


@pytest.mark.parametrize("family", ["gemma3", "mistral"])  # Some layers have a window; all have.
def test_layers_with_windows_load_the_blocks_in_their_window(family: str, model_of: ModelOf) -> None:
    model = model_of(family)
    config = config_of(model, 120, slots=200, max_num_batched_tokens=24)
    assert is_hybrid(config.kv_cache_groups)
    alone = msgspec.structs.replace(config, kv_transfer_config=None)
    engines = [Engine(EngineCore(config, FACTORY)), Engine(EngineCore(alone, None))]
    try:
        for prompt in (prompt_of(70), prompt_of(33, step=11), prompt_of(70), [*prompt_of(50), 9, 9]):
            answers = []
            for engine in engines:
                engine.forget()
                answers.append(engine.tokens(prompt))
            assert answers[0] == answers[1]
        assert engines[0].counts["hit_tokens"] > 100
        assert engines[0].core.scheduler.kv_cache.is_hybrid, "there must be several tables"
        engines[0].assert_whole()
    finally:
        for engine in engines:
            engine.core.shutdown()
