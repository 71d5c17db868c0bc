"""Engines whose cache has tokens before heads in a block (NHD), because a connector requires it.

The tokens are those of an engine that has heads first, whatever is loaded and from where.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.errors import ConfigError
from baton.engine.llm import LLM
from tests.connectors import engine_world
from tests.connectors.engine_world import (
    GREEDY,
    AnswerOf,
    ModelOf,
    Start,
    forget,
    hand_over,
    multi,
    prompt_of,
    store,
)
from tests.connectors.test_multi_in_engines import (
    OFFLOAD,
    PROMPT,
    PULL,
    PUSH,
    generate_until_loaded,
    storage,
    tokens_first_store,
)

MODULE = "tests.connectors.tokens_first"
TOKENS_FIRST = {"kv_connector": "TokensFirst", "kv_connector_module_path": MODULE}

pytestmark = pytest.mark.slow


def caches_of(llm: LLM) -> list[torch.Tensor]:
    return list(llm.core.executor._worker._runner._kv_caches.values())  # type: ignore[attr-defined]


def check_order(llm: LLM, *, has_tokens_first: bool) -> None:
    for cache in caches_of(llm):
        assert (cache.transpose(1, 2) if has_tokens_first else cache)[0].is_contiguous()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_store_that_requires_it_saves_and_loads(
    start: Start, alone: LLM, tmp_path: Path, mode: str
) -> None:
    engine = start(tokens_first_store(tmp_path))
    check_order(engine, has_tokens_first=True)
    prompts = [PROMPT, prompt_of(33, step=11), prompt_of(3)]
    expected = [completion.token_ids for completion in alone.generate(prompts, GREEDY)]
    for hits in ([0, 0, 0], [48, 32, 0]):
        answers = engine.generate(prompts, GREEDY, kv_transfer_params=[store(mode=mode)] * 3)
        assert [answer.token_ids for answer in answers] == expected
        assert [answer.num_transferred_tokens for answer in answers] == hits
        forget(engine)
    engine.generate([PROMPT], GREEDY, kv_transfer_params=[store(mode=mode)])
    assert engine_world.check_findable(engine, PROMPT, engine_world.store_half(engine)) == 12


@pytest.mark.parametrize("handoff", [PULL, PUSH], ids=["pull", "push"])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(True, True), (True, False), (False, True)],
    ids=["NHD to NHD", "NHD to HND", "HND to NHD"],
)
def test_ours_beside_it_hand_over_between_the_orders(
    start: Start, alone: LLM, handoff: dict[str, Any], theirs: bool, ours: bool
) -> None:
    pair = []
    for name, has_tokens_first in (("p", theirs), ("d", ours)):
        beside = [TOKENS_FIRST] if has_tokens_first else []
        engine_id = f"{name}-{handoff['kv_connector']}-{theirs}-{ours}"
        pair.append(start(multi(handoff, *beside, engine_id=engine_id)))
        check_order(pair[-1], has_tokens_first=has_tokens_first)
    (expected,) = alone.generate([PROMPT], GREEDY)
    decoded = hand_over(pair[0], pair[1], PROMPT)
    assert decoded.token_ids == expected.token_ids
    assert decoded.num_transferred_tokens > 0
    for engine in pair:
        forget(engine)
        engine.close()


def test_layers_lie_apart_where_only_one_child_prefers_cross_layer_blocks(start: Start, alone: LLM) -> None:
    extra: Any = PULL["kv_connector_extra_config"]
    together = {**PULL, "kv_connector_extra_config": {**extra, "cross_layer_blocks": True}}
    engine = start(multi(together, TOKENS_FIRST, engine_id="wish"))
    check_order(engine, has_tokens_first=True)
    assert all(cache.transpose(1, 2).is_contiguous() for cache in caches_of(engine))
    (expected,) = alone.generate([PROMPT], GREEDY)
    assert engine.generate([PROMPT], GREEDY)[0].token_ids == expected.token_ids
    forget(engine)


def test_an_engine_whose_children_require_two_orders_does_not_start(start: Start) -> None:
    heads_first = {**TOKENS_FIRST, "kv_connector": "HeadsFirst"}
    check_order(start(multi(heads_first, PULL, engine_id="heads-first")), has_tokens_first=False)
    with pytest.raises(ConfigError, match="TokensFirst needs 'NHD' and HeadsFirst needs 'HND'"):
        start(multi(PULL, TOKENS_FIRST, heads_first))


@pytest.mark.parametrize("kind", ["offload", "storage"])
def test_a_store_of_ours_beside_it_loads_what_it_stored(
    start: Start, alone: LLM, tmp_path: Path, kind: str
) -> None:
    beside = OFFLOAD if kind == "offload" else storage(tmp_path)
    engine = start(multi(beside, TOKENS_FIRST, engine_id=f"s-{kind}"))
    check_order(engine, has_tokens_first=True)
    (expected,) = alone.generate([PROMPT], GREEDY)
    assert generate_until_loaded(engine, PROMPT).token_ids == expected.token_ids
    forget(engine)
    if kind == "storage":  # A file has one order, so an engine of the other one reads it.
        heads_first = start({**beside, "engine_id": "heads"})
        check_order(heads_first, has_tokens_first=False)
        (loaded,) = heads_first.generate([PROMPT], GREEDY)
        assert loaded.token_ids == expected.token_ids
        assert loaded.num_transferred_tokens == 48
        forget(heads_first)


def test_layers_with_windows_share_memory_in_this_order_too(model_of: ModelOf, answer_of: AnswerOf) -> None:
    with engine_world.engines(model_of("gpt_oss")) as start:
        p = start({**PULL, "engine_id": "p"}, num_blocks=120)
        d = start(multi(PULL, TOKENS_FIRST, engine_id="d"), num_blocks=120)
        assert d.core.scheduler.kv_cache.is_hybrid
        check_order(d, has_tokens_first=True)
        for engine in (p, d):
            decoded = hand_over(p if engine is d else d, engine, PROMPT)
            assert decoded.token_ids == answer_of("gpt_oss", PROMPT)
            assert decoded.num_transferred_tokens > 0
            p.settle(engine_world.SETTLE_S)
            forget(p)
            forget(d)
