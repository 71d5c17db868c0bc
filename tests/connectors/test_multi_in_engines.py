"""Embedded engines with several connectors: the tokens are one engine's, regardless of the KV's source."""

from pathlib import Path
from typing import Any

import pytest

from baton.engine.llm import LLM
from tests.connectors.engine_world import (
    GREEDY,
    NO_STORE,
    ONE_TOKEN,
    PATIENT,
    SETTLE_S,
    AnswerOf,
    ModelOf,
    Start,
    check_findable,
    engines,
    faulty_store,
    forget,
    hand_over,
    multi,
    prompt_of,
    store,
    store_half,
    store_scheduler,
)
from tests.connectors.storage_world import settings_in

PULL = {
    "kv_connector": "BatonPullConnector",
    "kv_connector_extra_config": {"timers": PATIENT},
}
PUSH = {**PULL, "kv_connector": "BatonPushConnector"}
PROMPT = prompt_of(50)


def named(engine_id: str, *children: dict[str, Any]) -> dict[str, Any]:
    return multi(*children, engine_id=engine_id)


@pytest.mark.slow
@pytest.mark.parametrize("handoff", [PULL, PUSH], ids=["pull", "push"])
def test_a_handed_over_prompt_is_stored_by_another_child(
    start: Start, alone: LLM, tmp_path: Path, handoff: dict[str, Any]
) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "d").mkdir()
    p = start(named("p", handoff, faulty_store(tmp_path / "p")))
    d = start(named("d", handoff, faulty_store(tmp_path / "d")))
    (expected,) = alone.generate([PROMPT], GREEDY)

    (prefilled,) = p.generate([PROMPT], ONE_TOKEN, kv_transfer_params=[{"do_remote_decode": True}])
    params = prefilled.kv_transfer_params
    assert params is not None
    assert params["stored_blocks"] == 12, "the store's params"
    assert "baton_ticket" in params, "the pull connector's params"
    for _ in range(8):
        p.core.step()  # The store is done; the loan continues.
    assert p.core.scheduler.remote.num_held == 1
    (decoded,) = d.generate([PROMPT], GREEDY, kv_transfer_params=[params])
    assert decoded.token_ids == expected.token_ids
    assert decoded.num_transferred_tokens > 0
    p.settle(SETTLE_S)
    for engine in (p, d):
        forget(engine)  # Every block is free again.
        (again,) = engine.generate([PROMPT], GREEDY)
        assert again.token_ids == expected.token_ids
        assert again.num_transferred_tokens == 48, "loaded from the store"
        assert check_findable(engine, PROMPT, store_half(engine)) == 12
        (computed,) = engine.generate([PROMPT], GREEDY, kv_transfer_params=[NO_STORE])
        assert computed.token_ids == expected.token_ids
        forget(engine)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_first_one_with_tokens_loads_and_the_loan_of_the_other_ends(
    start: Start, alone: LLM, tmp_path: Path, mode: str
) -> None:
    p, d = start(named("p", PULL)), start(named("d", faulty_store(tmp_path), PULL))
    (expected,) = alone.generate([PROMPT], GREEDY)
    d.generate([PROMPT], ONE_TOKEN)
    forget(d)
    (prefilled,) = p.generate([PROMPT], ONE_TOKEN, kv_transfer_params=[{"do_remote_decode": True}])
    params = {**(prefilled.kv_transfer_params or {}), **store(mode=mode)}
    (decoded,) = d.generate([PROMPT], GREEDY, kv_transfer_params=[params])
    assert decoded.token_ids == expected.token_ids
    assert decoded.num_transferred_tokens == 48, "the store holds full blocks only"
    d.settle(SETTLE_S)
    p.settle(SETTLE_S)
    forget(p)


@pytest.mark.slow
def test_a_dead_child_does_not_affect_the_handoff(start: Start, alone: LLM, tmp_path: Path) -> None:
    p, d = start(named("p", PULL)), start(named("d", faulty_store(tmp_path), PULL))
    d.generate([PROMPT], ONE_TOKEN)
    forget(d)
    fault = store(mode="async", how="raise", bad=[0])
    ends = [d.generate([PROMPT], GREEDY, kv_transfer_params=[fault])[0].error is None for _ in range(4)]
    assert ends == [False, False, False, True], "repeated errors must retire it"
    prompts = [prompt_of(50, step=11), PROMPT]
    expected = alone.generate(prompts, GREEDY)
    for prompt, answer in zip(prompts, expected, strict=True):
        decoded = hand_over(p, d, prompt)
        assert decoded.token_ids == answer.token_ids
        assert decoded.num_transferred_tokens > 0
    p.settle(SETTLE_S)
    forget(p)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("forked_programs")
def test_ranks_of_two_engines_keep_the_children_apart(start: Start, alone: LLM, tmp_path: Path) -> None:
    """P's blocks have tokens before heads, as its store requires."""
    (tmp_path / "p").mkdir()
    (tmp_path / "d").mkdir()
    p = start(named("p", PULL, tokens_first_store(tmp_path / "p")), tp_size=2)
    d = start(named("d", faulty_store(tmp_path / "d"), PULL))
    (expected,) = alone.generate([PROMPT], GREEDY)
    decoded = hand_over(p, d, PROMPT)
    assert decoded.token_ids == expected.token_ids
    assert decoded.num_transferred_tokens > 0
    for engine in (p, d):
        forget(engine)
        (again,) = engine.generate([PROMPT], GREEDY)
        assert again.token_ids == expected.token_ids
        assert again.num_transferred_tokens == 48
    p.settle(SETTLE_S)
    p.close()


def tokens_first_store(folder: Path) -> dict[str, Any]:
    module = "tests.connectors.tokens_first"
    return faulty_store(folder, kv_connector="TokensFirstStore", kv_connector_module_path=module)


OFFLOAD = {"kv_connector": "BatonOffloadConnector", "kv_connector_extra_config": {"cpu_gib": 0.01}}


def storage(folder: Path) -> dict[str, Any]:
    extra = settings_in(folder, chunk_tokens=4)
    return {"kv_connector": "BatonSharedStorageConnector", "kv_connector_extra_config": extra}


def generate_until_loaded(llm: LLM, prompt: list[int], params: dict[str, Any] | None = None) -> Any:
    """Repeats the prompt until it is loaded, as stores run in the background. Returns the last answer."""
    for _ in range(200):
        forget(llm)
        (answer,) = llm.generate([prompt], GREEDY, kv_transfer_params=[params])
        if answer.num_transferred_tokens:
            return answer
    raise AssertionError("nothing was ever loaded")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["offload", "storage"])
def test_pull_with_one_of_our_stores(start: Start, alone: LLM, tmp_path: Path, kind: str) -> None:
    """D finds in its own store what it read from P, and P finds there what it computed."""
    beside = OFFLOAD if kind == "offload" else storage(tmp_path)
    p, d = (start(named(engine_id, PULL, beside)) for engine_id in "pd")
    (expected,) = alone.generate([PROMPT], GREEDY)
    decoded = hand_over(p, d, PROMPT)
    assert decoded.token_ids == expected.token_ids
    assert decoded.num_transferred_tokens > 0
    for engine in (p, d):
        again = generate_until_loaded(engine, PROMPT)
        assert again.token_ids == expected.token_ids
        forget(engine)


@pytest.mark.slow
def test_pull_with_shared_storage_and_several_block_tables(
    model_of: ModelOf, answer_of: AnswerOf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A new engine reads from the folder what D has read from P."""
    folder, expected = tmp_path, answer_of("gemma3", PROMPT)
    with engines(model_of("gemma3")) as start:
        p = start(named("p", PULL), num_blocks=120)
        d = start(named("d", PULL, storage(folder)), num_blocks=120)
        decoded = hand_over(p, d, PROMPT)
        assert decoded.token_ids == expected
        assert decoded.num_transferred_tokens > 0
        assert generate_until_loaded(d, PROMPT).token_ids == expected
        d.close()
        fresh = start(named("fresh", PULL, storage(folder)), num_blocks=120)
        loaded = generate_until_loaded(fresh, PROMPT)
        assert loaded.token_ids == expected
        assert loaded.num_transferred_tokens == 48
        for engine in (p, fresh):
            assert engine.core.scheduler.kv_cache.is_hybrid
            engine.settle(SETTLE_S)
        assert "block table" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "kind", "bad"),
    [
        ("recompute", "offload", [0]),
        ("recompute", "storage", [3]),
        ("fail", "offload", [*range(12)]),
        ("fail", "storage", [0]),
    ],
)
def test_a_store_drops_steps_with_a_failed_load(
    start: Start, alone: LLM, tmp_path: Path, policy: str, kind: str, bad: list[int]
) -> None:
    """Two children in one step: one loads garbage, the other stores what was computed with it."""
    (tmp_path / "faulty").mkdir()
    beside = OFFLOAD if kind == "offload" else storage(tmp_path / "shared")
    d = start({**multi(faulty_store(tmp_path / "faulty"), beside), "kv_load_failure_policy": policy})
    (expected,) = alone.generate([PROMPT], GREEDY)
    prompt = [*PROMPT[:49]]
    # The other engine must not know the prompt yet, so that it can store only what was loaded badly.
    other = start(faulty_store(tmp_path / "faulty"))
    other.generate([prompt], ONE_TOKEN)
    forget(other)
    store_scheduler(d).stored.update(store_scheduler(other).stored)
    fault = store(mode="sync", bad=bad)
    (first,) = d.generate([PROMPT], GREEDY, kv_transfer_params=[fault])
    assert first.token_ids == (expected.token_ids if policy == "recompute" else [])
    for _ in range(200):
        forget(d)
        (later,) = d.generate([PROMPT], GREEDY, kv_transfer_params=[NO_STORE])
        assert later.token_ids == expected.token_ids
        if later.num_transferred_tokens:
            break
    assert later.num_transferred_tokens > 0, "the other engine has stored it by now"
    forget(d)
